"""Checkpoint folders: what is loaded, as what, and what is refused."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.drafter import Drafter, load_draft
from dflash_mlx.drafter.checkpoint import activation_dtype
from dflash_mlx.errors import CheckpointError, UnsupportedError, UsageError
from tests.drafter.toys import ToyEnds, toy_config, toy_features, toy_network, write_toy

BUNDLED = Path(__file__).parents[2] / "src" / "dflash_mlx" / "bundled" / "smollm2-135m-dflash"
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}


def logits(network, ends: ToyEnds | None = None) -> mx.array:
    hidden = network.config.hidden_size
    drafter = Drafter(network, ends or ToyEnds(hidden_size=hidden))
    features = mx.random.normal((7, 2 * hidden), key=mx.random.key(4))
    drafter.inject(features, 7)
    return drafter.logits(3, 6)


@pytest.fixture
def toy(tmp_path):
    return write_toy(tmp_path / "toy", toy_network(), toy_config())


def test_a_file_drafts_as_the_network_it_was_written_from(toy):
    network = load_draft(toy, name="toy")
    assert mx.array_equal(logits(network), logits(toy_network()))
    assert (network.bits, network.dtype, network.name) == (None, mx.float32, "toy")


def test_shards_are_read_together(toy):
    weights = list(dict(mx.load(str(toy / "model.safetensors"))).items())
    (toy / "model.safetensors").unlink()
    mx.save_safetensors(str(toy / "model-00001-of-00002.safetensors"), dict(weights[:9]))
    with pytest.raises(CheckpointError, match="toy lacks the tensors .* and 1[0-9] more"):
        load_draft(toy, name="toy")
    mx.save_safetensors(str(toy / "model-00002-of-00002.safetensors"), dict(weights[9:]))
    assert mx.array_equal(logits(load_draft(toy, name="toy")), logits(toy_network()))
    mx.save_safetensors(str(toy / "model-00003-of-00003.safetensors"), dict(weights[:1]))
    with pytest.raises(CheckpointError, match=f"{weights[0][0]} in two files"):
        load_draft(toy, name="toy")


@pytest.mark.parametrize("stored", [mx.bfloat16, mx.float16])
def test_16_bit_files_compute_in_fp32_on_a_cpu_and_in_what_is_asked_for(tmp_path, stored):
    network = toy_network()
    network.set_dtype(stored)
    folder = write_toy(tmp_path / "toy", network, toy_config())
    assert load_draft(folder, name="toy").dtype == mx.float32
    for asked in (mx.float16, mx.bfloat16, mx.float32):
        network = load_draft(folder, name="toy", dtype=asked)
        assert {tensor.dtype for _, tensor in tree_flatten(network.parameters())} == {asked}


def test_activations_are_never_fp16_unasked():
    assert activation_dtype({mx.float16}, on_cpu=False) == mx.bfloat16
    assert activation_dtype({mx.bfloat16}, on_cpu=False) == mx.bfloat16
    assert activation_dtype({mx.float32, mx.bfloat16}, on_cpu=False) == mx.float32
    assert activation_dtype({mx.float16}, on_cpu=True) == mx.float32


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 3}, "toy lacks the tensors layers.2"),
        ({"num_hidden_layers": 1}, "toy holds the tensors layers.1.* and 8 more"),
        ({"attention_bias": True}, "toy lacks the tensors .*bias"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1, 2]}},
            r"fc.weight .*\[16, 32\].*\[16, 48\]",
        ),
        ({"hidden_size": 32}, r"with shape .*, but its config makes"),
        ({"head_dim": 4}, r"k_norm.weight with shape \[8\], .* \[4\]"),
    ],
)
def test_a_config_that_contradicts_the_file_is_refused_with_the_tensor(tmp_path, changes, says):
    folder = write_toy(tmp_path / "toy", toy_network(), toy_config(**changes))
    with pytest.raises(CheckpointError, match=says):
        load_draft(folder, name="toy")


def test_an_extra_tensor_is_refused_by_name(tmp_path):
    folder = write_toy(tmp_path / "toy", toy_network(), toy_config(), **{"markov_head.w": mx.zeros((2,))})
    with pytest.raises(CheckpointError, match="toy holds the tensor markov_head.w, which"):
        load_draft(folder, name="toy")


@pytest.mark.parametrize("own", ["embed_tokens.weight", "lm_head.weight"])
def test_a_drafter_with_an_embedding_or_a_head_of_its_own_is_refused(tmp_path, own):
    """Formats whose own ends are used: test_formats.py."""
    folder = write_toy(tmp_path / "toy", toy_network(), toy_config(), **{own: mx.zeros((40, 16))})
    with pytest.raises(UnsupportedError, match=f"toy carries its own {own}"):
        load_draft(folder, name="toy")


def test_bytes_are_not_taken_for_floats(tmp_path):
    extra = {"fc.weight": mx.zeros((16, 32), dtype=mx.uint8)}
    folder = write_toy(tmp_path / "toy", toy_network(), toy_config(), **extra)
    with pytest.raises(UnsupportedError, match="fc.weight as .*uint8"):
        load_draft(folder, name="toy")


def test_missing_and_broken_files_are_named(tmp_path, toy):
    with pytest.raises(CheckpointError, match=r"toy has no config\.json"):
        load_draft(tmp_path / "nowhere", name="toy")
    whole = (toy / "model.safetensors").read_bytes()
    for broken in (whole[:50], whole[: len(whole) // 2], b"version https://git-lfs.github.com/spec/v1\n"):
        (toy / "model.safetensors").write_bytes(broken)
        with pytest.raises(
            CheckpointError, match=r"toy.*cannot be read|cannot be read.*toy|of toy cannot be read"
        ):
            load_draft(toy, name="toy")
    (toy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"toy has no \.safetensors file"):
        load_draft(toy, name="toy")
    for text in ("{", "[]"):
        (toy / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json of toy"):
            load_draft(toy, name="toy")


@pytest.fixture
def wide(tmp_path):
    return write_toy(tmp_path / "wide", toy_network(**WIDE), toy_config(**WIDE))


def matrices(network) -> set[tuple[int, int] | None]:
    """Bits and group size of every matrix; None for one that is not packed."""
    modules = dict(network.named_modules()).values()
    packed = {
        (module.bits, module.group_size) for module in modules if isinstance(module, nn.QuantizedLinear)
    }
    return packed | {None for module in modules if type(module) is nn.Linear}


@pytest.mark.parametrize(("bits", "near"), [(8, 0.02), (4, 0.3)])
def test_draft_bits_packs_every_matrix_and_says_so(wide, bits, near):
    """Packing costs acceptance at most, how much a benchmark tells."""
    network = load_draft(wide, name="wide", bits=bits)
    assert network.bits == bits
    assert matrices(network) == {(bits, 64), (bits, 32)}  # down_proj has rows of 96, no multiple of 64
    exact = logits(load_draft(wide, name="wide"))
    error = mx.linalg.norm(logits(network) - exact) / mx.linalg.norm(exact)
    assert 0 < error.item() < near


@pytest.mark.parametrize("bits", [3, 0, 16, -4, True, "abc", "4", 4.5])
def test_other_draft_bits_are_refused_before_any_file_is_read(tmp_path, bits):
    with pytest.raises(UsageError, match=f"draft_bits {bits}: 4, 8 or none"):
        load_draft(tmp_path / "nowhere", name="toy", bits=bits)


def test_draft_bits_refuses_widths_that_cannot_be_packed(toy):
    with pytest.raises(UsageError, match="draft_bits 4: .* rows of (16|24) values"):
        load_draft(toy, name="toy", bits=4)


@pytest.fixture
def packed(tmp_path):
    """An MLX-quantised file: 4 bits, one matrix in 8 bits, one not packed."""
    network = toy_network(**WIDE, attention_bias=True)
    odd = {"fc": {"group_size": 64, "bits": 8}, "layers.1.mlp.up_proj": False}
    nn.quantize(
        network,
        32,
        4,
        class_predicate=lambda path, module: isinstance(module, nn.Linear) and odd.get(path, True),
    )
    config = toy_config(**WIDE, attention_bias=True, quantization={"group_size": 32, "bits": 4, **odd})
    return write_toy(tmp_path / "packed", network, config), network


def test_a_quantised_file_keeps_its_bits_where_asked_and_is_expanded_on_a_cpu_otherwise(packed):
    folder, written = packed
    kept, expanded = load_draft(folder, name="packed", bits=4), load_draft(folder, name="packed")
    assert (kept.bits, matrices(kept)) == (4, {(4, 32), (8, 64), None})
    assert (expanded.bits, matrices(expanded), expanded.dtype) == (None, {None}, mx.float32)
    assert mx.allclose(logits(kept), logits(written), atol=1e-4)
    assert mx.allclose(logits(expanded), logits(written), atol=1e-3)


def test_a_quantised_file_is_not_quantised_again(packed):
    with pytest.raises(UsageError, match="draft_bits 8: the file of packed is already quantised to 4 bits"):
        load_draft(packed[0], name="packed", bits=8)


def test_a_quantised_file_may_compute_in_another_dtype(packed):
    network = load_draft(packed[0], name="packed", dtype=mx.bfloat16)
    assert (network.bits, network.dtype, logits(network).dtype) == (4, mx.bfloat16, mx.float32)


def test_the_bundled_drafter_loads_whole():
    network = load_draft(BUNDLED, name="smollm2-135m-dflash")
    assert sum(tensor.size for _, tensor in tree_flatten(network.parameters())) == 15_820_928
    assert network.config.num_parameters() == 15_820_928
    assert (network.config.target_layer_ids, network.config.mask_token_id) == ((1, 8, 14, 20, 27), 16)


def test_loading_leaves_nothing_lazy_behind(toy):
    network = load_draft(toy, name="toy")
    (toy / "model.safetensors").write_bytes(b"")
    drafter = Drafter(network, ToyEnds())
    drafter.inject(toy_features(3), 3)
    assert mx.isfinite(drafter.logits(1, 6)).all().item()
