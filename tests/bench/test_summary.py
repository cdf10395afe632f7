"""Figures from trials, by hand: medians and quartiles, pairs, halves, positions, verdicts."""

import pytest

from dflash_mlx.bench.arms import PLAIN
from dflash_mlx.bench.summary import (
    Position,
    Spread,
    all_the_way,
    best_fixed,
    disturbed,
    positions,
    rows,
    spread,
)
from dflash_mlx.core import Difference
from tests.bench.made import answer, trial


def test_a_spread_is_the_median_and_the_quartiles():
    assert spread([]) is None
    assert spread([1.5]) == Spread(1.5, 1.5, 1.5, 1)
    assert spread([5, 1, 4, 2, 3]) == Spread(3, 2, 4, 5)
    assert spread([1, 2, 3, 10]) == Spread(2.5, 1.75, 4.75, 4)


def test_speed_ups_are_of_answers_in_the_same_trial():
    """A slow minute that falls on both arms of a trial leaves the ratio alone."""
    trials = [
        trial(number=1, plain=10.0, auto=12.0),
        trial(number=2, plain=2.0, auto=2.6),
        trial(number=3, plain=10.0, auto=14.0),
    ]
    [row] = rows(trials, "auto")
    speedup = row.figures("auto").speedup
    assert (speedup.low, speedup.median, speedup.high) == pytest.approx((1.25, 1.3, 1.35))
    assert row.figures(PLAIN).speedup is None
    assert row.figures(PLAIN).tokens_per_second == pytest.approx(30 / (1 + 5 + 1))


def test_end_to_end_counts_the_prompt():
    [row] = rows([trial(plain=answer(10.0, prefill=1.0), auto=answer(20.0, prefill=1.5))], "auto")
    figures = row.figures("auto")
    assert figures.speedup.median == pytest.approx(2.0)
    assert figures.end_to_end.median == pytest.approx(2.0 / 2.0)
    assert figures.first_token == 1.5
    assert figures.end_to_end_per_second == pytest.approx(11 / 2.0)


def test_tokens_per_round_acceptance_memory_and_the_plain_share():
    drafted = answer(10.0, tokens=11, accepted=[3, 0, 1], verified=[4, 4, 2], peak=2.5, plain_rounds=4)
    [row] = rows([trial(plain=10.0, auto=drafted), trial(number=2, plain=10.0, auto=drafted)], "auto")
    figures = row.figures("auto")
    assert figures.tokens_per_round == pytest.approx(10 / 3)
    assert figures.acceptance_rate == pytest.approx(4 / 10)
    assert figures.plain_share == pytest.approx(4 / 10)
    assert (figures.peak_memory_gb, figures.answers, figures.new_tokens) == (2.5, 2, 22)


def test_acceptance_by_position():
    """A place counts where it was verified and all before it were right."""
    stats = answer(1.0, accepted=[2, 0, 3], verified=[3, 3, 3]).stats
    assert positions([stats]) == (Position(3, 2), Position(2, 2), Position(2, 1))
    assert all_the_way(positions([stats])) == pytest.approx([2 / 3, 2 / 3, 1 / 3])


def test_a_place_that_was_not_verified_says_nothing():
    stats = answer(1.0, accepted=[1, 1], verified=[1, 4]).stats
    assert positions([stats]) == (Position(2, 2), Position(1, 0))


def test_what_the_end_of_an_answer_cut_off_was_not_rejected():
    stats = answer(1.0, accepted=[3, 0], verified=[3, 3], reason="stop").stats
    assert positions([stats]) == (Position(1, 1),) * 3


def test_a_row_for_each_class_one_for_all_and_one_for_each_context():
    trials = [
        trial("code", plain=10.0, auto=20.0),
        trial("prose", plain=10.0, auto=5.0),
        trial("code", context=2048, plain=4.0, auto=4.0),
        trial("prose", context=2048, plain=4.0, auto=8.0),
    ]
    found = rows(trials, "auto")
    assert [(row.kind, row.context) for row in found] == [
        ("code", 0),
        ("prose", 0),
        ("all", 0),
        ("all", 2048),
    ]
    assert [row.figures("auto").speedup.median for row in found] == pytest.approx([2.0, 0.5, 1.25, 1.5])


def test_arms_stand_in_one_order_whoever_ran_first():
    [row] = rows([trial(block_16=1.0, block_2=1.0, auto=1.0, plain=1.0)], "auto")
    assert [figures.arm for figures in row.arms] == ["plain", "auto", "block 2", "block 16"]


