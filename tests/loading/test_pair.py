"""Whether two configs fit, with both names and the numbers that differ."""

import re

import pytest

from dflash_mlx.drafter import DraftConfig
from dflash_mlx.errors import CheckpointError, PairError, UnsupportedError
from dflash_mlx.loading.pair import TargetShape, check_pair, check_same_tokens, check_target
from tests.loading.checkpoints import DRAFT, TARGET

SHAPE = TargetShape("owner/target", hidden_size=64, num_layers=4, vocab_size=320)


def check(tokens: int | None = 300, shape: TargetShape = SHAPE, **changes):
    config = DraftConfig.from_dict({**DRAFT, **changes}, name="owner/draft")
    check_pair(shape, config, draft_name="owner/draft", tokens=tokens)


def test_a_pair_that_fits():
    check()
    assert check_target(dict(TARGET), name="owner/target") == SHAPE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 128}, "hidden size 128 against 64"),
        ({"num_target_layers": 36}, "made for 36 target layers, the target has 4"),
        (
            {"num_target_layers": None, "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 33]}},
            "reads target layer 33, the target has 4 (0 to 3)",
        ),
        ({"vocab_size": 290}, "vocabulary of 290 against 320"),
        (
            {"dflash_config": {"mask_token_id": 320, "target_layer_ids": [1, 2]}},
            "mask token 320, the target embeds 320 tokens",
        ),
    ],
)
def test_numbers_that_differ_are_named_with_both_names(changes, words):
    with pytest.raises(PairError, match=re.escape(words)) as caught:
        check(**changes)
    assert "owner/draft" in str(caught.value) and "owner/target" in str(caught.value)


def test_every_number_that_differs_is_named_at_once():
    with pytest.raises(PairError, match=r"hidden size .*; made for .*; vocabulary of .*; mask token"):
        check(
            hidden_size=128,
            num_target_layers=9,
            vocab_size=10,
            dflash_config=None,
            mask_token_id=999,
            target_layer_ids=[1],
        )


def test_speculators_do_not_read_the_normed_output_of_the_target():
    inner = {
        key: DRAFT[key] for key in DRAFT if key not in ("architectures", "dflash_config", "num_target_layers")
    }
    nested = {"speculators_model_type": "dflash", "mask_token_id": 1, "transformer_layer_config": inner}

    def read(ids):
        config = DraftConfig.from_dict(nested | {"aux_hidden_state_layer_ids": ids}, name="owner/draft")
        check_pair(SHAPE, config, draft_name="owner/draft", tokens=300)

    read([1, 3])
    with pytest.raises(
        PairError, match="reads layer id 4 as speculators count, which is the target's normed output"
    ):
        read([1, 4])
    with pytest.raises(PairError, match="reads target layer 4"):
        read([1, 5])


@pytest.mark.parametrize("rows", [300, 304, 512])
def test_a_vocabulary_padded_otherwise_is_the_same(rows):
    check(vocab_size=rows)


def test_a_padded_vocabulary_needs_a_tokenizer_that_tells():
    with pytest.raises(PairError, match="vocabulary of 304 against 320"):
        check(tokens=None, vocab_size=304)


def test_another_tokenizer_is_refused_by_the_first_token_that_differs():
    """And padding alone is no difference, see above."""
    ours = {"a": 0, "b": 1, "c": 2}
    names = {"target_name": "owner/target", "draft_name": "owner/draft"}
    check_same_tokens(ours, {"a": 0, "b": 1}, **names)
    with pytest.raises(PairError, match="'b' is id 2 in the drafter's and id 1 in the target's"):
        check_same_tokens(ours, {"a": 0, "b": 2}, **names)
    with pytest.raises(PairError, match="'z' is id 3 in the drafter's and unknown to the target's"):
        check_same_tokens(ours, {"z": 3}, **names)


@pytest.mark.parametrize("architecture", ["DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel"])
def test_a_drafter_as_target_is_refused(architecture):
    with pytest.raises(PairError, match="owner/x is a drafter, not a target"):
        check_target({**DRAFT, "architectures": [architecture]}, name="owner/x")


def test_a_plain_model_as_drafter_is_refused():
    with pytest.raises(UnsupportedError, match=r"owner/draft \(Qwen3ForCausalLM\) is not a drafter"):
        DraftConfig.from_dict(TARGET, name="owner/draft")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
        ({"speculators_model_type": "eagle3"}, "'eagle3'"),
        ({"architectures": ["SomeNewDraftModel"]}, "SomeNewDraftModel"),
    ],
)
def test_another_kind_of_drafter_is_named(changes, words):
    with pytest.raises(UnsupportedError, match=words):
        check(**changes)


def test_a_target_that_mlx_lm_does_not_know_is_named_by_its_type():
    with pytest.raises(UnsupportedError, match="owner/x is a model of type 'martian'"):
        check_target({**TARGET, "model_type": "martian"}, name="owner/x")


def test_a_target_whose_state_cannot_be_undone_is_refused_by_the_kind_of_its_cache():
    recurrent = {
        "model_type": "mamba",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 4,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    }
    with pytest.raises(UnsupportedError, match="mamba.*ArraysCache"):
        check_target(recurrent, name="owner/x")


@pytest.mark.parametrize("lost", ["model_type", "hidden_size", "num_hidden_layers"])
def test_a_config_without_a_value_is_named(lost):
    config = {key: value for key, value in TARGET.items() if key != lost}
    with pytest.raises(CheckpointError, match=f"owner/x.*{lost}"):
        check_target(config, name="owner/x")


def test_a_big_target_is_checked_without_its_memory():
    import mlx.core as mx

    before = mx.get_active_memory()
    big = {
        **TARGET,
        "hidden_size": 8192,
        "intermediate_size": 32768,
        "num_hidden_layers": 80,
        "vocab_size": 150_000,
    }
    assert check_target(big, name="owner/x").num_layers == 80
    assert mx.get_active_memory() - before < 50e6
