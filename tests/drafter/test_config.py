"""Configs of published drafters, old layouts and new, and what is refused."""

import pytest

from dflash_mlx.drafter import DraftConfig
from dflash_mlx.errors import CheckpointError, UnsupportedError, UsageError
from tests.drafter.toys import toy_config

FULL, SLIDING = "full_attention", "sliding_attention"
FROM_1_BY_8 = [1, 9, 17, 25, 33]
OF_QWEN35_35B = [1, 6, 11, 16, 22, 27, 32, 37]

# Name: layers, hidden, intermediate, heads, kv heads, head dim, block, sliding layers, window, ids, target layers,
# mask id, vocabulary, theta, parameters. The rows of the public inventory whose values are all known.
PUBLIC = {
    "Qwen3-4B-DFlash-b16": (
        5,
        2560,
        9728,
        32,
        8,
        128,
        16,
        0,
        None,
        FROM_1_BY_8,
        36,
        151669,
        151936,
        1e6,
        537_427_200,
    ),
    "Qwen3-8B-DFlash-b16": (
        *(5, 4096, 12288, 32, 8, 128, 16, 0, None, FROM_1_BY_8, 36, 151669, 151936, 1e6),
        1_048_626_432,
    ),
    "Qwen3.5-4B-DFlash": (
        *(6, 2560, 9216, 32, 8, 128, 16, 5, 4096, [1, 5, 9, 13, 17, 21, 25, 29], 32, 248077, 248320, 1e7),
        634_425_856,
    ),
    "Qwen3.5-9B-DFlash": (
        *(6, 4096, 12288, 32, 8, 128, 16, 5, 4096, [1, 5, 9, 13, 17, 21, 25, 29], 32, 248077, 248320, 1e7),
        1_291_904_512,
    ),
    "Qwen3.5-27B-DFlash": (
        *(6, 5120, 17408, 32, 8, 128, 16, 5, 4096, [1, 10, 18, 27, 35, 44, 52, 61], 64, 248077, 248320, 1e7),
        2_128_682_496,
    ),
    "Qwen3.5-35B-A3B-DFlash": (
        *(6, 2048, 6144, 32, 8, 128, 16, 5, 4096, OF_QWEN35_35B, 40, 248077, 248320, 1e7),
        385_906_176,
    ),
    "Qwen3.6-35B-A3B-DFlash": (
        *(6, 2048, 6144, 32, 8, 128, 16, 5, 4096, OF_QWEN35_35B, 40, 248077, 248320, 1e7),
        385_906_176,
    ),
    "Qwen3.5-122B-A10B-DFlash": (
        *(6, 3072, 9216, 32, 8, 128, 16, 5, 4096, [1, 7, 14, 20, 26, 32, 39, 45], 48, 248077, 248320, 1e7),
        773_893_632,
    ),
    "Qwen3.6-27B-DFlash": (
        *(5, 5120, 17408, 32, 8, 128, 16, 4, 2048, [1, 16, 31, 46, 61], 64, 248070, 248320, 1e7),
        1_730_213_120,
    ),
    "gemma-4-31B-it-DFlash": (
        *(5, 5376, 10752, 64, 8, 128, 16, 4, 2048, [1, 12, 23, 35, 46, 57], 60, 4, 262144, 1e6),
        1_535_967_488,
    ),
    "smollm2-135m-dflash": (
        4,
        576,
        1536,
        9,
        3,
        64,
        8,
        0,
        None,
        [1, 8, 14, 20, 27],
        30,
        16,
        49152,
        1e5,
        15_820_928,
    ),
}


def old_layout(row) -> dict:
    """Values at the top level, as before Transformers 5."""
    (
        layers,
        hidden,
        intermediate,
        heads,
        kv,
        head_dim,
        block,
        sliding,
        window,
        ids,
        count,
        mask,
        vocab,
        theta,
        _,
    ) = row
    return toy_config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head_dim,
        block_size=block,
        layer_types=[SLIDING] * sliding + [FULL] * (layers - sliding) if sliding else None,
        sliding_window=window,
        use_sliding_window=bool(sliding),
        num_target_layers=count,
        vocab_size=vocab,
        rope_theta=theta,
        rope_scaling=None,
        target_layer_ids=ids,
        mask_token_id=mask,
        dflash_config=None,
    )


