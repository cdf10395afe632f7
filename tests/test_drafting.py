"""Over how many words a pair drafts, and in how many bits: what measured times decide, and what is refused."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_mlx import DFlashGenerator, drafting
from dflash_mlx.calibration import Drafts
from dflash_mlx.calibration.drafts import draft_costs, forget_drafts, measure_drafts
from dflash_mlx.drafter import FrequentWords, save_draft, write_frequent
from dflash_mlx.errors import PairError, UnsupportedError, UsageError
from dflash_mlx.loading.vocabulary import always, by_frequency
from dflash_mlx.policy import Adaptive, CostCurve, Dearer, Depth
from tests.drafter.test_formats_in_use import network_of
from tests.kit.models import tiny_target
from tests.kit.planned import PlannedDrafter
from tests.loading.checkpoints import VOCAB, write_draft, write_target

ASK = {"max_new_tokens": 24, "temperature": 0.0}
SEEN = FrequentWords(VOCAB, tuple(range(200, 260)), ((20, 0.2), (80, 0.05)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    return write_target(root / "target", eos_token_id=None), write_draft(root / "draft")


@pytest.fixture(scope="module")
def whole(folders: tuple[Path, Path]) -> DFlashGenerator:
    return DFlashGenerator(*folders, mode="on")


def seconds(short: float, full: float = 0.04) -> Drafts:
    """A head whose time grows with its words, from `short` for none to `full` for all of 32,768."""
    draft = {str(n): short + (full - short) * n / 32768 for n in drafting.lengths(32768)}
    return Drafts(0.08, draft | {"full": full})


def test_lists_of_a_sixteenth_to_half_of_the_words_are_tried_and_none_of_a_small_vocabulary():
    assert drafting.lengths(49152) == [3072, 6144, 12288, 24576]
    assert drafting.lengths(151_936) == [9472, 18944, 37888, 75776]
    assert drafting.lengths(4000) == []


def test_a_head_that_costs_little_is_not_shortened():
    missed = dict.fromkeys(drafting.lengths(32768), 0.001)
    assert drafting.best_length(seconds(0.0399), missed, block_size=8) is None
    assert drafting.best_length(seconds(0.01), missed, block_size=8) == 2048


def test_a_list_that_misses_much_is_not_taken_however_short_its_time():
    sizes = drafting.lengths(32768)
    assert drafting.best_length(seconds(0.01), dict.fromkeys(sizes, 0.3), block_size=8) is None
    missed = dict(zip(sizes, (0.3, 0.2, 0.02, 0.01), strict=True))
    assert drafting.best_length(seconds(0.01), missed, block_size=8) == 8192


@given(short=st.floats(0.001, 0.039), verify=st.floats(0.01, 0.5), size=st.sampled_from([2048, 8192]))
def test_a_list_is_left_where_it_stops_paying(short, verify, size):
    found = seconds(short)._replace(verify=verify)
    share = drafting.bearable(found, size, block_size=8)
    full = drafting._tokens(0.0, 8) / (verify + found.draft["full"])
    assert drafting._tokens(share, 8) / (verify + found.draft[str(size)]) >= full
    assert share == 1.0 or drafting.best_length(found, {size: share + 0.011}, block_size=8) is None


def test_a_drafter_is_packed_where_that_pays_clearly():
    def best(whole: float, eight: float, four: float) -> int | None:
        return drafting.best_bits(Drafts(0.05, {"unpacked": whole, "8": eight, "4": four}))

    assert best(0.02, 0.06, 0.06) is None  # a CPU
    assert best(0.02, 0.0195, 0.0192) is None
    assert best(0.02, 0.015, 0.0145) == 8
    assert best(0.02, 0.018, 0.010) == 4


def test_specials_and_single_characters_come_first_then_what_was_counted_then_the_rest(whole):
    tokenizer = whole.target.tokenizer
    first = always(tokenizer)
    assert {*tokenizer.eos_token_ids, *tokenizer.convert_tokens_to_ids(["a", "Z", "."])} <= set(first)
    rest = [word for word in range(VOCAB) if word not in first]
    assert by_frequency(tokenizer, VOCAB) == first + rest
    seen = [word for word in SEEN.ids if word in rest]
    assert by_frequency(tokenizer, VOCAB, SEEN) == first + seen + [word for word in rest if word not in seen]


@pytest.mark.parametrize("words", [1, 200])
def test_text_is_that_of_any_other_list_and_stats_say_which_was_used(whole, folders, words):
    with DFlashGenerator(whole.target, folders[1], mode="on", draft_vocab=words) as short:
        result, expected = short.generate("Say it.", **ASK), whole.generate("Say it.", **ASK)
        assert (result.token_ids, result.stats.draft_vocab) == (expected.token_ids, words)
        assert expected.stats.draft_vocab is None and result.stats.verified > 0
        row = 64 * 4 + 4  # of the head, and an id
        assert round((short.weights_gb - whole.weights_gb) * 1e9) == words * row
        again = short.generate("Say it. And more.", **ASK)  # goes on with what is kept of the first
    assert again.token_ids == whole.generate("Say it. And more.", **ASK).token_ids


def test_turns_that_are_taken_back_draft_as_cold_ones_do(whole, folders):
    """Words belong to a text: those of an answer that was dropped are not proposed in its place."""
    with DFlashGenerator(whole.target, folders[1], mode="on", draft_vocab=40) as short:
        cold = [short.generate(text, **ASK).stats for text in ("One thing.", "One thing. Two.")]
        short._kept.clear()
        warm = [
            short.generate(text, **ASK).stats for text in ("One thing. Two.", "One thing.", "One thing. Two.")
        ]
    assert warm[1].accept_lengths == cold[0].accept_lengths
    assert warm[0].accept_lengths == warm[2].accept_lengths == cold[1].accept_lengths


@pytest.mark.parametrize("value", [0, -3, True, 2.5, "some", "all"], ids=str)
def test_other_values_are_refused_before_anything_is_loaded(value):
    with pytest.raises(UsageError, match="draft_vocab is .*; expected 'auto', 'full' or a number of words"):
        DFlashGenerator("/nowhere", draft_vocab=value)


def test_more_words_than_there_are_and_fewer_than_a_selector_chooses_from_are_refused(
    whole, folders, tmp_path
):
    with pytest.raises(UsageError, match=r"draft_vocab is 320; .* can propose from 1 to 319 words"):
        DFlashGenerator(whole.target, folders[1], draft_vocab=VOCAB)
    save_draft(network_of("dflash2"), tmp_path / "dflash2")
    with pytest.raises(UsageError, match=r"draft_vocab is 15; .* can propose from 16 to 319 words"):
        DFlashGenerator(whole.target, tmp_path / "dflash2", draft_vocab=15)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("speculators", r"drafts with a vocabulary of its own \(128 words\)"),
        ("dspark", "has a Markov head, which biases every word"),
    ],
)
def test_drafters_that_cannot_propose_from_some_words_are_refused_by_name_or_left_whole(
    whole, tmp_path, kind, why
):
    save_draft(network_of(kind), tmp_path / kind)
    with pytest.raises(UnsupportedError, match=why) as caught:
        DFlashGenerator(whole.target, tmp_path / kind, mode="on", draft_vocab=40)
    assert "leave draft_vocab out or give 'full'" in str(caught.value)
    with DFlashGenerator(whole.target, tmp_path / kind, mode="on", draft_vocab="auto") as made:
        assert made.engine.shortlist is None


def test_a_vocabulary_needs_a_drafter(whole):
    with pytest.raises(
        UsageError, match="mode='off' decodes without a drafter, so draft_vocab would be ignored"
    ):
        DFlashGenerator(whole.target, mode="off", draft_vocab=100)


def test_what_lies_beside_the_drafter_says_which_words_are_frequent(whole, folders, tmp_path):
    folder = write_draft(tmp_path / "draft")
    write_frequent(folder, SEEN)
    with DFlashGenerator(whole.target, folder, mode="on", draft_vocab=200) as made:
        assert made.engine.shortlist and set(SEEN.ids) <= set(made.engine.shortlist.words)
    write_frequent(folder, replace(SEEN, vocab_size=VOCAB + 1))
    with pytest.raises(PairError, match="those of a vocabulary of 321, but .* has 320 words"):
        DFlashGenerator(whole.target, folder, mode="on", draft_vocab=200)


def ticking(clock: list[float]) -> Callable[[], float]:
    """A clock that also moves a little by itself: no time is none."""

    def read() -> float:
        clock[0] += 1e-6
        return clock[0]

    return read


class Costly(PlannedDrafter):
    """A drafter that takes the seconds it is told on a clock that only it moves."""

    def __init__(self, clock: list[float], cost: Callable[[], float]):
        super().__init__([1] * 200, [0], vocab_size=128)
        self._clock, self._cost = clock, cost

    def propose(self, anchor: int, block_size: int) -> Any:
        self._clock[0] += self._cost()
        self.context_length = 0
        return super().propose(1, block_size)


def ways_of(clock: list[float], costs: dict[str, Sequence[float]]) -> dict[str, Callable[[], Any]]:
    def way(values: Sequence[float]) -> Callable[[], Costly]:
        left = iter(values)
        return lambda: Costly(clock, lambda: next(left, values[-1]))

    return {name: way(values) for name, values in costs.items()}


def test_a_busy_moment_and_the_first_run_do_not_count():
    clock = [0.0]
    ways = ways_of(clock, {"a": [9.0, 0.02, 0.7, 0.02], "b": [9.0, 0.03, 0.03, 0.9, 0.03]})
    found = measure_drafts(tiny_target(), ways, block_size=8, clock=ticking(clock))
    assert found.draft == pytest.approx({"a": 0.02, "b": 0.03}, rel=0.01)


def test_figures_are_measured_once_and_a_file_of_another_pair_or_a_damaged_one_is_replaced(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    told: list[str] = []

    def costs(key: str, seconds: float, target: Any = tiny_target()) -> Drafts:  # noqa: B008
        clock = [0.0]
        made = lambda: ways_of(clock, {"a": [seconds]})  # noqa: E731
        monkeypatch.setattr(measure_drafts, "__kwdefaults__", {"clock": ticking(clock)})
        return draft_costs(target, ["a"], made, {"pair": key}, block_size=8, tell=told.append)

    first = costs("one", 0.5)
    assert first.draft["a"] == pytest.approx(0.5, rel=0.01) and len(told) == 1
    assert costs("one", 0.9).draft == first.draft and len(told) == 1
    assert costs("two", 0.9).draft["a"] == pytest.approx(0.9, rel=0.01) and len(told) == 2
    for file in (tmp_path / "costs").iterdir():
        record = json.loads(file.read_text())
        file.write_text(json.dumps(record | {"draft": {"a": 0}}))
    assert costs("one", 0.7).draft["a"] == pytest.approx(0.7, rel=0.01) and len(told) == 3
    mx.clear_cache()


def test_what_a_draft_costs_is_measured_again_after_it_was_forgotten(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
    told: list[str] = []

    def ask(**key: str) -> None:
        clock = [0.0]
        monkeypatch.setattr(measure_drafts, "__kwdefaults__", {"clock": ticking(clock)})
        made = lambda: ways_of(clock, {"a": [0.5]})  # noqa: E731
        draft_costs(tiny_target(), ["a"], made, key, block_size=8, tell=told.append)

    ask(pair="one", kernels="none")
    ask(pair="two", kernels="none")
    curve = tmp_path / "costs" / "curve.json"
    curve.write_text(json.dumps({"key": {"pair": "one"}}))
    (tmp_path / "costs" / "broken.json").write_text("{")
    assert forget_drafts({"pair": "one", "kernels": "chosen since"}) == 1
    assert curve.exists() and len(told) == 2
    ask(pair="two", kernels="none")
    assert len(told) == 2
    ask(pair="one", kernels="none")
    assert len(told) == 3
    mx.clear_cache()


def test_while_all_words_are_drafted_over_the_policy_reckons_with_what_that_costs():
    curve = CostCurve([Depth(0, 0.05, 0.02, 0.0, {n: 0.05 + 0.001 * n for n in range(1, 9)})], 8)
    dear = False
    policy = Dearer(curve, extra=0.5, is_dear=lambda: dear)
    assert policy.plan(depth=10, most=7) == Adaptive(curve).plan(depth=10, most=7)
    dear = True  # not even seven right proposals are worth half a second
    assert policy.plan(depth=10, most=7).verify == 0
    dear = False
    assert policy.plan(depth=10, most=7).verify > 0
    assert curve.at(10).draft == 0.02
