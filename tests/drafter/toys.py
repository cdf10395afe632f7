"""Toy drafters, and a second reading of the method to hold ours to: one row at a time, in numpy, float64."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map

from dflash_mlx.drafter import DraftConfig, DraftNetwork
from dflash_mlx.drafter.parts import Ends

VOCAB, HIDDEN, MASK = 40, 16, 39

_SHAPE: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0,
    "vocab_size": VOCAB,
    "num_target_layers": 6,
    "block_size": 6,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3]},
}


def toy_config(**changes: Any) -> dict[str, Any]:
    """A `config.json`; a key set to None is left out."""
    return {key: value for key, value in {**_SHAPE, **changes}.items() if value is not None}


def toy_network(*, seed: int = 0, draft_window: int | None = None, **changes: Any) -> DraftNetwork:
    """Large random weights, norms and biases included, so that nothing left out goes unseen."""
    return random_network(toy_config(**changes), draft_window=draft_window, seed=seed)


def random_network(
    config: dict[str, Any], *, ends: Ends | None = None, draft_window: int | None = None, seed: int = 0
) -> DraftNetwork:
    """The network of a config of any format, with the ends that its file would bring along."""
    read = DraftConfig.from_dict(config, name="toy").with_ends(ends or Ends())
    network = DraftNetwork(read.with_draft_window(draft_window), name="toy")
    mx.random.seed(seed)
    network.update(tree_map(_random, network.parameters()))
    mx.eval(network.parameters())
    return network


def _random(array: mx.array) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    if array.ndim == 1:
        return 1 + 0.3 * mx.random.normal(array.shape)
    return mx.random.normal(array.shape) * 1.5 / array.shape[-1] ** 0.5


def write_toy(folder: Path, network: DraftNetwork, config: dict[str, Any], **extra: mx.array) -> Path:
    """The network's weights and a config as a checkpoint folder; an extra None leaves that tensor out."""
    folder.mkdir(exist_ok=True)
    weights = dict(tree_flatten(network.parameters())) | extra
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class ToyEnds:
    """What a target lends its drafter."""

    def __init__(
        self, vocab_size: int = VOCAB, hidden_size: int = HIDDEN, logit_softcap: float | None = None
    ):
        self.name, self.vocab_size, self.hidden_size = "toy target", vocab_size, hidden_size
        self.logit_softcap = logit_softcap
        mx.random.seed(99)
        self.table = mx.random.normal((vocab_size, hidden_size))
        self.rows = mx.random.normal((vocab_size, hidden_size))
        self.bare = mx.random.normal((vocab_size, hidden_size))  # what `lookup` gives, another than `embed`
        mx.eval(self.table, self.rows, self.bare)

    def embed(self, ids: mx.array) -> mx.array:
        return self.table[ids]

    def lookup(self, ids: mx.array) -> mx.array:
        return self.bare[ids]

    def head(self, hidden: mx.array) -> mx.array:
        return hidden @ self.rows.T


def toy_features(count: int, *, taps: int = 2, seed: int = 1) -> mx.array:
    features = mx.random.normal((count, taps * HIDDEN), key=mx.random.key(seed))
    mx.eval(features)
    return features


def read_plainly(
    network: DraftNetwork, ends: ToyEnds, features: mx.array, anchor: int, block: int, *, shift: int = 0
) -> np.ndarray:
    """The draft's logits."""
    return read_block(network, ends, features, anchor, block, shift=shift).logits


