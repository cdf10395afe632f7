"""Tiny random targets whose next token depends on everything before it."""

import copy
import functools
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

from dflash_mlx.target import MLXTarget, build, set_dtype

VOCAB = 128

_SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **_SHAPE},
    "qwen3-tied": {"model_type": "qwen3", **_SHAPE, "tie_word_embeddings": True},
    "llama": {"model_type": "llama", **_SHAPE},
    "qwen2": {"model_type": "qwen2", **_SHAPE},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_SHAPE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "phi3": {"model_type": "phi3", **_SHAPE},
    "smollm3": {"model_type": "smollm3", **_SHAPE, "no_rope_layer_interval": 4},
    # A scaled embedding and soft-capped logits.
    "gemma2": {
        "model_type": "gemma2",
        **_SHAPE,
        "query_pre_attn_scalar": 16.0,
        "final_logit_softcapping": 30.0,
    },
    # Scaled embedding, residual and logits.
    "granite": {
        "model_type": "granite",
        **_SHAPE,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_bias": False,
        "mlp_bias": False,
    },
}

# Layouts of their own: heads, names of config entries, wrappers, tensors to leave out.
LAYOUTS: dict[str, dict[str, Any]] = {
    "cohere": {"model_type": "cohere", **_SHAPE, "logit_scale": 0.4, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2",
        "n_ctx": 512,
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 3,
        "n_positions": 512,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": VOCAB,
    },
    "mimo": {"model_type": "mimo", **_SHAPE, "num_nextn_predict_layers": 1},
    "mistral3": {"model_type": "mistral3", "text_config": {"model_type": "llama", **_SHAPE}},
    "qwen3_vl": {"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3", **_SHAPE}},
}


def tiny_target(
    kind: str = "qwen3", *, seed: int = 0, dtype: mx.Dtype = mx.float32, **changes: Any
) -> MLXTarget:
    """One of `CONFIGS` or `LAYOUTS` with changes."""
    return sharpened({**(CONFIGS | LAYOUTS)[kind], **changes}, f"tiny-{kind}", seed=seed, dtype=dtype)


def sharpened(
    config: dict[str, Any],
    name: str,
    *,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    kv_bits: int | None = None,
    gain: float = 2.0,
) -> MLXTarget:
    """A random model of mlx-lm's own classes: large weights, so that a wrong state changes the text.

    With a gain of 1 rounding is not amplified from layer to layer, so that states can be compared closely.
    """
    mx.random.seed(seed)
    model = build(copy.deepcopy(config))  # mlx-lm writes into what it is given
    model.update(tree_map_with_path(functools.partial(_sharpen, gain), model.parameters()))
    if "final_logit_softcapping" in (config.get("text_config") or config):
        inner = getattr(model, "language_model", model)
        inner.model.embed_tokens.weight *= 0.06  # keeps the logits where the cap still tells them apart
    set_dtype(model, dtype)
    return MLXTarget(model, config, name, kv_bits=kv_bits)


def _sharpen(gain: float, path: str, array: mx.array) -> mx.array:
    if path.endswith("A_log"):
        return mx.log(mx.random.uniform(0.02, 0.5, array.shape))  # a state that lasts for many tokens
    if array.ndim < 2:
        return array
    scale = 1.0 if "embed" in path else gain / array.shape[-1] ** 0.5
    return scale * mx.random.normal(array.shape)


def parameter_names(target: MLXTarget) -> list[str]:
    return [name for name, _ in tree_flatten(target.model.parameters())]
