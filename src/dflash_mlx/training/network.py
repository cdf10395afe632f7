"""Many blocks of many answers through a draft network in one pass, with gradients.

The modules and weights are those of `drafter.network`; only how rows are laid out differs. What a block attends to are
its answer's context before the anchor and its own rows, so scores are [.., S + B] and never [.., S + A * B].
Shapes as in `blocks`, with K key-value heads of G queries each and heads of width W.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.drafter import DraftConfig, DraftNetwork
from dflash_mlx.drafter.network import Attention, Layer
from dflash_mlx.drafter.parts import Ends, Parts
from dflash_mlx.errors import UnsupportedError
from dflash_mlx.kernels import fastmath
from dflash_mlx.training.blocks import seen_context

_HIDDEN = -1e9  # added to scores that may not be seen


class Sight(NamedTuple):
    """What is added to a layer's scores: 0 where a row sees, -1e9 where it does not."""

    context: mx.array  # [N, A, 1 or B, S]
    block: mx.array | None  # [B, B]; None: all rows of a block see each other


class LayerRows(NamedTuple):
    """Keys, rotated, and values of the context in one layer."""

    keys: mx.array  # [N, K, S, W]
    values: mx.array


def check_trainable(config: DraftConfig, name: str) -> None:
    """Refuse what this pass does not know.

    Raises:
        UnsupportedError: the drafter has parts beyond the v1 network.
    """
    if config.parts != Parts(ends=Ends()):
        raise UnsupportedError(
            f"{name} is not a drafter of the v1 format (fc, layers and norms alone); only such a one can be trained."
        )


def sights(config: DraftConfig, anchors: mx.array, context: int, block_size: int) -> list[Sight]:
    """What each layer's rows see, by its window and its causal rule; equal ones are one object."""
    made: dict[tuple[int | None, bool], Sight] = {}
    kinds = [(config.window(layer), config.causal(layer)) for layer in range(config.num_hidden_layers)]
    for window, causal in kinds:
        if (window, causal) not in made:
            seen = seen_context(anchors, context, block_size, window)
            later = mx.triu(mx.full((block_size, block_size), _HIDDEN), 1) if causal else None
            made[window, causal] = Sight(mx.where(seen, 0.0, _HIDDEN), later)
    return [made[kind] for kind in kinds]


def context_rows(network: DraftNetwork, features: mx.array) -> list[LayerRows]:
    """Features [N, S, F*D] of positions 0..S-1 to every layer's keys and values."""
    fused: mx.array = network.fuse(features)
    return [_context_of(layer.self_attn, fused) for layer in network.layers]


def drafted(
    network: DraftNetwork,
    block: mx.array,
    rows: list[LayerRows],
    anchors: mx.array,
    seen: list[Sight],
    *,
    checkpoint: bool = False,
) -> mx.array:
    """Embedded blocks [N, A, B, D] at anchors [N, A] to final normed rows [N, A, B - 1, D].

    With `checkpoint` a layer's inside is computed again for its gradient instead of being kept.
    """
    hidden = block
    for layer, context, sight in zip(network.layers, rows, seen, strict=True):
        run = _bound(layer)
        if checkpoint:
            run = nn.utils.checkpoint(layer, run)
        hidden = run(hidden, context.keys, context.values, anchors, sight)
    final: mx.array = network.norm(hidden[:, :, 1:])
    return final


_Run = Callable[[mx.array, mx.array, mx.array, mx.array, Sight], mx.array]


def _bound(layer: Layer) -> _Run:
    def run(hidden: mx.array, keys: mx.array, values: mx.array, anchors: mx.array, sight: Sight) -> mx.array:
        normed: mx.array = layer.input_layernorm(hidden)
        hidden = hidden + _attend(layer.self_attn, normed, keys, values, anchors, sight)
        rows: mx.array = layer.post_attention_layernorm(hidden)
        mlp = layer.mlp
        gated: mx.array = fastmath.swiglu(mlp.gate_proj(rows), mlp.up_proj(rows))  # type: ignore[assignment]
        return hidden + mlp.down_proj(gated)

    return run


def _context_of(attention: Attention, fused: mx.array) -> LayerRows:
    width, shape = attention.head_dim, fused.shape[:2]
    keys = attention.k_norm(attention.k_proj(fused).reshape(*shape, -1, width)).transpose(0, 2, 1, 3)
    values = attention.v_proj(fused).reshape(*shape, -1, width).transpose(0, 2, 1, 3)
    return LayerRows(attention._rope(keys, offset=0), values)


