"""The data stage: answers are the target's own, and a run that is stopped anywhere gives the same folder."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.core import SamplingParams
from dflash_mlx.errors import UsageError, WriteError
from dflash_mlx.loading.turns import user_turn
from dflash_mlx.sampling import Sampler
from dflash_mlx.target import plain_tokens
from dflash_mlx.training import gather as stage
from dflash_mlx.training.gather import Recipe, gather
from dflash_mlx.training.prompts import Prompt, asked
from dflash_mlx.training.records import is_held_out, read_answers
from tests.training.kit import tiny_loaded

SMALL = Recipe(max_answer_tokens=8, shard_prompts=8, batch_size=4, sampled_share=0.4, own_share=0.0)


def shards(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("answers-*.jsonl"))}


def test_greedy_answers_are_what_the_target_says_alone(tmp_path: Path) -> None:
    target = tiny_loaded()
    asks = [asked(f"Question number {'very ' * i}long", "given", "") for i in range(6)]
    recipe = replace(SMALL, sampled_share=0.0, own_share=0.0)
    gather(target, tmp_path, tokens=60, prompts=asks, recipe=recipe)
    answers = list(read_answers([tmp_path]))
    assert len(answers) == 6 and len({len(a.prompt_ids) for a in answers}) > 1  # padding is in play
    for answer in answers:
        sampler = Sampler(SamplingParams())
        alone = plain_tokens(
            target.model,
            answer.prompt_ids,
            max_new_tokens=8,
            draw=sampler.draw,
            draw_whole=sampler.draw_whole,
            prefill_chunk=64,
        )
        expected = []
        for token in alone:
            expected.append(token)
            if token in target.eos_ids:
                break
        assert list(answer.answer_ids) == expected


def test_a_stopped_run_goes_on_to_the_folder_of_an_unstopped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_loaded()
    seen: list[stage.Progress] = []
    whole = gather(target, tmp_path / "whole", tokens=110, recipe=SMALL, on_progress=seen.append)
    assert whole.counts.shards >= 2

    def stop(progress: stage.Progress) -> None:
        if progress.tokens > whole.counts.answer_tokens - 12:  # inside the last shard
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gather(target, tmp_path / "parts", tokens=110, recipe=SMALL, on_progress=stop)
    there = shards(tmp_path / "parts")
    assert 0 < len(there) < whole.counts.shards
    gather(target, tmp_path / "parts", tokens=110, recipe=SMALL)
    assert shards(tmp_path / "parts") == shards(tmp_path / "whole")
    assert (tmp_path / "parts/manifest.json").read_text() == (tmp_path / "whole/manifest.json").read_text()
    assert gather(target, tmp_path / "parts", tokens=110, recipe=SMALL).new_answers == 0


@pytest.mark.slow  # the run that is stopped and goes on is the fast one
def test_the_folder_grows_and_holds_no_prompt_twice(tmp_path: Path) -> None:
    gather(tiny_loaded(), tmp_path, tokens=100, recipe=SMALL)
    before = shards(tmp_path)
    grown = gather(tiny_loaded(), tmp_path, tokens=150, recipe=SMALL)
    after = shards(tmp_path)
    assert before.items() < after.items()
    answers = list(read_answers([tmp_path]))
    assert len({a.prompt_ids for a in answers}) == len(answers) == grown.counts.answers


@pytest.mark.slow  # the run that is stopped and goes on is the fast one
def test_answers_do_not_hang_on_who_shares_the_batch(tmp_path: Path) -> None:
    for size in (1, 5):
        gather(tiny_loaded(), tmp_path / str(size), tokens=30, recipe=replace(SMALL, batch_size=size))
    assert shards(tmp_path / "1") == shards(tmp_path / "5")


def test_the_manifest_counts_what_is_there(tmp_path: Path) -> None:
    target = tiny_loaded()
    gather(target, tmp_path, tokens=150, recipe=SMALL)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    answers, counts = list(read_answers([tmp_path])), manifest["counts"]
    assert counts["answers"] == len(answers)
    assert counts["answer_tokens"] == sum(len(a.answer_ids) for a in answers) >= 150
    assert counts["held_out"] == sum(map(is_held_out, answers))
    assert counts["sampled"] == sum(a.temperature == 0.7 for a in answers) > 0
    assert counts["sampled"] + sum(a.temperature == 0 for a in answers) == len(answers)
    for kind, row in counts["by_class"].items():
        assert row["answers"] == sum(a.prompt_class == kind for a in answers)
    assert len(counts["by_class"]) >= 4
    assert manifest["target"]["name"] == target.name and manifest["recipe"]["seed"] == 0


@pytest.mark.slow  # tests of the places of a shard are the fast ones
def test_another_seed_gives_other_answers(tmp_path: Path) -> None:
    gather(tiny_loaded(), tmp_path / "a", tokens=50, recipe=SMALL)
    gather(tiny_loaded(), tmp_path / "b", tokens=50, recipe=replace(SMALL, seed=1))
    assert shards(tmp_path / "a") != shards(tmp_path / "b")


def test_the_target_makes_up_prompts_that_come_to_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_loaded()
    turn = user_turn(target.tokenizer)
    assert turn is not None
    assert target.tokenizer.decode(list(turn.opening)) == "<|start|>user\n"
    assert set(turn.stop_ids) >= set(target.tokenizer.encode("<|end|>", add_special_tokens=False))
    often = turn._replace(stop_ids=tuple(range(60)))  # a random model hardly ever says one certain id
    monkeypatch.setattr(stage, "user_turn", lambda tokenizer: often)
    recipe = replace(SMALL, own_share=0.5, max_answer_tokens=2)
    done = gather(target, tmp_path, tokens=12, recipe=recipe)
    own = [a for a in read_answers([tmp_path]) if a.prompt_class == "own"]
    assert own and done.counts.by_class["own"]["answers"] == len(own)
    for answer in own:
        said = target.tokenizer.decode(list(answer.prompt_ids))
        assert said.startswith("<|start|>user\n") and said.endswith("<|end|>\n<|start|>assistant\n")
    monkeypatch.setattr(stage, "_OWN_TOKENS", 6)
    monkeypatch.setattr(stage, "user_turn", lambda tokenizer: turn._replace(stop_ids=()))
    done = gather(target, tmp_path / "endless", tokens=12, recipe=recipe)
    assert done.counts.answers and "own" not in done.counts.by_class


def test_prompts_that_run_out_are_told_and_what_is_too_long_is_left_out(tmp_path: Path) -> None:
    asks = [asked(text, "given", "") for text in ("one", "two", "one", "much " * 90)]
    recipe = replace(SMALL, own_share=0.0, max_prompt_tokens=100)
    done = gather(tiny_loaded(), tmp_path, tokens=10_000, prompts=asks, recipe=recipe)
    assert done.counts.answers == 2
    assert "used up" in done.notes[0] and "1 prompts of more than 100 tokens" in done.notes[1]


def test_a_folder_of_another_target_or_recipe_is_refused_before_any_answer(tmp_path: Path) -> None:
    target = tiny_loaded()
    gather(target, tmp_path, tokens=50, recipe=SMALL)
    before = shards(tmp_path)
    inner = target.model.model.model
    kept = inner.norm.weight
    inner.norm.weight = kept + 0.5
    try:
        with pytest.raises(UsageError, match="the weights differ"):
            gather(target, tmp_path, tokens=500, recipe=SMALL)
    finally:
        inner.norm.weight = kept
    with pytest.raises(UsageError, match="begun with temperature 0.7, and this run has 0.9"):
        gather(target, tmp_path, tokens=500, recipe=replace(SMALL, temperature=0.9))
    with pytest.raises(UsageError, match="prompts 0, and this run has 1"):
        gather(target, tmp_path, tokens=500, prompts=[asked("x", "given", "")], recipe=SMALL)
    with pytest.raises(UsageError, match="the thinking mode differ"):
        gather(target, tmp_path, tokens=500, think=True, recipe=SMALL)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(UsageError, match="nobody knows whose"):
        gather(target, tmp_path, tokens=500, recipe=SMALL)
    assert shards(tmp_path) == before


def test_a_full_disk_is_one_sentence_and_loses_no_whole_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather(tiny_loaded(), tmp_path, tokens=50, recipe=SMALL)
    before = shards(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(WriteError, match="the disk is full"):
            gather(tiny_loaded(), tmp_path, tokens=150, recipe=SMALL)
    assert shards(tmp_path) == before and not list(tmp_path.glob("*.partial"))
    assert gather(tiny_loaded(), tmp_path, tokens=150, recipe=SMALL).counts.answer_tokens >= 150


def test_a_disk_that_is_too_small_is_told_before_the_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WriteError, match="GB free"):
        gather(tiny_loaded(), tmp_path, tokens=10**15, recipe=SMALL)
    assert not shards(tmp_path)


def test_a_target_without_a_template_is_refused(tmp_path: Path) -> None:
    target = replace(tiny_loaded(), tokenizer=SimpleNamespace(has_chat_template=False))
    with pytest.raises(UsageError, match="has no chat template"):
        gather(target, tmp_path / "out", tokens=50, recipe=SMALL)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sampled_share": 1.5}, "sampled_share is 1.5"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"max_answer_tokens": 600}, "leave no room for a prompt"),
    ],
)
def test_values_that_mean_nothing_are_refused(tmp_path: Path, changes: dict[str, float], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        gather(tiny_loaded(), tmp_path, tokens=50, recipe=replace(SMALL, **changes))
    assert gather(tiny_loaded(), tmp_path, tokens=20, recipe=SMALL).new_answers, "the folder is nobody's yet"


def test_a_prompt_that_the_template_refuses_is_named_before_the_folder_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = stage.render

    def refusing(tokenizer: TokenizerWrapper, messages: Any, *, think: bool | None) -> list[int]:
        if messages[0]["role"] == "nobody":
            raise UsageError("The model's chat template refuses these messages.")
        return render(tokenizer, messages, think=think)

    monkeypatch.setattr(stage, "render", refusing)
    good = [asked(f"Question {i}?", "given", "") for i in range(40)]
    odd = Prompt(({"role": "nobody", "content": "Hm."},), "given", "asks.jsonl, line 41")
    with pytest.raises(UsageError, match=r"asks\.jsonl, line 41: .* refuses"):
        gather(tiny_loaded(), tmp_path, tokens=20, prompts=[*good, odd], recipe=SMALL)
    assert not list(tmp_path.iterdir())


def test_no_global_random_state_is_touched(tmp_path: Path) -> None:
    mx.random.seed(5)
    expected = mx.random.uniform(shape=(3,)).tolist()
    mx.random.seed(5)
    gather(tiny_loaded(), tmp_path, tokens=20, recipe=replace(SMALL, sampled_share=1.0))
    assert mx.random.uniform(shape=(3,)).tolist() == expected