def new_layout(row) -> dict:
    """The same values in nested objects, as re-exported files have them."""
    config = old_layout(row)
    moved = {key: config.pop(key) for key in ("block_size", "target_layer_ids", "mask_token_id")}
    rope = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    return config | {"dflash_config": moved, "rope_parameters": rope}


def read(**changes) -> DraftConfig:
    return DraftConfig.from_dict(toy_config(**changes), name="toy")


@pytest.mark.parametrize("layout", [old_layout, new_layout])
@pytest.mark.parametrize("name", PUBLIC)
def test_public_drafters_have_their_values_and_their_parameter_count_in_both_layouts(name, layout):
    """Files written again by newer Transformers load too."""
    row = PUBLIC[name]
    config = DraftConfig.from_dict(layout(row), name=name)
    assert config.num_parameters() == row[-1]
    found = (config.block_size, config.target_layer_ids, config.num_target_layers, config.mask_token_id)
    assert found == (row[6], tuple(row[9]), row[10], row[11])
    assert (config.rope.theta, config.head_dim, config.vocab_size) == (row[13], row[5], row[12])
    windows = [config.window(layer) for layer in range(row[0])]
    assert windows == [row[8]] * row[7] + [None] * (row[0] - row[7])
    assert [config.causal(layer) for layer in range(row[0])] == [True] * row[7] + [False] * (row[0] - row[7])


@pytest.mark.parametrize(
    ("hidden", "intermediate", "layers", "heads", "kv", "head_dim", "taps", "count"),
    [
        (4096, 12288, 5, 32, 8, 128, 5, 1_048_626_432),  # LLaMA3.1-8B
        (2048, 6144, 8, 32, 4, 128, 5, 473_995_264),  # Qwen3-Coder-30B-A3B, Qwen3-Coder-Next
        (2816, 5632, 5, 32, 8, 128, 6, 429_689_088),  # gemma-4-26B-A4B
        (2880, 7680, 8, 64, 8, 64, 5, 784_703_104),  # gpt-oss
        (7168, 18432, 6, 64, 8, 128, 6, 3_479_277_056),  # Kimi-K2.5
    ],
)
def test_parameter_counts_of_public_files(hidden, intermediate, layers, heads, kv, head_dim, taps, count):
    config = read(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head_dim,
        dflash_config={"mask_token_id": 1, "target_layer_ids": list(range(taps))},
    )
    assert config.num_parameters() == count


def test_biases_are_counted():
    assert read(attention_bias=True).num_parameters() - read().num_parameters() == 2 * (32 + 2 * 16 + 16)


def dflash(**changes) -> dict:
    return {"mask_token_id": 39, "target_layer_ids": [1, 3]} | changes


@pytest.mark.parametrize(
    ("nested", "top", "override", "effective"),
    [
        (None, None, None, 16),
        (None, 8, None, 8),
        (8, None, None, 8),
        (8, 12, None, 8),
        (8, 12, 4, 4),
        (None, 8, 8, 8),
    ],
)
def test_block_size_is_the_override_else_nested_else_top_level_else_16(nested, top, override, effective):
    config = read(block_size=top, dflash_config=dflash(block_size=nested))
    assert config.effective_block_size(override) == effective


@pytest.mark.parametrize("override", [1, 0, -3, 9, 2.0, True, "4"])
def test_an_override_outside_the_trained_block_is_a_usage_error(override):
    with pytest.raises(UsageError, match=rf"block_size {override}: .*2 to 8"):
        read(block_size=8).effective_block_size(override)


def test_the_causal_flag_is_read_from_both_places_and_the_top_level_wins():
    assert read().is_causal is None
    assert read(is_causal=False).is_causal is False
    assert read(dflash_config=dflash(causal=True)).is_causal is True
    assert read(is_causal=False, dflash_config=dflash(causal=True)).is_causal is False


