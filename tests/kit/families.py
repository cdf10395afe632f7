"""Tiny random models of the families that drafters exist for: mlx-lm's own classes, the real configs' keys.

Every ring is shorter than the texts of the tests, every recurrence remembers, and every kind of layer comes at
least twice.
"""

import copy
from typing import Any

import mlx.core as mx

from dflash_mlx.target import MLXTarget
from tests.kit.models import CONFIGS, VOCAB, sharpened

WINDOW = 16  # tokens that a sliding layer sees

_SHAPE = CONFIGS["llama"]
_TEXT = {**_SHAPE, "model_type": "text"}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.25,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "shared_expert_intermediate_size": 32,
}
_MLA = {
    **_SHAPE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
_GEMMA3 = {
    **_SHAPE,
    "query_pre_attn_scalar": 16.0,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "rope_local_base_freq": 10000.0,
}
_GEMMA4 = {
    **_SHAPE,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
_MAMBA = {
    "attention_bias": False,
    "mamba_proj_bias": False,
    "mlp_bias": False,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": CONFIGS["qwen3"],
    "qwen3_moe": CONFIGS["qwen3_moe"],
    "llama": CONFIGS["llama"],
    "qwen3_5": {"model_type": "qwen3_5", "text_config": {**_TEXT, **_DELTA, "model_type": "qwen3_5_text"}},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": {**_TEXT, **_DELTA, **_EXPERTS, "model_type": "qwen3_5_moe_text"},
    },
    "qwen3_next": {**_SHAPE, **_DELTA, **_EXPERTS, "model_type": "qwen3_next"},
    "gpt_oss": {
        **_SHAPE,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma3_text": {**_GEMMA3, "model_type": "gemma3_text"},
    "gemma3": {
        "model_type": "gemma3",
        "vocab_size": VOCAB,
        "text_config": {**_GEMMA3, "model_type": "gemma3_text"},
    },
    "gemma4": {
        "model_type": "gemma4",
        "vocab_size": VOCAB,
        "text_config": {**_GEMMA4, "model_type": "gemma4_text"},
    },
    # As in the small ones: the last layers read the caches of earlier ones, and every layer has its own embedding.
    "gemma4-shared": {
        "model_type": "gemma4",
        "vocab_size": VOCAB,
        "text_config": {
            **_GEMMA4,
            "model_type": "gemma4_text",
            "attention_k_eq_v": False,
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "use_double_wide_mlp": True,
        },
    },
    "gemma4-moe": {
        "model_type": "gemma4",
        "vocab_size": VOCAB,
        "text_config": {
            **_GEMMA4,
            "model_type": "gemma4_text",
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    },
    "deepseek_v3": {**_MLA, "model_type": "deepseek_v3"},
    "kimi_k25": {"model_type": "kimi_k25", "text_config": {**_MLA, "model_type": "kimi_k2"}},
    "minimax": {
        **_SHAPE,
        "model_type": "minimax",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 0,
        "rotary_dim": 8,
        "use_qk_norm": True,
    },
    "glm4_moe": {
        **_SHAPE,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "rope_scaling": None,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "nemotron_h": {
        **_SHAPE,
        **_MAMBA,
        "model_type": "nemotron_h",
        "num_hidden_layers": 6,
        "hybrid_override_pattern": "M*-M-*",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "n_groups": 2,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "falcon_h1": {
        **_SHAPE,
        **_MAMBA,
        "model_type": "falcon_h1",
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
        "mamba_rms_norm": True,
        "key_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 0.5,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": {
        **_SHAPE,
        **_MAMBA,
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention"] * 2,
        "embedding_multiplier": 0.3,
        "attention_multiplier": 0.25,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
        "position_embedding_type": "nope",
        "tie_word_embeddings": True,
    },
    "kimi_linear": {
        **_MLA,
        "model_type": "kimi_linear",
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "model_max_length": 512,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
    },
    "lfm2": {
        **_SHAPE,
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
    "olmo_hybrid": {
        **_SHAPE,
        **_DELTA,
        "model_type": "olmo_hybrid",
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            **_TEXT,
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "rope_scaling": None,
            "use_qk_norm": True,
            "num_hidden_layers": 8,
        },
    },
}


def family(
    name: str,
    *,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    kv_bits: int | None = None,
    gain: float = 2.0,
    **changes: Any,
) -> MLXTarget:
    """A target of this family with sharpened random weights; `changes` are entries of its text config."""
    config = copy.deepcopy(FAMILIES[name])
    config.get("text_config", config).update(changes)
    return sharpened(config, f"tiny-{name}", seed=seed, dtype=dtype, kv_bits=kv_bits, gain=gain)
