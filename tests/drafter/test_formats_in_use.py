"""Drafters of every format through the public surface, and packed: at load, in their files, with mixed bits."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from dflash_mlx import DFlashGenerator
from dflash_mlx.drafter import Drafter, DraftNetwork, load_draft, save_draft
from dflash_mlx.drafter.parts import Ends
from dflash_mlx.errors import CheckpointError, PairError, UnsupportedError
from tests.drafter import test_formats as formats
from tests.drafter.toys import ToyEnds, random_network
from tests.kit.models import tiny_target
from tests.loading.checkpoints import DRAFT, VOCAB, write_target

SAMPLED = {"temperature": 0.8, "top_k": 50, "seed": 7}
MASK = VOCAB - 1
SHAPE = {key: DRAFT[key] for key in DRAFT if key not in ("architectures", "dflash_config", "block_size")}
TARGETS = SHAPE.pop("num_target_layers")
# The same five formats for the tiny pair; widths are multiples of 32, so that everything can be packed.
KINDS: dict[str, tuple[dict[str, Any], Ends]] = {
    "dflash2": (
        SHAPE
        | {"architectures": ["DFlash2DraftModel"], "is_causal": False}
        | {
            "dflash_config": {
                "mask_token_id": MASK,
                "target_layer_ids": [1, 2],
                "block_size": 8,
                "conv_kernel_size": 2,
                "conv_group_size": 16,
                "selector_rank": 32,
                "selector_top_k": 16,
            }
        },
        Ends(),
    ),
    "speculators": (
        {
            "speculators_model_type": "dflash",
            "transformer_layer_config": SHAPE,
            "aux_hidden_state_layer_ids": [0, 2],
            "mask_token_id": MASK,
            "draft_vocab_size": 128,
        },
        Ends(VOCAB, 128, True),
    ),
    "dspark": (
        SHAPE
        | {"architectures": ["Qwen3DSparkModel"], "block_size": 7}
        | {
            "mask_token_id": MASK,
            "target_layer_ids": [-1, 2],
            "markov_rank": 32,
            "markov_head_type": "vanilla",
        }
        | {"enable_confidence_head": True, "confidence_head_with_markov": True},
        Ends(VOCAB, VOCAB),
    ),
    "muse": (
        SHAPE
        | {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
        | {"block_size": 8, "mask_token_id": MASK, "target_layer_ids": [1, 2]},
        Ends(),
    ),
    "laguna": (
        SHAPE
        | {"architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna"}
        | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 12}
        | {
            "dflash_config": {
                "block_size": 8,
                "mask_token_id": MASK,
                "target_layer_ids": [1, 2],
                "causal": True,
            }
        },
        Ends(),
    ),
}


def network_of(kind: str) -> DraftNetwork:
    config, ends = KINDS[kind]
    network = random_network(config, ends=ends)
    if ends.offsets:
        network.d2t = mx.arange(128)  # draft id d is token 2 d
    return network


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    with DFlashGenerator(
        write_target(tmp_path_factory.mktemp("target"), eos_token_id=None), mode="off"
    ) as plain:
        yield plain


@pytest.mark.parametrize("kind", KINDS)
def test_drafted_text_is_plain_text_whatever_the_format(kind, target, tmp_path):
    folder = tmp_path / kind
    save_draft(network_of(kind), folder)
    with DFlashGenerator(target.target, folder, mode="on") as drafted:
        for options in ({}, SAMPLED):
            ours = drafted.generate("Say it.", max_new_tokens=24, **options)
            assert ours.token_ids == target.generate("Say it.", max_new_tokens=24, **options).token_ids
            assert (ours.stats.block_size, ours.stats.verified > 0) == (8, True)


def test_a_bare_embedding_is_the_table_without_the_model_s_scale():
    scaled = tiny_target("gemma2")
    ids = mx.array([3, 1, 4])
    assert mx.allclose(scaled.embed(ids), scaled.lookup(ids) * 64**0.5, rtol=1e-5)
    assert mx.array_equal(scaled.lookup(ids), scaled.model.model.embed_tokens(ids))


def test_a_bare_embedding_that_cannot_be_reached_is_refused():
    odd = tiny_target("gpt2", vocab_size=VOCAB)
    with pytest.raises(UnsupportedError, match="'gpt2' model keeps its embedding where"):
        Drafter(network_of("muse"), odd)


def test_a_drafter_of_another_format_for_another_target_is_refused(target, tmp_path):
    config, ends = KINDS["dspark"]
    save_draft(random_network(config | {"num_target_layers": TARGETS + 1}, ends=ends), tmp_path / "draft")
    with pytest.raises(PairError, match="made for 5 target layers, the target has 4"):
        DFlashGenerator(target.target, tmp_path / "draft", mode="on")


def bits_of(network: DraftNetwork) -> dict[str, int]:
    return {path: module.bits for path, module in network.named_modules() if path and hasattr(module, "bits")}


def logits_of(network: DraftNetwork) -> mx.array:
    drafter = Drafter(network, ToyEnds(VOCAB, 64))
    features = mx.random.normal((7, 128), key=mx.random.key(4))
    drafter.inject(features, 7)
    return drafter.logits(3, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_draft_bits_packs_a_drafter_of_every_format_and_what_is_saved_reads_again(kind, tmp_path):
    save_draft(network_of(kind), tmp_path / "whole")
    exact = logits_of(load_draft(tmp_path / "whole", name=kind))
    packed = load_draft(tmp_path / "whole", name=kind, bits=8)
    error = mx.linalg.norm(logits_of(packed) - exact) / mx.linalg.norm(exact)
    assert 0 < error.item() < 0.15
    plain = [
        path for path, array in tree_flatten(packed.parameters()) if array.ndim == 2 and "weight" in path
    ]
    unpacked = {path.rpartition(".")[0] for path in plain} - set(bits_of(packed))
    assert unpacked <= {"confidence_head.proj", "layers.0.self_attn.g_proj", "layers.1.self_attn.g_proj"}
    save_draft(packed, tmp_path / "packed")
    again = load_draft(tmp_path / "packed", name=kind, bits=8)
    assert bits_of(again) == bits_of(packed)
    assert mx.array_equal(logits_of(again), logits_of(packed))
    expanded = load_draft(tmp_path / "packed", name=kind)
    assert bits_of(expanded) == {} and mx.allclose(logits_of(expanded), logits_of(packed), atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_may_differ_from_layer_to_layer(kind, tmp_path):
    network = network_of(kind)
    finer = {"fc": 8, "layers.1.mlp.down_proj": 8, "layers.0.self_attn.o_proj": 6, "lm_head": 8}

    def chosen(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not isinstance(module, (nn.Linear, nn.Embedding)) or module.weight.shape[0] < 8:
            return False
        return {"group_size": 32, "bits": finer.get(path, 4)}

    nn.quantize(network, class_predicate=chosen)
    save_draft(network, tmp_path / "mixed")
    loaded = load_draft(tmp_path / "mixed", name=kind, bits=4)
    assert bits_of(loaded) == bits_of(network)
    assert set(bits_of(loaded).values()) == {4, 6, 8}
    assert mx.allclose(logits_of(loaded), logits_of(network), atol=1e-4)


def test_bits_of_a_layer_are_found_under_the_name_that_its_format_gives_it(tmp_path):
    network = network_of("laguna")
    finer = {f"layers.0.self_attn.{part}_proj": {"group_size": 32, "bits": 8} for part in "qkv"}
    nn.quantize(
        network, 32, 4, class_predicate=lambda path, m: hasattr(m, "to_quantized") and finer.get(path, True)
    )
    weights = dict(tree_flatten(network.parameters()))
    for layer in range(2):
        at = f"layers.{layer}.self_attn."
        for leaf in ("weight", "scales", "biases"):
            parts = [weights.pop(f"{at}{part}_proj.{leaf}") for part in "qkv"]
            weights[f"{at}qkv_proj.{leaf}"] = mx.concatenate(parts)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    section = {"group_size": 32, "bits": 4, "layers.0.self_attn.qkv_proj": {"group_size": 32, "bits": 8}}
    formats.json_to(tmp_path / "config.json", dict(network.config.source) | {"quantization": section})
    loaded = load_draft(tmp_path, name="laguna", bits=4)
    assert bits_of(loaded) == bits_of(network)
    assert mx.array_equal(logits_of(loaded), logits_of(network))


@pytest.mark.parametrize("wrong", [{"bits": 8}, {"group_size": 64}, {"fc": {"group_size": 32, "bits": 8}}])
def test_packed_shapes_that_contradict_the_config_are_refused_by_name(wrong, tmp_path):
    network = network_of("speculators")
    nn.quantize(network, 32, 4, class_predicate=lambda path, module: isinstance(module, nn.Linear))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(network.parameters())))
    section = {"group_size": 32, "bits": 4, **wrong}
    formats.json_to(tmp_path / "config.json", dict(network.config.source) | {"quantization": section})
    with pytest.raises(CheckpointError, match=r"with shape .*, but its config makes|does not fit its layers"):
        load_draft(tmp_path, name="speculators", bits=section["bits"])
