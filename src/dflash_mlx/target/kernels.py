"""Kernels inside a stock model: its own forward, on the instance, with attention and products replaced.

In: an mlx-lm model and what was chosen. Out: the same model; `restore` of `kernels.layers` undoes it. An attention
module gets a subclass that runs the stock code object with its `scaled_dot_product_attention` rebound: nothing
is copied, and no class or function of mlx or mlx-lm changes.
"""

import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

from dflash_mlx.kernels import attention, attention_plan, greedy_walk, layers
from dflash_mlx.kernels.choice import Choices, Contest
from dflash_mlx.target import experts

_NAME = "scaled_dot_product_attention"
_STOCK = base.scaled_dot_product_attention
_Attend = Callable[..., mx.array]  # mlx-lm's signature of it


class AttentionShape(NamedTuple):
    """What a class of attention depends on besides rows and keys."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: mx.Dtype


class Shapes(NamedTuple):
    """What one forward showed of a model, as far as the kernels cover it."""

    attentions: frozenset[AttentionShape]
    experts_per_row: experts.PerRow


def give(model: nn.Module, shapes: Shapes, choices: Choices) -> None:
    """Let the model run the chosen kernels in passes of 2 to 32 rows; all else is the stock forward."""
    layers.give_products(model, choices)
    experts.give(model, shapes.experts_per_row, choices)
    _rebind(model, _attend_with(choices))


def shapes(model: nn.Module, forward: Callable[[], mx.array], *, rows: int) -> Shapes:
    """What `forward`, a pass of `rows` rows (two or more), shows of the model."""
    attentions: set[AttentionShape] = set()
    experts_per_row: experts.PerRow = {}

    def watch(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> mx.array:
        if _is_plain(queries, cache, mask, sinks):
            attentions.add(AttentionShape(queries.shape[1], keys.shape[1], queries.shape[3], queries.dtype))
        return _STOCK(queries, keys, values, cache, scale, mask, sinks)

    before = [(module, type(module)) for _, module in model.named_modules()]
    _rebind(model, watch)
    experts.watch(model, rows, experts_per_row)
    try:
        mx.eval(forward())
    finally:
        for module, kind in before:
            module.__class__ = kind
    covered = frozenset(shape for shape in attentions if attention_plan.covers(*shape))
    return Shapes(covered, experts_per_row)


def contests(
    model: nn.Module,
    shapes: Shapes,
    *,
    vocab_size: int,
    dtype: mx.Dtype,
    block_size: int,
    key_bands: list[int],
) -> Iterator[Contest]:
    """What a verify pass of 2 to `block_size` rows could use, one contest for each class."""
    for rows in attention_plan.row_bands(block_size):
        for shape in sorted(shapes.attentions, key=str):
            for keys in key_bands:
                yield attention.contest(rows, **shape._asdict(), keys=keys)
        yield greedy_walk.contest(rows, vocab_size, dtype)
    yield from layers.contests(model, range(2, block_size + 1), dtype)
    yield from experts.contests(model, shapes.experts_per_row, block_size=block_size, dtype=dtype)


def _rebind(model: nn.Module, attend: _Attend) -> None:
    made: dict[type[nn.Module], type[nn.Module]] = {}
    for _, module in model.named_modules():
        stock = layers.stock_class(module)
        if stock not in made and _calls_attention(stock):
            made[stock] = layers.like(stock, __call__=_rebound(stock.__call__, attend))
        if stock in made:
            module.__class__ = made[stock]


def _calls_attention(kind: type[nn.Module]) -> bool:
    call = kind.__call__
    return (
        isinstance(call, types.FunctionType)
        and _NAME in call.__code__.co_names
        and call.__globals__.get(_NAME) is _STOCK
    )


def _rebound(call: Any, attend: _Attend) -> types.FunctionType:
    """The same code, that finds `attend` under the name of mlx-lm's attention."""
    names = {**call.__globals__, _NAME: attend}
    made = types.FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    made.__kwdefaults__ = call.__kwdefaults__
    return made


def _attend_with(choices: Choices) -> _Attend:
    def attend(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> mx.array:
        if not _is_plain(queries, cache, mask, sinks):
            return _STOCK(queries, keys, values, cache, scale, mask, sinks)
        return attention.cached_block_attention(
            queries, keys, values, scale=scale, causal=mask == "causal", choices=choices
        )

    return attend


def _is_plain(queries: mx.array, cache: Any, mask: Any, sinks: Any) -> bool:
    """Whether this is attention as `cached_block_attention` means it, over an unquantised cache."""
    return (
        2 <= queries.shape[2] <= attention_plan.MAX_ROWS
        and (mask is None or (isinstance(mask, str) and mask == "causal"))
        and sinks is None
        and not hasattr(cache, "bits")
    )
