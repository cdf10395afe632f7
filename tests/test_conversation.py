"""Conversations kept between requests: a later turn reads only what is new, and its text is that of a cold run."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, example, given, settings

from dflash_mlx import DFlashGenerator, engine
from dflash_mlx.conversation import Conversations, common_prefix
from dflash_mlx.errors import UsageError
from dflash_mlx.loading import render
from dflash_mlx.prompting import requested
from dflash_mlx.request import Options
from dflash_mlx.target import kept
from tests.kit.planned import PlannedDrafter
from tests.kit.talk import ENDINGS, TURNS, Talk, talk_through
from tests.loading.checkpoints import VOCAB, write_draft, write_target

GREEDY: dict[str, Any] = {}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    return write_target(root / "target", eos_token_id=None), write_draft(root / "draft")


@pytest.fixture(scope="module")
def cold(folders: tuple[Path, Path]) -> Iterator[DFlashGenerator]:
    """Decodes plainly and keeps nothing; no token ends an answer but those that a test names."""
    with DFlashGenerator(folders[0], mode="off", kept_gb=0) as made:
        made.target = replace(made.target, eos_ids=())
        made._engine = replace(made._engine, pair=replace(made._engine.pair, target=made.target))
        yield made


@pytest.fixture(scope="module")
def loaded(folders: tuple[Path, Path], cold: DFlashGenerator) -> DFlashGenerator:
    return DFlashGenerator(cold.target, folders[1])


@pytest.fixture
def runner(loaded: DFlashGenerator) -> DFlashGenerator:
    """A drafted generator that keeps nothing yet."""
    loaded._kept.clear()
    return loaded


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@given(turns=TURNS)
@_settings(4)
def test_every_turn_is_that_of_a_cold_run_and_reads_only_what_is_new(
    runner: DFlashGenerator, cold: DFlashGenerator, options: dict[str, Any], turns: Any
) -> None:
    """Whatever was accepted, and however the turn before ended."""
    talk_through(runner, cold, options, turns)


@pytest.mark.slow
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@given(turns=TURNS)
@example(  # the tokenizer's own last token is drawn in the third answer
    turns=[
        ([0], "length", 3, 0, [0, 0, 0, 0, 1, 0, 0, 2, 2, 3, 19]),
        ([0], "length", 1, 0, [1, 1, 32, 0, 1, 0]),
        ([0], "length", 8, 0, [0]),
    ]
)
@_settings(80)
def test_every_turn_is_that_of_a_cold_run_many_times(
    runner: DFlashGenerator, cold: DFlashGenerator, options: dict[str, Any], turns: Any
) -> None:
    talk_through(runner, cold, options, turns)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_cache_that_cannot_be_cut_goes_back_to_the_mark(
    runner: DFlashGenerator, cold: DFlashGenerator, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """As with recurrent and ring caches: the snapshot taken while the prompt was read brings the state back."""
    monkeypatch.setattr(kept, "goes_back", lambda cache: False)
    talk = Talk(runner, cold, SAMPLED)
    messages = [{"role": "user", "content": "What is it?"}]
    ids = render(cold.target.tokenizer, messages, think=True)  # ends with a think tag that no history has
    talk.turn(ids, [3, 0, 7], ending, 9)
    settled = requested(runner._engine.pair, messages, Options(think=True)).settled
    assert 0 < settled < len(ids)
    later = [*ids[:settled], *cold.target.tokenizer.encode("Short.<|end|>\n<|start|>user\nAnd?")]
    truth = cold.generate(later, max_new_tokens=12, **SAMPLED)
    monkeypatch.setattr(
        engine, "Drafter", lambda *_, **__: PlannedDrafter([*later, *truth.token_ids], [2], vocab_size=VOCAB)
    )
    result = runner.generate(later, max_new_tokens=12, **SAMPLED)
    assert result.token_ids == truth.token_ids


def test_a_template_that_rewrites_history_reads_only_from_the_last_place_it_leaves_alone(
    folders: tuple[Path, Path],
    runner: DFlashGenerator,
    cold: DFlashGenerator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The prompt ends with a think tag, the history holds none."""
    monkeypatch.setattr(kept, "goes_back", lambda cache: False)
    first = [{"role": "user", "content": "What is it?"}]
    answered = [*first, {"role": "assistant", "content": "It is."}, {"role": "user", "content": "And?"}]
    options = {"think": True, "max_new_tokens": 10, **SAMPLED}
    ids = [render(cold.target.tokenizer, m, think=True) for m in (first, answered)]
    before = runner.generate(first, **options)
    after = runner.generate(answered, **options)
    shared = common_prefix(*ids)
    assert shared < len(ids[0]), "the template takes something back"
    assert (before.stats.reused_tokens, before.stats.read_tokens) == (0, len(ids[0]))
    assert (after.stats.reused_tokens, after.stats.read_tokens) == (shared, len(ids[1]) - shared)
    assert after.token_ids == cold.generate(answered, **options).token_ids


