"""The draft network: embedded block rows and fused target features in, final hidden rows out.

A dense Qwen3-style decoder whose layers also attend to keys and values made from the target's features. It
has no embedding and no head of its own; both are the target's. Attribute names are those of the checkpoints.
"""

from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.context import Context, LayerContext
from dflash_mlx.drafter.rope import Rope

Mask = mx.array | Literal["causal"] | None


class Attention(nn.Module):
    """Queries from the block; keys and values from context and block through the same projections."""

    def __init__(self, config: DraftConfig, layer: int, rope: Rope) -> None:
        super().__init__()
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        bias = config.attention_bias
        self.head_dim = config.head_dim
        # The amplitude of YaRN multiplies queries and keys alike: squared, it is a factor of the scores.
        self.scale = config.head_dim**-0.5 * rope.amplitude**2
        self._rope = rope
        self.q_proj = nn.Linear(hidden, heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * config.head_dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def __call__(
        self, block: mx.array, fused: mx.array | None, context: LayerContext, start: int, mask: Mask
    ) -> mx.array:
        """Attend from normed block rows [1, B, D] at start + j; fused rows [1, S, D] enter the context."""
        kept = 0 if fused is None else fused.shape[1]
        rows = block if fused is None else mx.concatenate([fused, block], axis=1)  # [1, S + B, D]
        keys, values = self._keys_values(rows, start - kept)
        keys, values = context.extend(keys, values, keep=kept)
        queries = self.q_norm(self._heads(self.q_proj(block))).transpose(0, 2, 1, 3)
        queries = self._rope(queries, offset=start)
        mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        return self.o_proj(mixed.transpose(0, 2, 1, 3).flatten(2))

    def absorb(self, fused: mx.array, context: LayerContext, start: int) -> None:
        """Let fused rows [1, S, D], the last of which stands right before start, enter the context."""
        keys, values = self._keys_values(fused, start - fused.shape[1])
        context.extend(keys, values, keep=fused.shape[1])

    def _keys_values(self, rows: mx.array, offset: int) -> tuple[mx.array, mx.array]:
        keys = self.k_norm(self._heads(self.k_proj(rows))).transpose(0, 2, 1, 3)
        return self._rope(keys, offset=offset), self._heads(self.v_proj(rows)).transpose(0, 2, 1, 3)

    def _heads(self, rows: mx.array) -> mx.array:
        return rows.reshape(1, rows.shape[1], -1, self.head_dim)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, rows: mx.array) -> mx.array:
        """[1, B, D] to [1, B, D]."""
        return self.down_proj(nn.silu(self.gate_proj(rows)) * self.up_proj(rows))


class Layer(nn.Module):
    """One pre-norm layer; the context's rows pass its key and value projections and nothing else of it."""

    def __init__(self, config: DraftConfig, layer: int, rope: Rope) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer, rope)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(
        self, hidden: mx.array, fused: mx.array | None, context: LayerContext, start: int, mask: Mask
    ) -> mx.array:
        """[1, B, D] to [1, B, D]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), fused, context, start, mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftNetwork(nn.Module):
    """The network of one checkpoint; holds weights and no state of a generation."""

    def __init__(self, config: DraftConfig, *, name: str) -> None:
        super().__init__()
        self.config = config
        self.name = name
        self.bits: int | None = None  # of the weights as they are held; None: not quantised
        rope = Rope(config.rope, config.head_dim)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [Layer(config, layer, rope) for layer in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @property
    def dtype(self) -> mx.Dtype:
        """What activations are computed in."""
        return self.norm.weight.dtype

    def make_context(self) -> Context:
        """An empty context with each layer's own window."""
        return Context([self.config.window(layer) for layer in range(len(self.layers))])

    def fuse(self, features: mx.array) -> mx.array:
        """Features [S, F*D] of S tokens to the one context row [S, D] that all layers share."""
        return self.hidden_norm(self.fc(features.astype(self.dtype)))

    def __call__(self, block: mx.array, fused: mx.array | None, context: Context) -> mx.array:
        """Draft one block right after the context; fused rows [S, D], if any, enter the context first.

        Args:
            block: embedded anchor and masks [B, D].
            fused: rows of `fuse` for the tokens between the context and the anchor.
            context: changed, its buffers may be lazy until the result is evaluated.

        Returns:
            Final normed rows of the slots after the anchor [B-1, D].
        """
        start = context.length + (0 if fused is None else fused.shape[0])
        hidden = block[None].astype(self.dtype)
        masks: dict[tuple[int, int | None, bool], Mask] = {}
        for index, (layer, rows) in enumerate(zip(self.layers, context.layers, strict=True)):
            seen = None if fused is None else _in_window(fused, rows.window)[None]
            visible = rows.seen_after(0 if seen is None else seen.shape[1])
            key = (visible, rows.window, self.config.causal(index))
            if key not in masks:
                masks[key] = _mask(visible, block.shape[0], rows.window, causal=key[2])
            hidden = layer(hidden, seen, rows, start, masks[key])
        context.length = start
        return self.norm(hidden[0, 1:])

    def absorb(self, fused: mx.array, context: Context) -> None:
        """Let fused rows [S, D] enter the context without drafting; buffers are lazy afterwards."""
        context.length += fused.shape[0]
        for layer, rows in zip(self.layers, context.layers, strict=True):
            layer.self_attn.absorb(_in_window(fused, rows.window)[None], rows, context.length)


def _in_window(fused: mx.array, window: int | None) -> mx.array:
    """The rows that a token right after them sees through the window."""
    return fused if window is None else fused[1 - window :]


def _mask(context: int, block: int, window: int | None, *, causal: bool) -> Mask:
    """What block rows may attend to among context rows, then block rows; the block is not windowed."""
    if window is None or context + block <= window:
        return "causal" if causal else None
    query = context + mx.arange(block)[:, None]
    key = mx.arange(context + block)[None]
    inside = (key <= query) if causal else mx.array(True)
    return mx.where(key < context, query - key < window, inside)
