"""The draft network: embedded block rows and fused target features in, final hidden rows out.

A dense Qwen3-style decoder whose layers also attend to keys and values made from the target's features. What a
format adds to it (`Parts`) is there or None; embedding and head are the target's unless the file brings its own.
Attribute names are those of the checkpoints.
"""

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.core import Proposal
from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.context import Context, LayerContext
from dflash_mlx.drafter.convolution import GroupedConvolution, around
from dflash_mlx.drafter.frequent import FrequentWords
from dflash_mlx.drafter.parts import Parts
from dflash_mlx.drafter.rope import Rope
from dflash_mlx.drafter.walks import CandidateSelector, ConfidenceHead, MarkovHead, most_probable, translated
from dflash_mlx.kernels import context_rows
from dflash_mlx.kernels.attention import cached_block_attention
from dflash_mlx.kernels.choice import NO_KERNELS, Choices


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
        self._kv_heads = kv_heads
        self._causal = config.causal(layer)
        self.q_proj = nn.Linear(hidden, heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * config.head_dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.g_proj = nn.Linear(hidden, heads, bias=False) if config.parts.head_gate else None

    def __call__(
        self, block: mx.array, fused: mx.array | None, context: LayerContext, start: int, choices: Choices
    ) -> mx.array:
        """Attend from normed block rows [1, B, D] at start + j; fused rows [1, S, D] enter the context."""
        kept = 0 if fused is None else fused.shape[1]
        rows = block if fused is None else mx.concatenate([fused, block], axis=1)  # [1, S + B, D]
        keys, values = self._keys_values(rows, start - kept, choices)
        keys, values = context.extend(keys, values, keep=kept)
        queries = self.q_norm(self._heads(self.q_proj(block))).transpose(0, 2, 1, 3)
        queries = self._rope(queries, offset=start)
        mixed = cached_block_attention(
            queries,
            keys,
            values,
            scale=self.scale,
            causal=self._causal,
            window=context.sight.window,
            choices=choices,
        )
        mixed = mixed.transpose(0, 2, 1, 3)  # [1, B, H, hd]
        if self.g_proj is not None:
            gate = nn.softplus(self.g_proj(block).astype(mx.float32))
            mixed = mixed * gate[..., None].astype(mixed.dtype)
        return self.o_proj(mixed.flatten(2))

    def absorb(self, fused: mx.array, context: LayerContext, start: int, choices: Choices) -> None:
        """Let fused rows [1, S, D], the last of which stands right before start, enter the context."""
        keys, values = self._keys_values(fused, start - fused.shape[1], choices)
        context.extend(keys, values, keep=fused.shape[1])

    def _keys_values(self, rows: mx.array, offset: int, choices: Choices) -> tuple[mx.array, mx.array]:
        """Rows [1, S, D] at offset + s to rotated keys and to values, both [1, H, S, hd]."""
        keys, values = self.k_proj(rows), self.v_proj(rows)
        if choices is not NO_KERNELS and context_rows.is_chosen(keys[0], values[0], self._kv_heads, choices):
            return context_rows.context_rows(
                keys[0],
                values[0],
                heads=self._kv_heads,
                norm_weight=self.k_norm.weight,
                eps=self.k_norm.eps,
                inverse_frequencies=self._rope.inverse_frequencies,
                offset=offset,
                choices=choices,
            )
        keys = self.k_norm(self._heads(keys)).transpose(0, 2, 1, 3)
        return self._rope(keys, offset=offset), self._heads(values).transpose(0, 2, 1, 3)

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
        self._context_norm = config.parts.context_norm
        convolution, width = config.parts.convolution, config.hidden_size
        self.attention_conv = GroupedConvolution(convolution, width) if convolution else None
        self.mlp_conv = GroupedConvolution(convolution, width) if convolution else None

    def __call__(
        self, hidden: mx.array, fused: mx.array | None, context: LayerContext, start: int, choices: Choices
    ) -> mx.array:
        """[1, B, D] to [1, B, D]."""
        seen = None if fused is None else self._context_rows(fused)
        hidden = hidden + around(
            self.attention_conv,
            self.input_layernorm(hidden),
            lambda rows: self.self_attn(rows, seen, context, start, choices),
        )
        return hidden + around(self.mlp_conv, self.post_attention_layernorm(hidden), self.mlp)

    def absorb(self, fused: mx.array, context: LayerContext, start: int, choices: Choices) -> None:
        """Let fused rows [1, S, D], the last of which stands right before start, enter the context."""
        self.self_attn.absorb(self._context_rows(fused), context, start, choices)

    def _context_rows(self, fused: mx.array) -> mx.array:
        return self.input_layernorm(fused) if self._context_norm else fused


class DraftNetwork(nn.Module):
    """The network of one checkpoint; holds weights and no state of a generation."""

    def __init__(self, config: DraftConfig, *, name: str) -> None:
        super().__init__()
        self.config = config
        self.name = name
        self.bits: int | None = None  # of the weights as they are held; None: not quantised
        self.choices = NO_KERNELS  # set once, before the first generation
        self.frequent: FrequentWords | None = None  # what lay beside its file
        rope = Rope(config.rope, config.head_dim)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [Layer(config, layer, rope) for layer in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._add(config.parts)

    def _add(self, parts: Parts) -> None:
        """What the format has beyond v1, under the checkpoint's names; None where there is nothing."""
        config, hidden, ends = self.config, self.config.hidden_size, parts.ends
        norms = [nn.RMSNorm(hidden, eps=config.rms_norm_eps) for _ in config.target_layer_ids]
        self.aux_hidden_norms = norms if parts.tap_norms else None
        self.candidate_selector = CandidateSelector(parts.selector, hidden) if parts.selector else None
        self.markov_head = MarkovHead(parts.markov) if parts.markov else None
        self.confidence_head = ConfidenceHead(config.confidence_width) if parts.confidence_head else None
        self.embed_tokens = nn.Embedding(ends.embedding_rows, hidden) if ends.embedding_rows else None
        self.lm_head = nn.Linear(hidden, ends.head_rows, bias=False) if ends.head_rows else None
        # Offsets from the head's ids to the target's.
        self.d2t = mx.zeros((ends.head_rows or 0,), mx.int32) if ends.offsets else None

    @property
    def dtype(self) -> mx.Dtype:
        """What activations are computed in."""
        return self.norm.weight.dtype

    def make_context(self) -> Context:
        """An empty context with each layer's own sight."""
        return Context(self.config.sights)

    def fuse(self, features: mx.array) -> mx.array:
        """Features [S, F*D] of S tokens to the one context row [S, D] that all layers share."""
        rows = features.astype(self.dtype)
        if self.aux_hidden_norms is not None:
            parts = mx.split(rows, len(self.aux_hidden_norms), axis=-1)
            rows = mx.concatenate(
                [norm(part) for norm, part in zip(self.aux_hidden_norms, parts, strict=True)], axis=-1
            )
        return self.hidden_norm(self.fc(rows))

    def __call__(self, block: mx.array, fused: mx.array | None, context: Context) -> mx.array:
        """Draft one block right after the context; fused rows [S, D], if any, enter the context first.

        Args:
            block: embedded anchor and masks [B, D]; one row fewer where the anchor slot predicts too.
            fused: rows of `fuse` for the tokens between the context and the anchor.
            context: changed, its buffers may be lazy until the result is evaluated.

        Returns:
            Final normed rows of the slots that predict [B-1, D].
        """
        start = context.length + (0 if fused is None else fused.shape[0])
        hidden = block[None].astype(self.dtype)
        for layer, rows in zip(self.layers, context.layers, strict=True):
            seen = None if fused is None else self._in_sight(layer, fused, rows, start)
            hidden = layer(hidden, seen, rows, start, self.choices)
        context.length = start
        return self.norm(hidden[0, 0 if self.config.parts.anchor_predicts else 1 :])

    def choose(
        self, hidden: mx.array, logits: mx.array, anchor: int, *, words: mx.array | None = None
    ) -> Proposal:
        """From normed rows [n, D] and logits [n, V] to the drafted tokens, as the format takes them; lazy.

        `words` [V] names the tokens that the logits are of; None: all, as the head numbers them.
        """
        if self.candidate_selector is not None:
            proposal = self.candidate_selector.walk(hidden, logits, anchor, words)
        elif self.markov_head is not None:
            assert words is None, "a Markov head biases all words"
            proposal = self.markov_head.walk(logits, anchor, self.d2t)
        else:
            tokens, confidences = most_probable(logits)
            tokens = translated(tokens, self.d2t) if words is None else words[tokens]
            proposal = Proposal(tokens, confidences)
        if self.confidence_head is None:
            return proposal
        if self.markov_head is not None and self.config.parts.confidence_sees_markov:
            seen = self.markov_head.before(proposal.tokens, anchor).astype(hidden.dtype)
            hidden = mx.concatenate([hidden, seen], axis=-1)
        return proposal._replace(confidences=self.confidence_head(hidden))

    def absorb(self, fused: mx.array, context: Context) -> None:
        """Let fused rows [S, D] enter the context without drafting; buffers are lazy afterwards."""
        context.length += fused.shape[0]
        for layer, rows in zip(self.layers, context.layers, strict=True):
            seen = self._in_sight(layer, fused, rows, context.length)
            layer.absorb(seen, rows, context.length, self.choices)

    def _in_sight(self, layer: Layer, fused: mx.array, context: LayerContext, end: int) -> mx.array:
        """The last of the fused rows [S, D], those that the token at `end` sees: [1, S', D].

        Where rows are left out, the first ones, which stay in sight for good, enter the context here.
        """
        first, last = context.wanted(count := fused.shape[0])
        if first + last == count:
            return fused[None]
        if first:
            layer.absorb(fused[None, :first], context, end - count + first, self.choices)
        context.skip()
        return fused[None, count - last :]