def test_the_numbers_are_true_in_both_directions(runner: DFlashGenerator) -> None:
    prompt = list(range(10, 60))
    stats = [runner.generate(p, max_new_tokens=5).stats for p in (prompt, prompt, [1, 2, 3], [*prompt, 7])]
    assert [s.reused_tokens for s in stats] == [0, 49, 0, 50]
    assert all(s.reused_tokens + s.read_tokens == s.prompt_tokens for s in stats)
    assert stats[1].seconds.first_token == stats[1].seconds.prefill > 0


def test_a_shared_beginning_is_copied_and_both_conversations_go_on(
    runner: DFlashGenerator, cold: DFlashGenerator
) -> None:
    """Two conversations taking turns."""
    system = list(range(100, 130))
    talks = [[*system, 1, 2, 3, 4], [*system, 50, 51, 52]]
    reused = []
    for turn in range(3):
        for talk in talks:
            result = runner.generate(talk, max_new_tokens=8 + turn, **SAMPLED)
            assert result.token_ids == cold.generate(talk, max_new_tokens=8 + turn, **SAMPLED).token_ids
            reused.append(result.stats.read_tokens)
            talk += [*result.token_ids, 60 + turn]
    assert reused == [34, 3, 2, 2, 2, 2] and len(runner._kept) == 2


def test_a_forked_context_is_not_written_over_by_the_one_it_came_from(runner: DFlashGenerator) -> None:
    """Both share rows until one of them is parted; who goes on first must not matter."""
    beginning = list(range(100, 130))
    runner.generate([*beginning, 1, 2, 3, 4], max_new_tokens=9)
    forked = engine.Drafter(runner._engine.pair.draft, runner.target.model)
    start = runner._kept.resume([*beginning, 50, 51, 52], runner.target.model, forked)
    assert start.reused == forked.context_length == 30 and len(runner._kept) == 1
    [state] = runner._kept._states
    third = engine.Drafter(runner._engine.pair.draft, runner.target.model)
    third.restore(state.context)
    assert third.rewind(30)
    expected = _logits(third)
    went_on = engine.Drafter(runner._engine.pair.draft, runner.target.model)
    went_on.restore(state.context)
    runner._kept.clear()
    del state
    assert went_on.rewind(10)
    rows = runner.target.model.verify(mx.arange(40), runner.target.model.make_cache(), went_on.taps).features
    mx.eval(rows)
    went_on.inject(rows, 40)
    went_on.settle()
    assert mx.array_equal(_logits(forked), expected)


def _logits(drafter: Any) -> mx.array:
    logits = drafter.logits(3, 8)
    mx.eval(logits)
    return logits


def test_two_threads_get_the_texts_they_get_alone(runner: DFlashGenerator, cold: DFlashGenerator) -> None:
    system = list(range(100, 120))
    wrong: list[str] = []

    def converse(said: int) -> None:
        ids = [*system, said]
        for _ in range(3):
            result = runner.generate(ids, max_new_tokens=6, **SAMPLED)
            if result.token_ids != truths[tuple(ids)]:
                wrong.append(f"{said}: {ids}")
            ids = [*ids, *truths[tuple(ids)], said]

    truths = {}
    for said in (7, 8):
        ids = [*system, said]
        for _ in range(3):
            truths[tuple(ids)] = cold.generate(ids, max_new_tokens=6, **SAMPLED).token_ids
            ids = [*ids, *truths[tuple(ids)], said]
    threads = [threading.Thread(target=converse, args=(said,)) for said in (7, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_least_recently_used_leaves_when_memory_is_short(runner: DFlashGenerator) -> None:
    """memory: states together stay within the limit."""
    runner.generate([1, 2, 3], max_new_tokens=3)
    [state] = runner._kept._states
    small = Conversations(2 * state.nbytes + state.nbytes // 2)
    for _ in range(4):
        small.keep(replace(state))
        assert small.nbytes <= small.limit
    assert len(small) == 2
    oldest, newest = replace(state, ids=(5, 6, 7)), replace(state)
    small.clear()
    small.keep(oldest)
    small.keep(newest)
    small.resume([5, 9], runner.target.model, None)  # used, and kept as its end is another's
    small.keep(replace(state))
    assert oldest in small._states and newest not in small._states
    tiny = Conversations(state.nbytes - 1)
    tiny.keep(state)
    assert len(tiny) == 0


def test_nothing_is_kept_where_none_is_wanted(folders: tuple[Path, Path], cold: DFlashGenerator) -> None:
    for _ in range(2):
        assert cold.generate([1, 2, 3, 4], max_new_tokens=3).stats.reused_tokens == 0
    with pytest.raises(UsageError, match="kept_gb is -1"):
        DFlashGenerator(*folders, kept_gb=-1)


def test_a_comparison_is_cold(runner: DFlashGenerator) -> None:
    runner.generate("Say it.", max_new_tokens=3)
    assert runner.compare("Say it.", max_new_tokens=3).drafted.stats.reused_tokens == 0
