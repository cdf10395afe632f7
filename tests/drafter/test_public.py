"""Public drafters by their real configs: the loader takes a file of exactly their tensors, as many as published.

The files are sparse: a real header over zeros that are never read.
"""

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.drafter import DraftConfig, DraftNetwork, checkpoint, load_draft
from tests.drafter.test_config import PUBLIC, new_layout

SLIDING = "sliding_attention"


def qwen3(
    layers: int, hidden: int, intermediate: int, heads: int, kv: int, vocab: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 128,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
        "dtype": "bfloat16",
        **more,
    }


def dflash2(block: int, mask: int, ids: list[int], targets: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "num_target_layers": targets,
        "dflash_config": {
            "block_size": block,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 256,
            "selector_top_k": 16,
            "mask_token_id": mask,
            "target_layer_ids": ids,
            **more,
        },
    }


def windowed(layers: int, window: int, theta: float) -> dict[str, Any]:
    return {
        "layer_types": [SLIDING] * layers,
        "sliding_window": window,
        "use_sliding_window": True,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


YARN = {"rope_type": "yarn", "rope_theta": 1e7, "factor": 32.0, "original_max_position_embeddings": 8192}
MUSE_IDS = [1, 13, 25, 37, 49]

# Config, tensors in the file, and its published size: parameters, or gigabytes where only these are told.
SECOND: dict[str, tuple[dict[str, Any], int, int | float | None]] = {
    "Qwen3.8-27B-DFlash2": (
        qwen3(5, 5120, 17408, 32, 8, 248320, **windowed(5, 2048, 1e7))
        | dflash2(8, 248070, [5, 19, 33, 47, 61], 64),
        81,
        1_924_404_480,
    ),
    "Qwen3.6-35B-A3B-DFlash2": (
        qwen3(6, 2048, 6144, 32, 8, 248320, **windowed(6, 2048, 1e7))
        | dflash2(8, 248077, [1, 6, 11, 16, 22, 27, 32, 37], 40),
        96,
        None,
    ),
    "Muse-Glimmer-30B-DFlash2": (
        qwen3(5, 6656, 19968, 32, 8, 202048, **windowed(5, 2048, 5e5))
        | {"rms_norm_eps": 1e-5}
        | dflash2(
            16, 201818, MUSE_IDS, 52, final_logit_softcapping=20.0, output_multiplier=0.19611613513818404
        ),
        81,
        5.54,
    ),
    "Muse-Glimmer-30B-assistant": (
        qwen3(5, 6656, 19968, 32, 8, 202048, **windowed(5, 2048, 5e5))
        | {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
        | {"block_size": 16, "mask_token_id": 201818, "target_layer_ids": MUSE_IDS},
        58,
        5.11,
    ),
    # 40 heads of 128 and an intermediate size of 10240 are inferred: nothing else makes the published count.
    "Qwen3.8-27B-DSpark": (
        qwen3(5, 5120, 10240, 40, 8, 248320, layer_types=["full_attention"] * 5, rope_parameters=YARN)
        | {"architectures": ["DSparkDraftModel"], "block_size": 7, "num_target_layers": 64}
        | {"markov_rank": 256, "markov_head_type": "vanilla", "draft_vocab_size": 248320}
        | {"enable_confidence_head": True, "confidence_head_with_markov": True}
        | {"dflash_config": {"mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61]}},
        62,
        1_359_284_737,
    ),
    "Laguna-S-DFlash": (
        qwen3(6, 3072, 12288, 72, 8, 100352, **windowed(6, 512, 5e5))
        | {"architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna", "gating": "per-head"}
        | {"draft_vocab_size": 100352, "eagle_aux_hidden_state_layer_ids": [2, 11, 20, 30, 39, 48]}
        | {
            "dflash_config": {
                "block_size": 16,
                "mask_token_id": 12,
                "num_target_layers": 48,
                "target_layer_ids": [1, 10, 19, 29, 38, 47],
                "causal": True,
            }
        },
        69,
        None,
    ),
}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a file of this config, under its format's own names."""
    network = DraftNetwork(DraftConfig.from_dict(config, name="public"), name="public")
    shapes = {key: tuple(array.shape) for key, array in tree_flatten(network.parameters())}
    if config["model_type"] == "muse_glimmer_assistant":
        shapes["encoder.fc.weight"] = shapes.pop("fc.weight")
        shapes["encoder.output_norm_enc.weight"] = shapes.pop("hidden_norm.weight")
    if config["model_type"] == "laguna":
        for layer in range(config["num_hidden_layers"]):
            at = f"layers.{layer}.self_attn."
            parts = [shapes.pop(f"{at}{part}_proj.weight") for part in "qkv"]
            shapes[f"{at}qkv_proj.weight"] = (sum(rows for rows, _ in parts), parts[0][1])
    return shapes


def write_sparse(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    header, end = {}, 0
    for key, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load a config with a file of zeros; tensors stay lazy."""
    monkeypatch.setattr(checkpoint, "_evaluate", lambda network, name: None)

    def loaded(config):
        write_sparse(tmp_path, config, shapes_of(config))
        return load_draft(tmp_path, name="public", dtype=mx.bfloat16)

    return loaded


@pytest.mark.parametrize("name", SECOND)
def test_a_public_drafter_loads_with_the_published_number_of_tensors_and_parameters(name, load):
    config, tensors, published = SECOND[name]
    assert len(shapes_of(config)) == tensors
    network = load(config)
    found = network.config.num_parameters()
    if isinstance(published, float):
        assert round(2 * found / 1e9, 2) == published
    elif published:
        assert found == published
    assert sum(array.size for _, array in tree_flatten(network.parameters())) == found


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_v1_drafter_loads_with_the_published_number_of_parameters(name, load):
    network = load(new_layout(PUBLIC[name]))
    assert sum(array.size for _, array in tree_flatten(network.parameters())) == PUBLIC[name][-1]


FULL = "full_attention"
# Earlier files of names above: config, and the published size in GiB.
EARLIER: dict[str, tuple[dict[str, Any], float]] = {
    "Qwen3.5-4B-DFlash": (
        qwen3(5, 2560, 9728, 32, 8, 248320, layer_types=[FULL] * 5, rope_theta=1e7, num_target_layers=32)
        | {
            "block_size": 16,
            "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 8, 15, 22, 29]},
        },
        1.00,
    ),
    "Qwen3.5-27B-DFlash": (
        qwen3(5, 5120, 17408, 32, 8, 248320, layer_types=[FULL] * 5, rope_theta=1e7, num_target_layers=64)
        | {
            "block_size": 16,
            "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
        },
        3.22,
    ),
    "Qwen3.6-35B-A3B-DFlash": (
        qwen3(8, 2048, 6144, 32, 4, 248320, layer_types=[FULL] * 8, rope_theta=1e7, num_target_layers=40)
        | {"rope_scaling": {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}}
        | {
            "block_size": 16,
            "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]},
        },
        0.88,
    ),
}


@pytest.mark.parametrize("name", EARLIER)
def test_an_earlier_file_of_the_same_name_loads_as_what_it_is(name, load):
    config, gigabytes = EARLIER[name]
    earlier = load(config | {"architectures": ["DFlashDraftModel"]}).config
    current = DraftConfig.from_dict(new_layout(PUBLIC[name]), name=name)
    assert round(2 * earlier.num_parameters() / 2**30, 2) == gigabytes
    assert (earlier.mask_token_id, current.mask_token_id) == (248070, 248077)
    assert [earlier.causal(0), current.causal(0)] == [False, True]
    assert len(earlier.target_layer_ids) == 5 and len(current.target_layer_ids) == 8
    assert earlier.rope.kind == ("yarn" if name == "Qwen3.6-35B-A3B-DFlash" else "default")


def test_what_the_public_second_generation_reads_and_drafts():
    read = {name: DraftConfig.from_dict(config, name=name) for name, (config, _, _) in SECOND.items()}
    assert {name: config.block_size for name, config in read.items()} == {
        "Qwen3.8-27B-DFlash2": 8,
        "Qwen3.6-35B-A3B-DFlash2": 8,
        "Muse-Glimmer-30B-DFlash2": 16,
        "Muse-Glimmer-30B-assistant": 16,
        "Qwen3.8-27B-DSpark": 8,  # its anchor and seven drafts
        "Laguna-S-DFlash": 16,
    }
    assert {config.causal(0) for config in read.values()} == {False, True}
    assert [name for name, config in read.items() if config.causal(0)] == ["Laguna-S-DFlash"]
    assert read["Muse-Glimmer-30B-DFlash2"].final_logit_softcapping == 20.0
    assert read["Qwen3.8-27B-DSpark"].rope.amplitude() == pytest.approx(0.1 * math.log(32) + 1)
