"""Never slower for long: the policy against the best fixed choice in hindsight, on given costs, without a clock."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_mlx.policy import Adaptive, CostCurve, Depth, Plan, WholeBlock
from dflash_mlx.policy.costs import rising
from dflash_mlx.policy.odds import Odds, expected_tokens
from tests.kit.bets import (
    BUNDLED,
    CURVES,
    LONG_CONTEXT,
    REFERENCE_BLAS,
    answers,
    curve,
    decode,
    fixed,
    telling,
    text_of,
)

LENGTH, SEEDS = 1500, 4

PROCESSES = {
    "always wrong": lambda i, j: 0.0,
    "poor": lambda i, j: 0.3,
    "prose": lambda i, j: 0.6 * 0.985**j,
    "code": lambda i, j: 0.87 * 0.99**j,
    "good": lambda i, j: 0.95,
    "always right": lambda i, j: 1.0,
    "getting worse": lambda i, j: 0.9 - 0.6 * i / LENGTH,
    "getting better": lambda i, j: 0.3 + 0.6 * i / LENGTH,
    "bursts": lambda i, j: 0.92 if (i // 150) % 2 else 0.35,
}


@cache
def texts(process: str, block_size: int, length: int = LENGTH):
    return [text_of(seed, length, block_size, PROCESSES[process]) for seed in range(SEEDS)]


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("machine", CURVES)
def test_regret_against_the_best_fixed_length_is_small(machine: str, process: str) -> None:
    costs = CURVES[machine]
    places = texts(process, costs.block_size)
    best = min(sum(fixed(costs, text, n) for text in places) for n in range(costs.block_size))
    spent = sum(decode(Adaptive(costs), costs, text).seconds for text in places)
    assert spent <= 1.03 * best


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("machine", CURVES)
def test_a_short_answer_costs_little_more_than_plain_decoding(machine: str, process: str) -> None:
    """What is lost is lost at the beginning: at most a few steps, and once."""
    costs = CURVES[machine]
    for text in texts(process, costs.block_size):
        spent = decode(Adaptive(costs), costs, text[:64]).seconds
        assert spent <= fixed(costs, text[:64], 0) + 7 * costs.at(0).plain


def test_a_drafter_that_is_always_wrong_is_given_up_after_a_few_rounds_and_hardly_tried_again() -> None:
    for costs in CURVES.values():
        (text, *_) = texts("always wrong", costs.block_size)
        run, plain = decode(Adaptive(costs), costs, text), costs.at(0).plain
        tried = [i for i, n in enumerate(run.choices) if n > 0]
        gaps = [b - a for a, b in zip(tried, tried[1:], strict=False) if b - a > 4]
        assert len(gaps) <= 8 and gaps == sorted(gaps), "gaps between tries only grow"
        assert run.seconds < 1.015 * len(text) * plain
        first = decode(Adaptive(costs), costs, text[:64]).seconds
        # From the 65th token on, over the length of a usual answer.
        assert decode(Adaptive(costs), costs, text[:364]).seconds - first < 300 * plain / 0.97


@pytest.mark.parametrize("tokens", [64, 96, 128])
def test_real_answers_are_hardly_slower_in_any_class(tokens: int) -> None:
    """Prose was at 0.96 of plain decoding over 96 tokens: what is lost is lost in the first rounds."""
    for kind, places in answers().items():
        cut = [text[:tokens] for text in places]
        plain = sum(fixed(BUNDLED, text, 0) for text in cut)
        spent = sum(decode(Adaptive(BUNDLED), BUNDLED, text).seconds for text in cut)
        assert spent <= plain / 0.97, kind


def test_real_answers_come_close_to_the_best_fixed_length() -> None:
    every = [text for places in answers().values() for text in places]
    best = min(sum(fixed(BUNDLED, text, n) for text in every) for n in range(8))
    assert sum(decode(Adaptive(BUNDLED), BUNDLED, text).seconds for text in every) <= 1.03 * best


def test_a_perfect_drafter_comes_within_3_percent_of_the_best_fixed_length() -> None:
    for costs in (*CURVES.values(), BUNDLED):
        for text in texts("always right", costs.block_size):
            short = text[:800]
            best = min(fixed(costs, short, n) for n in range(costs.block_size))
            assert decode(Adaptive(costs), costs, short).seconds <= 1.03 * best


def test_a_perfect_drafter_is_never_given_up() -> None:
    for costs in CURVES.values():
        (text, *_) = texts("always right", costs.block_size)
        assert 0 not in decode(Adaptive(costs), costs, text[:-1]).choices[:-1]


def test_nothing_is_ever_drafted_where_even_a_perfect_drafter_would_lose() -> None:
    """With MLX's own BLAS on Linux n rows cost n steps."""
    (text, *_) = texts("always right", 16)
    assert set(decode(Adaptive(REFERENCE_BLAS), REFERENCE_BLAS, text).choices) == {0}
    assert not REFERENCE_BLAS.at(0).can_pay and CURVES["m1"].at(0).can_pay


