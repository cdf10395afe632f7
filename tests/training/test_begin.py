"""What a training begins with: shapes of the target, its own layers where they fit, and a spare token to mask with."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.errors import PairError, UsageError
from dflash_mlx.runtime import Machine
from dflash_mlx.training.begin import begin, default_taps, draft_config, mask_token
from tests.kit.models import tiny_target
from tests.kit.tokenizers import build_bpe
from tests.loading.checkpoints import write_draft
from tests.training.kit import tiny_loaded

CPU = Machine("cpu", "test", 16.0, "test", "test", mx.float32)


def test_taps_are_those_of_the_paper() -> None:
    assert default_taps(36) == (1, 9, 17, 25, 33)
    assert default_taps(32) == (1, 8, 15, 22, 29)
    assert default_taps(4) == (2,) and default_taps(1) == (0,)
    assert all(len(set(default_taps(n))) == len(default_taps(n)) for n in range(1, 80))


def test_a_new_drafter_has_the_targets_shapes() -> None:
    target = tiny_loaded()
    config = draft_config(target, layers=2, block_size=6, taps=(0, 3))
    assert (config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]) == (64, 4, 2)
    assert (config["num_hidden_layers"], config["block_size"], config["vocab_size"]) == (2, 6, 320)
    assert config["dflash_config"]["target_layer_ids"] == [0, 3]
    with pytest.raises(UsageError, match="taps holds 4; .* has layers 0 to 3"):
        draft_config(target, taps=(1, 4))


def test_the_mask_is_a_row_that_no_text_uses() -> None:
    target = tiny_loaded()
    mask = mask_token(target)
    assert mask not in target.tokenizer.get_vocab().values() and mask < target.model.vocab_size
    full = replace(target, model=tiny_target(vocab_size=mask))
    with pytest.raises(UsageError, match="no spare token"):
        mask_token(full)
    more = build_bpe(vocab_size=300)
    more.add_tokens(["<|reserved_7|>"], special_tokens=True)
    spare = more.convert_tokens_to_ids("<|reserved_7|>")
    model = tiny_target(vocab_size=spare + 1)
    assert mask_token(replace(target, tokenizer=TokenizerWrapper(more), model=model)) == spare


def test_the_same_seed_gives_the_same_weights() -> None:
    def weights(seed: int) -> list[mx.array]:
        network = begin(tiny_loaded(), "random", machine=CPU, layers=1, seed=seed)
        return [array for _, array in tree_flatten(network.parameters())]

    first, again, other = weights(0), weights(0), weights(1)
    assert all(mx.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(mx.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_layers_of_the_target_are_taken_where_they_fit() -> None:
    said: list[str] = []
    target = tiny_loaded()
    network = begin(target, "target", machine=CPU, layers=2, tell=said.append)
    theirs = target.model.model.layers[3]
    assert mx.array_equal(network.layers[1].self_attn.q_proj.weight, theirs.self_attn.q_proj.weight)
    assert mx.array_equal(network.layers[1].mlp.down_proj.weight, theirs.mlp.down_proj.weight)
    assert network.layers[1].self_attn.q_proj.weight.dtype == mx.float32
    assert "Beginning with 23 of 25 weights" in said[0]
    three = begin(target, "target", machine=CPU, layers=3)
    taken = [layer.self_attn.q_proj.weight for layer in three.layers]
    expected = [target.model.model.layers[i].self_attn.q_proj.weight for i in (2, 2, 3)]
    assert all(mx.array_equal(a, b) for a, b in zip(taken, expected, strict=True))


def test_a_drafter_that_exists_is_taken_as_it_is(tmp_path: Path) -> None:
    network = begin(tiny_loaded(), write_draft(tmp_path / "fits"), machine=CPU)
    assert network.dtype == mx.float32 and network.config.block_size == 8
    with pytest.raises(PairError, match="does not fit"):
        begin(tiny_loaded(), write_draft(tmp_path / "other", num_target_layers=9), machine=CPU)
