"""A stock mlx-lm model whose forward uses quick exponentials on a CPU, where MLX's own take a tenth of a pass.

For the length of a `with` block modules that call mlx-lm's `swiglu` or attention run their own code object with these
names rebound: nothing is copied, no class and no function of mlx or mlx-lm changes.
"""

import functools
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, base

from dflash_mlx.kernels import fastmath, layers

# Exponentials of a layer's attention; of fewer, the operations around them cost more than is saved.
WORTH = 8192

_STOCK_ATTENTION = base.scaled_dot_product_attention


class QuickForward:
    """The model's modules and what they become; `with quick():` lets them.

    Args:
        model: stock.
        worth: exponentials of a layer's attention from which it is replaced.
    """

    def __init__(self, model: nn.Module, *, worth: int = WORTH):
        replaced = {
            "scaled_dot_product_attention": (_STOCK_ATTENTION, functools.partial(_attend, worth)),
            "swiglu": (activations.swiglu, fastmath.gated),
        }
        made: dict[type[nn.Module], type[nn.Module] | None] = {}
        self._swaps: list[tuple[nn.Module, type[nn.Module]]] = []
        for _, module in model.named_modules():
            kind = type(module)
            if kind not in made:
                call = _rebound(kind.__call__, replaced)
                made[kind] = None if call is None else layers.like(kind, __call__=call)
            if (quick := made[kind]) is not None:
                self._swaps.append((module, quick))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Let the model run the quicker functions; nobody else may use it meanwhile."""
        before = [type(module) for module, _ in self._swaps]
        try:
            for module, quick in self._swaps:
                module.__class__ = quick
            yield
        finally:
            for (module, _), kind in zip(self._swaps, before, strict=True):
                module.__class__ = kind


@contextmanager
def quick_forward(model: nn.Module, dtype: mx.Dtype) -> Iterator[None]:
    """`QuickForward` for once, where it is quicker."""
    if not fastmath.is_quick(dtype):
        yield
        return
    with QuickForward(model)():
        yield


def _attend(
    worth: int,
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: Any = None,
) -> mx.array:
    causal = isinstance(mask, str) and mask == "causal"
    batch, heads, rows, width = queries.shape
    if (
        not (mask is None or causal or _is_shared(mask))
        or sinks is not None
        or hasattr(cache, "bits")  # its keys are packed
        or batch * heads * rows * keys.shape[2] < worth
    ):
        return _STOCK_ATTENTION(queries, keys, values, cache, scale, mask, sinks)
    kv_heads, seen = keys.shape[1:3]
    grouped = (queries * scale).reshape(batch, kv_heads, heads // kv_heads * rows, width)
    scores = grouped @ keys.swapaxes(-1, -2)  # [batch, kv_heads, groups * rows, seen]
    if causal:
        mask = mx.arange(seen - rows, seen)[:, None] >= mx.arange(seen)
    if mask is not None:
        mask = mask if mask.ndim == 2 else mask[:, :, None]
        scores = mx.where(mask, scores.reshape(batch, kv_heads, -1, rows, seen), -1e9)
    weights, total, _ = fastmath.softmax_parts(scores)
    shape = (batch, kv_heads, heads // kv_heads * rows)
    mixed = weights.reshape(*shape, seen) @ values / total.reshape(*shape, 1)
    return mixed.reshape(batch, heads, rows, values.shape[-1])


def _is_shared(mask: Any) -> bool:
    """Whether it is a mask [S, K] or [B, 1, S, K] of what may be seen, the same for all heads."""
    if not isinstance(mask, mx.array) or mask.dtype != mx.bool_:
        return False
    return mask.ndim == 2 or (mask.ndim == 4 and mask.shape[1] == 1)


def _rebound(call: Any, replaced: Mapping[str, tuple[Any, Any]]) -> types.FunctionType | None:
    """The same code with our functions under mlx-lm's names; None where it uses none of them."""
    if not isinstance(call, types.FunctionType):
        return None
    ours = {
        name: quick
        for name, (stock, quick) in replaced.items()
        if name in call.__code__.co_names and call.__globals__.get(name) is stock
    }
    if not ours:
        return None
    made = types.FunctionType(
        call.__code__, {**call.__globals__, **ours}, call.__name__, call.__defaults__, call.__closure__
    )
    made.__kwdefaults__ = call.__kwdefaults__
    return made