def read_block(
    network: DraftNetwork, ends: ToyEnds, features: mx.array, anchor: int, block: int, *, shift: int = 0
) -> "Reading":
    """The draft of a block from all features at once: no cache, no shared projection, one query at a time."""
    config = network.config
    weights = {key: _numbers(value) for key, value in tree_flatten(network.parameters())}
    table, rows = _numbers(ends.table), _numbers(ends.rows)
    wavelengths = np.array(config.rope.wavelengths(config.head_dim))

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weights[f"{name}.weight"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    def rotate(x, position):
        angle = position / wavelengths
        a, b = np.split(x, 2)
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])

    def kernels(x, name):
        taps, width = config.parts.convolution.taps, config.hidden_size
        shared = linear(x, f"{name}.kernel_projection").reshape(len(x), 2, taps, -1)
        per_channel = np.repeat(shared, config.parts.convolution.group_size, axis=3)
        return weights[f"{name}.base_kernel"] + per_channel.reshape(len(x), 2, taps, width)

    def convolved(x, kernel):
        out = np.zeros_like(x)
        for t in range(len(x)):
            for tap in range(min(kernel.shape[1], t + 1)):
                out[t] += kernel[t, tap] * x[t - tap]
        return out

    def around(name, x, sublayer):
        if config.parts.convolution is None:
            return sublayer(x)
        both = kernels(x, name)
        return convolved(sublayer(convolved(x, both[:, 0])), both[:, 1])

    parts = config.parts
    count, heads, hd = features.shape[0], config.num_attention_heads, config.head_dim
    narrow = config.draft_window
    group = heads // config.num_key_value_heads
    tapped = _numbers(features)
    if parts.tap_norms:
        each = np.split(tapped, len(config.target_layer_ids), axis=-1)
        tapped = np.concatenate([norm(x, f"aux_hidden_norms.{i}") for i, x in enumerate(each)], axis=-1)
    context = norm(linear(tapped, "fc"), "hidden_norm")
    block -= parts.anchor_predicts
    table = weights.get("embed_tokens.weight", _numbers(ends.bare) if parts.raw_embedding else table)
    rows = weights.get("lm_head.weight", rows)
    ids = [anchor] + [config.mask_token_id] * (block - 1)
    hidden = table[ids] * config.input_embedding_scale
    for i in range(config.num_hidden_layers):
        at, window, causal = f"layers.{i}.", config.window(i), config.causal(i)
        attention = at + "self_attn."

        def attend(inside, at=at, window=window, causal=causal, attention=attention):
            seen_context = norm(context, at + "input_layernorm") if parts.context_norm else context
            both = np.concatenate([seen_context, inside])
            keys = linear(both, attention + "k_proj").reshape(count + block, -1, hd)
            values = linear(both, attention + "v_proj").reshape(count + block, -1, hd)
            queries = linear(inside, attention + "q_proj").reshape(block, -1, hd)
            mixed = np.zeros((block, heads, hd))
            for j in range(block):
                place = count + j
                if narrow is None or window is not None:
                    reach = min(window or place + 1, (narrow or place) + 1)
                    seen = [p for p in range(count) if place - p < reach]
                else:
                    first = min(4, narrow // 4)
                    seen = [p for p in range(count) if p < first or count - p <= narrow - first]
                seen += [count + k for k in range(block) if k <= j or not causal]
                for h in range(heads):
                    query = rotate(norm(queries[j, h], attention + "q_norm"), place + shift)
                    turned = [
                        rotate(norm(keys[p, h // group], attention + "k_norm"), p + shift) for p in seen
                    ]
                    scores = np.array(turned) @ query * hd**-0.5 * config.rope.amplitude() ** 2
                    share = np.exp(scores - scores.max())
                    mixed[j, h] = (share / share.sum()) @ values[seen, h // group]
            if parts.head_gate:
                mixed *= np.log1p(np.exp(linear(inside, attention + "g_proj")))[..., None]
            return linear(mixed.reshape(block, -1), attention + "o_proj")

        def mlp(inside, at=at):
            gate = linear(inside, at + "mlp.gate_proj")
            return linear(
                gate / (1 + np.exp(-gate)) * linear(inside, at + "mlp.up_proj"), at + "mlp.down_proj"
            )

        hidden = hidden + around(at + "attention_conv", norm(hidden, at + "input_layernorm"), attend)
        hidden = hidden + around(at + "mlp_conv", norm(hidden, at + "post_attention_layernorm"), mlp)
    predicting = norm(hidden[0 if parts.anchor_predicts else 1 :], "norm")
    logits = predicting @ rows.T * config.output_multiplier
    cap = config.final_logit_softcapping
    logits = np.tanh(logits / cap) * cap if cap else logits
    return Reading(logits, *_walked(config.parts, weights, predicting, logits, anchor))


class Reading(NamedTuple):
    """What a block gave, in float64."""

    logits: np.ndarray
    tokens: list[int]
    confidences: list[float]


def _walked(parts, weights, hidden, logits, anchor) -> tuple[list[int], list[float]]:
    """Left to right, every token seeing the one before it."""
    tokens, confidences = [], []
    before = anchor
    for row, scores in zip(hidden, logits, strict=True):
        ids = np.arange(len(scores))
        previous = before
        if parts.selector:
            named = "candidate_selector."
            ids = np.sort(np.argsort(-scores[: parts.selector.rows])[: parts.selector.top_k])
            follows = weights[named + "predecessor_codebook"][before] * (
                weights[named + "hidden_projection.weight"] @ row
            )
            scores = scores[ids] + weights[named + "successor_codebook"][ids] @ follows
        if parts.markov:
            scores = (
                scores
                + weights["markov_head.markov_w2.weight"] @ weights["markov_head.markov_w1.weight"][before]
            )
        share = np.exp(scores - scores.max())
        best = int(np.argmax(scores))
        before = int(ids[best])
        if parts.ends.offsets:
            before += int(weights["d2t"][before])
        tokens.append(before)
        sure = share[best] / share.sum()
        if parts.confidence_head:
            read = row
            if parts.confidence_sees_markov:
                read = np.concatenate([row, weights["markov_head.markov_w1.weight"][previous]])
            value = weights["confidence_head.proj.weight"][0] @ read + weights["confidence_head.proj.bias"][0]
            sure = 1 / (1 + np.exp(-value))
        confidences.append(float(sure))
    return tokens, confidences


def _numbers(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), dtype=np.float64)