def test_the_best_fixed_block_is_chosen_on_other_questions():
    """Block 2 wins on question 1 and loses on question 2, so neither may be judged where it was chosen."""
    trials = [
        trial(number=1, plain=10.0, auto=12.0, block_2=15.0, block_4=10.0),
        trial(number=2, plain=10.0, auto=12.0, block_2=8.0, block_4=16.0),
    ]
    found = best_fixed(trials, "auto")
    assert found.chosen == ("block 2", "block 4")
    assert sorted([found.ratio.low, found.ratio.high]) == pytest.approx(
        [1.2 + 0.25 * 0.3, 1.2 + 0.75 * 0.3]
    ), "12 / 8 on question 2 and 12 / 10 on question 1"


def test_repeats_of_a_question_stay_in_one_half():
    """Question 2 alone likes block 4: split by trial, its repeats would fall into both halves."""
    likes = {1: (20.0, 5.0), 2: (5.0, 20.0), 3: (20.0, 5.0)}
    trials = [
        trial(number=number, repeat=repeat, plain=10.0, auto=10.0, block_2=two, block_4=four)
        for repeat in range(2)
        for number, (two, four) in likes.items()
    ]
    found = best_fixed(trials, "auto")
    assert found.chosen == ("block 2", "block 4")
    assert (found.ratio.count, found.ratio.low, found.ratio.high) == (6, 2.0, 2.0)


def test_one_question_leaves_nothing_to_judge_on():
    assert best_fixed([trial(plain=1.0, auto=1.0, block_2=1.0)], "auto") is None
    assert best_fixed([trial(number=n, plain=1.0, auto=1.0) for n in (1, 2)], "auto") is None


@pytest.mark.parametrize(
    ("speeds", "verdict"),
    [
        ({"auto": 13.0}, "auto is faster"),
        ({"auto": 9.0}, "plain is faster here"),
        ({"auto": 9.95, "block_4": 8.0}, "plain is faster here"),
        ({"auto": 9.9, "block_4": 12.0}, "no clear difference"),
        ({"auto": 10.2}, "no clear difference"),
    ],
    ids=["faster", "slower", "nothing drafted wins", "a block wins", "within the noise"],
)
def test_the_verdict(speeds, verdict):
    [row] = rows([trial(number=n, plain=10.0, **speeds) for n in (1, 2, 3)], "auto")
    assert row.verdict == verdict


def test_a_gain_that_the_spread_hides_is_none():
    trials = [trial(number=n, plain=10.0, auto=speed) for n, speed in enumerate([8.0, 8.5, 11.0, 14.0, 14.0])]
    assert rows(trials, "auto")[0].verdict == "no clear difference"


def test_a_loss_that_the_spread_hides_is_none():
    """Where a fixed block wins, drafting pays: only a clear loss of the own policy speaks for plain."""
    hidden, clear = [8.0, 9.0, 9.5, 12.0, 12.0], [8.0, 9.0, 9.5, 9.8, 12.0]
    for speeds, verdict in ((hidden, "no clear difference"), (clear, "plain is faster here")):
        trials = [trial(number=n, plain=10.0, auto=speed, block_4=12.0) for n, speed in enumerate(speeds)]
        assert rows(trials, "auto")[0].verdict == verdict


def test_answers_of_one_token_have_no_speed():
    trials = [
        trial(number=1, plain=answer(1.0, tokens=1), auto=answer(1.0, tokens=1)),
        trial(number=2, plain=10.0, auto=20.0),
    ]
    [row] = rows(trials, "auto")
    assert row.figures("auto").speedup == Spread(2.0, 2.0, 2.0, 1)
    assert rows(trials[:1], "auto")[0].verdict == "answers too short to say"


def test_texts_that_differ_are_kept():
    differs = Difference(3, 1, 2, 1e-4)
    [row] = rows([trial(plain=1.0, auto=1.0, differences={"auto": differs})], "auto")
    assert row.figures("auto").differences == (differs,)


def test_trials_beside_other_work_are_counted():
    """Prompts of one length are held against each other: a longer one is slower by itself."""
    usual = [trial(number=n, plain=speed, auto=speed) for n, speed in enumerate([10.0, 11.0, 9.0, 10.0])]
    longer = [trial(number=n, context=2048, plain=4.0, auto=4.0) for n in range(2)]
    assert disturbed([*usual, *longer]) == 0
    assert disturbed([*usual, *longer, trial(number=9, plain=5.0, auto=1.0)]) == 1
    assert disturbed([]) == 0