@pytest.mark.parametrize("key", ["final_logit_softcapping", "input_embedding_scale", "output_multiplier"])
def test_scales_are_read_from_both_places(key):
    assert getattr(read(**{key: 3.5}), key) == 3.5
    assert getattr(read(**{key: 3.5}, dflash_config=dflash(**{key: 2.5})), key) == 2.5


def test_a_window_counts_only_for_sliding_layers_and_while_it_is_not_switched_off():
    assert read(sliding_window=9).window(0) is None
    assert read(sliding_window=9, layer_types=[SLIDING, FULL]).window(0) == 9
    off = read(sliding_window=9, layer_types=[SLIDING, FULL], use_sliding_window=False)
    assert (off.window(0), off.causal(0), off.causal(1)) == (None, True, False)


def test_an_mlx_quantised_file_says_how():
    section = {
        "group_size": 32,
        "bits": 4,
        "fc": {"group_size": 64, "bits": 8},
        "layers.0.mlp.up_proj": False,
    }
    found = read(quantization=section).quantization
    assert (found.bits, found.group_size, found.mode) == (4, 32, "affine")
    assert found.overrides == {"fc": {"group_size": 64, "bits": 8}, "layers.0.mlp.up_proj": False}


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([1, 5, 5], "id 5 twice"),
        ([-1, 3], "id -1"),
        ([1, 99], r"id 99, .*6 layers \(0 to 5\)"),
        ([1, 6], "id 6"),
        ([1, 2.5], "id 2.5"),
        ([True, 2], "id True"),
        ([], "no target_layer_ids"),
        (None, "no target_layer_ids"),
        ("13", "no target_layer_ids"),
        (3, "no target_layer_ids"),
    ],
)
def test_impossible_layer_ids_are_refused_by_id(ids, says):
    with pytest.raises(CheckpointError, match=says):
        read(dflash_config=dflash(target_layer_ids=ids))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_size": 1}, "1 for block_size; a whole number of 2 or more"),
        ({"block_size": "8"}, "'8' for block_size"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "no value for mask_token_id"),
        ({"dflash_config": dflash(mask_token_id=-1)}, "-1 for mask_token_id"),
        ({"head_dim": None}, "no value for head_dim"),
        ({"hidden_size": 0}, "0 for hidden_size"),
        ({"num_attention_heads": 5}, "5 attention heads"),
        ({"layer_types": [FULL]}, "1 layer_types for 2 layers"),
        ({"layer_types": [SLIDING, FULL]}, "no value for sliding_window"),
    ],
)
def test_impossible_values_are_refused_by_name(changes, says):
    with pytest.raises(CheckpointError, match=rf"toy.*{says}"):
        read(**changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": None, "speculators_model_type": "eagle3"}, "format of type 'eagle3'"),
        ({"architectures": ["Gemma4DSparkModel"]}, "the drafter architecture 'Gemma4DSparkModel'"),
        ({"architectures": ["NewDraftModel"]}, "the drafter architecture 'NewDraftModel'"),
        ({"dflash_config": dflash(projector_type="domino")}, "projector_type is 'domino'"),
        ({"shift_label": True}, "slots predict the token after them"),
        ({"dflash_config": dflash(selector_rank=256)}, "a second-generation drafter"),
        ({"markov_rank": 512}, "a DSpark drafter"),
        ({"dflash_config": dflash(use_swa=True)}, "a MiMo drafter"),
        ({"layer_types": ["linear_attention", FULL]}, "'linear_attention'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
    ],
)
def test_other_drafters_are_refused_by_name(changes, says):
    with pytest.raises(UnsupportedError, match=says) as caught:
        read(**changes)
    if "drafter" in says:
        assert "not support" in str(caught.value)


def test_a_plain_model_is_not_a_drafter():
    plain = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32}
    with pytest.raises(UnsupportedError, match=r"Qwen3-4B \(Qwen3ForCausalLM\) is not a drafter"):
        DraftConfig.from_dict(plain, name="Qwen3-4B")
    with pytest.raises(UnsupportedError, match="is not a drafter"):
        DraftConfig.from_dict({}, name="empty")