def test_where_a_context_has_made_drafting_hopeless_no_prompt_is_read_for_it() -> None:
    deep = Depth(4000, 22, 60, 0.3, {1: 22, 16: 400})
    costs = CostCurve([Depth(0, 20, 5, 0.3, {1: 20, 16: 45}), deep], 16)
    assert costs.can_pay_after(0) and costs.can_pay_after(500)
    assert not costs.can_pay_after(4000) and not costs.can_pay_after(9000)
    later = CostCurve([deep._replace(tokens=0), Depth(4000, 22, 6, 0.3, {1: 22, 16: 60})], 16)
    assert not later.at(0).can_pay and later.can_pay_after(0), "it may begin to pay on the way"


def test_decisions_settle() -> None:
    """On a steady text the length hardly changes once something was seen, and drafting is not switched on and off."""
    for costs in CURVES.values():
        for text in texts("good", costs.block_size):
            late = decode(Adaptive(costs), costs, text).choices[40:-20]
            changes = sum(a != b for a, b in zip(late, late[1:], strict=False))
            assert changes <= len(late) / 8
            assert 0 not in late[len(late) // 2 :]


def test_drafting_is_taken_up_again_when_the_text_has_changed() -> None:
    costs = CURVES["openblas"]
    text = text_of(1, 1200, costs.block_size, lambda i, j: 0.05 if i < 300 else 0.9)
    choices = decode(Adaptive(costs), costs, text).choices
    assert choices[100:300].count(0) > 160
    assert 0 not in choices[-100:-1]


def test_speculation_stops_where_the_context_has_made_it_too_dear() -> None:
    text = text_of(3, 600, 16, lambda i, j: 0.75)
    near = decode(Adaptive(LONG_CONTEXT), LONG_CONTEXT, text)
    far = decode(Adaptive(LONG_CONTEXT), LONG_CONTEXT, text, depth=8000)
    assert near.choices.count(0) < 20 < 500 < far.choices.count(0)
    assert near.seconds < 0.7 * fixed(LONG_CONTEXT, text, 0)
    assert far.seconds < 1.04 * fixed(LONG_CONTEXT, text, 0, depth=8000)


def test_confidences_are_read_where_they_tell_blocks_apart() -> None:
    """Better than any fixed length; where they tell nothing or lie, nothing is lost by having looked."""
    costs = CURVES["openblas"]
    places = [telling(seed, LENGTH, costs.block_size) for seed in range(SEEDS)]
    best = min(sum(fixed(costs, text, n) for text in places) for n in range(costs.block_size))
    runs = [decode(Adaptive(costs), costs, text) for text in places]
    assert sum(run.seconds for run in runs) < 0.97 * best
    assert all(run.looks > 0.8 * len(run.choices) for run in runs)
    lying = [telling(seed, LENGTH, costs.block_size, honest=False) for seed in range(SEEDS)]
    best = min(sum(fixed(costs, text, n) for text in lying) for n in range(costs.block_size))
    assert sum(decode(Adaptive(costs), costs, text).seconds for text in lying) < 1.03 * best


def test_confidences_are_not_read_where_waiting_for_them_is_dear() -> None:
    dear = curve(52, 16, {1: 54, 2: 57, 4: 62, 8: 75}, block_size=8, look=40)
    run = decode(Adaptive(dear), dear, telling(0, LENGTH, 8))
    assert run.looks < 0.12 * len(run.choices)


def test_the_same_text_gives_the_same_choices() -> None:
    for costs in CURVES.values():
        (text, *_) = texts("bursts", costs.block_size)
        assert decode(Adaptive(costs), costs, text) == decode(Adaptive(costs), costs, text)


@given(
    rounds=st.lists(st.tuples(st.integers(0, 7), st.lists(st.floats(0, 1), min_size=7, max_size=7))),
    machine=st.sampled_from([c for c in CURVES.values() if c.block_size == 8] + [LONG_CONTEXT]),
    most=st.integers(0, 7),
)
def test_no_plan_goes_beyond_what_can_be_verified(rounds, machine, most: int) -> None:
    policy = Adaptive(machine)
    for right, confidences in rounds:
        plan = policy.plan(depth=100, most=most)
        assert 0 <= plan.verify <= most and (plan.verify or plan.steps >= 1)
        if plan.verify:
            n = policy.choose(confidences) if plan.look else plan.verify
            assert 0 <= n <= most
            policy.observe(n, min(n, right))


def test_whole_blocks_are_verified_when_asked_for() -> None:
    policy = WholeBlock()
    assert policy.plan(depth=5, most=7) == Plan(7) == policy.plan(depth=5000, most=7)
    policy.observe(7, 0)
    assert policy.plan(depth=13, most=2) == Plan(2)


def test_expected_tokens_are_sums_of_products() -> None:
    assert expected_tokens([0.5, 0.5, 0.0, 1.0]) == [1.0, 1.5, 1.75, 1.75, 1.75]


def test_odds_come_to_what_is_seen() -> None:
    truth, odds = [0.9, 0.5, 0.8], Odds(3)
    for text in (text_of(0, 600, 4, lambda i, j: truth[j]),):
        for right, _ in text:
            odds.observe(3, right, None)
    assert odds.by_position() == pytest.approx(truth, abs=0.15)


def test_positions_that_were_never_verified_are_not_thought_better_than_the_rest() -> None:
    odds = Odds(7)
    for _ in range(60):
        odds.observe(2, 1, None)
    assert odds.by_position()[6] < 0.65


def test_confidences_mean_what_they_turned_out_to_mean() -> None:
    odds = Odds(4)
    for _ in range(80):
        odds.observe(1, 0, [0.9, 0.9, 0.9, 0.9])
        odds.observe(1, 1, [0.2, 0.9, 0.9, 0.9])
    assert odds.by_confidence([0.9])[0] < 0.1 and odds.by_confidence([0.2])[0] > 0.9


def test_costs_between_measured_rows_and_depths_are_interpolated() -> None:
    costs = CostCurve([Depth(100, 10, 2, 1, {1: 10, 4: 16}), Depth(300, 12, 4, 1, {1: 12, 4: 24})], 4)
    assert costs.at(50) == costs.at(100)
    assert costs.at(100).verify == (10, 12, 14, 16)
    middle = costs.at(200)
    assert (middle.plain, middle.draft, middle.round(3)) == (11, 3, 3 + 20)
    assert costs.at(500).plain == 14 and costs.at(500).verify[3] == pytest.approx(32)


def test_a_curve_that_bends_down_is_kept_and_one_that_falls_is_not() -> None:
    """Measured curves are not convex: the second row of a mixture costs more than any later one."""
    measured = {1: 8.5, 2: 13.5, 3: 15.6, 5: 20.7, 8: 28.1}
    costs = CostCurve([Depth(0, 8.5, 2, 0, measured)], 8).at(0)
    assert [costs.verify[rows - 1] for rows in measured] == list(measured.values())
    stepped = CostCurve([Depth(0, 8, 2, 0, {1: 8, 2: 13, 3: 11, 4: 14})], 4).at(0)
    assert stepped.verify == (8, 11, 11, 14)


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=20))
def test_no_pass_is_thought_dearer_than_a_larger_one(values: list[float]) -> None:
    fitted = rising(values)
    assert fitted == sorted(fitted) and all(fit in values[i:] for i, fit in enumerate(fitted))
    assert all(fit <= value for fit, value in zip(fitted, values, strict=True))
    assert rising(sorted(values)) == sorted(values)
