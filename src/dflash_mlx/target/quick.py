"""A stock mlx-lm model whose forward uses quick exponentials while features are computed on a CPU.

For the length of a `with` block modules that call mlx-lm's `swiglu` or attention run their own code object with these
names rebound: nothing is copied, no class and no function of mlx or mlx-lm changes.
"""

import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, base

from dflash_mlx.kernels import fastmath, layers


@contextmanager
def quick_forward(model: nn.Module, dtype: mx.Dtype) -> Iterator[None]:
    """Let the model run the quicker functions, where they are quicker; nobody else may use it meanwhile."""
    if not fastmath.is_quick(dtype):
        yield
        return
    before = [(module, type(module)) for _, module in model.named_modules()]
    made: dict[type[nn.Module], type[nn.Module]] = {}
    try:
        for module, kind in before:
            if kind not in made and (call := _rebound(kind.__call__)) is not None:
                made[kind] = layers.like(kind, __call__=call)
            if kind in made:
                module.__class__ = made[kind]
        yield
    finally:
        for module, kind in before:
            module.__class__ = kind


def _attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: Any = None,
) -> mx.array:
    causal = isinstance(mask, str) and mask == "causal"
    if not (mask is None or causal) or sinks is not None or hasattr(cache, "bits"):
        return _STOCK_ATTENTION(queries, keys, values, cache, scale, mask, sinks)
    batch, heads, rows, width = queries.shape
    kv_heads, seen = keys.shape[1:3]
    grouped = (queries * scale).reshape(batch, kv_heads, heads // kv_heads * rows, width)
    scores = grouped @ keys.swapaxes(-1, -2)  # [batch, kv_heads, groups * rows, seen]
    if causal:
        back = mx.arange(seen - rows, seen)[:, None] - mx.arange(seen)
        hidden = mx.where(back < 0, -1e9, 0.0).astype(scores.dtype)
        scores = scores.reshape(batch, kv_heads, -1, rows, seen) + hidden
    weights, total, _ = fastmath.softmax_parts(scores)
    shape = (batch, kv_heads, heads // kv_heads * rows)
    mixed = weights.reshape(*shape, seen) @ values / total.reshape(*shape, 1)
    return mixed.reshape(batch, heads, rows, values.shape[-1])


_STOCK_ATTENTION = base.scaled_dot_product_attention
_REPLACED: Mapping[str, tuple[Any, Any]] = {
    "scaled_dot_product_attention": (_STOCK_ATTENTION, _attend),
    "swiglu": (activations.swiglu, fastmath.swiglu),
}


def _rebound(call: Any) -> types.FunctionType | None:
    """The same code with our functions under mlx-lm's names; None where it uses none of them."""
    if not isinstance(call, types.FunctionType):
        return None
    ours = {
        name: quick
        for name, (stock, quick) in _REPLACED.items()
        if name in call.__code__.co_names and call.__globals__.get(name) is stock
    }
    if not ours:
        return None
    made = types.FunctionType(
        call.__code__, {**call.__globals__, **ours}, call.__name__, call.__defaults__, call.__closure__
    )
    made.__kwdefaults__ = call.__kwdefaults__
    return made