def _attend(
    attention: Attention, block: mx.array, keys: mx.array, values: mx.array, anchors: mx.array, sight: Sight
) -> mx.array:
    """Normed block rows [N, A, B, D] to what attention adds to them."""
    answers, count, rows, _ = block.shape
    width, kv_heads, context = attention.head_dim, keys.shape[1], keys.shape[2]
    offsets = anchors.reshape(-1)

    def heads(projected: mx.array) -> mx.array:
        return projected.reshape(answers * count, rows, -1, width).transpose(0, 2, 1, 3)

    queries = attention._rope(
        attention.q_norm(heads(attention.q_proj(block))) * attention.scale, offset=offsets
    )
    own_keys = attention._rope(attention.k_norm(heads(attention.k_proj(block))), offset=offsets)
    own_values = heads(attention.v_proj(block))  # [N*A, K, B, W]
    group = queries.shape[1] // kv_heads
    per_block = (answers, count, kv_heads, group * rows, width)
    queries = queries.reshape(per_block).transpose(0, 2, 1, 3, 4)  # [N, K, A, G*B, W]
    own = (answers, count, kv_heads, rows, width)
    mixed = _mix(
        queries,
        keys,
        values,
        own_keys.reshape(own).transpose(0, 2, 1, 3, 4),
        own_values.reshape(own).transpose(0, 2, 1, 3, 4),
        _spread(sight.context, group, (answers, 1, count, -1, context)),
        None if sight.block is None else mx.tile(sight.block, (group, 1)),
    )  # [N, K, A, G*B, W]
    mixed = mixed.reshape(answers, kv_heads, count, group, rows, width).transpose(0, 2, 4, 1, 3, 5)
    return attention.o_proj(mixed.reshape(answers, count, rows, -1))


def _spread(bias: mx.array, group: int, shape: tuple[int, ...]) -> mx.array:
    """[N, A, 1 or B, S] to the order of the queries, [N, 1, A, 1 or G*B, S]."""
    return (bias if bias.shape[2] == 1 else mx.tile(bias, (1, 1, group, 1))).reshape(shape)


def _mix(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    own_keys: mx.array,
    own_values: mx.array,
    hidden: mx.array,
    own_hidden: mx.array | None,
) -> mx.array:
    """Attention of scaled queries [N, K, A, R, W] over context [N, K, S, W] and own rows [N, K, A, B, W]."""

    @mx.custom_function
    def mix(
        queries: mx.array, keys: mx.array, values: mx.array, own_keys: mx.array, own_values: mx.array
    ) -> tuple[mx.array, mx.array, mx.array]:
        answers, kv_heads, count, rows, width = queries.shape
        flat = queries.reshape(answers, kv_heads, count * rows, width)
        scores = (flat @ keys.swapaxes(-1, -2)).reshape(answers, kv_heads, count, rows, -1) + hidden
        own_scores = queries @ own_keys.swapaxes(-1, -2)  # [N, K, A, R, B]
        if own_hidden is not None:
            own_scores = own_scores + own_hidden
        highest = mx.maximum(scores.max(-1, keepdims=True), own_scores.max(-1, keepdims=True))
        weights, own_weights = fastmath.exp(scores - highest), fastmath.exp(own_scores - highest)
        share = 1 / (weights.sum(-1, keepdims=True) + own_weights.sum(-1, keepdims=True))
        weights, own_weights = weights * share, own_weights * share
        mixed = (weights.reshape(answers, kv_heads, count * rows, -1) @ values).reshape(queries.shape)
        return mixed + own_weights @ own_values, weights, own_weights

    @mix.vjp
    def gradient(
        primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
    ) -> tuple[mx.array, ...]:
        queries, keys, values, own_keys, own_values = primals
        (above, _, _), (mixed, weights, own_weights) = cotangents, outputs
        answers, kv_heads, count, rows, width = queries.shape
        flat = (answers, kv_heads, count * rows, -1)
        level = (above * mixed).sum(-1, keepdims=True)
        sloped = (above.reshape(flat) @ values.swapaxes(-1, -2)).reshape(weights.shape)
        sloped = (weights * (sloped - level)).reshape(flat)
        own_sloped = own_weights * (above @ own_values.swapaxes(-1, -2) - level)
        return (
            (sloped @ keys).reshape(queries.shape) + own_sloped @ own_keys,
            sloped.swapaxes(-1, -2) @ queries.reshape(flat),
            weights.reshape(flat).swapaxes(-1, -2) @ above.reshape(flat),
            own_sloped.swapaxes(-1, -2) @ queries,
            own_weights.swapaxes(-1, -2) @ above,
        )

    found: tuple[mx.array, ...] = mix(queries, keys, values, own_keys, own_values)  # type: ignore[assignment]
    return found[0]
