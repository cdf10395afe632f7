"""Draws of the target: their law, their noise, their cuts, and what they depend on."""

import os
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.core import SamplingParams
from dflash_mlx.errors import UsageError
from dflash_mlx.sampling import NO_NUMBERS, UNDECIDED, Sampler, _gumbel, _keys, check
from tests.kit.law import law, p_value, penalised

LIKELY = 1e-3
GREEDY = SamplingParams(seed=1)
EVERYTHING = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=3)


def random_logits(rows: int, vocab: int, *, seed: int = 0, scale: float = 2.0, step: float = 0.0) -> mx.array:
    """Normal logits [rows, vocab]; with `step` they are multiples of it, so that many are equal."""
    x = np.random.default_rng(seed).normal(0, scale, (rows, vocab))
    return mx.array(np.round(x / step) * step if step else x, mx.float32)


def drawn(params: SamplingParams, logits: mx.array, position: int = 0) -> list[int]:
    return Sampler(params).draw(logits, position).tolist()


# The law.


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.3, seed=2),
        SamplingParams(temperature=2.0, top_k=4, seed=3),
        SamplingParams(temperature=1.0, top_p=0.6, seed=4),
        SamplingParams(temperature=1.5, min_p=0.3, seed=5),
        SamplingParams(temperature=0.7, top_k=6, top_p=0.85, min_p=0.15, seed=6),
    ],
    ids=["plain", "cold", "top-k", "top-p", "min-p", "all"],
)
@pytest.mark.parametrize("vocab", [8, 5003], ids=["small", "shortlisted"])
def test_frequencies_are_those_of_the_law(params: SamplingParams, vocab: int) -> None:
    """Over 5003 ids eight have all the mass that a cut leaves: the same law through the shortlist."""
    few = np.random.default_rng(9).normal(0, 1.2, 8)
    row = np.full(vocab, -25.0)
    places = np.linspace(0, vocab - 1, 8).astype(int)
    row[places] = few
    trials = 20_000 if vocab == 8 else 800
    draws = drawn(params, mx.broadcast_to(mx.array(row, mx.float32), (trials, vocab)))
    assert UNDECIDED not in draws
    counts = np.bincount(draws, minlength=vocab)[places]
    assert counts.sum() == trials
    assert p_value(counts, law(few, params)) > LIKELY


def test_frequencies_with_penalties_are_those_of_the_law() -> None:
    """A history of period 5, so that every row has one of five windows."""
    params = SamplingParams(
        temperature=0.9,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        top_p=0.95,
        seed=8,
    )
    period, trials, before = [1, 4, 4, 6, 1], 1500, 40
    history = (period * (trials // 5 + 20))[: before + trials - 1]
    few = np.random.default_rng(2).normal(0, 1.5, 8)
    logits = mx.broadcast_to(mx.array(few, mx.float32), (trials, 8))
    draws = np.array(Sampler(params).draw(logits, before, mx.array(history)))
    for phase in range(5):
        expected = law(few, params, history[: before + phase])
        assert p_value(np.bincount(draws[phase::5], minlength=8), expected) > LIKELY
    plainer = replace(params, frequency_penalty=0.0)
    assert p_value(np.bincount(draws[::5], minlength=8), law(few, plainer, history[:before])) < 1e-4


@settings(max_examples=30)
@given(
    history=st.lists(st.integers(0, 15), min_size=1, max_size=60),
    rows=st.integers(1, 6),
    repetition=st.sampled_from([1.0, 0.8, 1.5]),
    presence=st.sampled_from([0.0, -0.5, 0.7]),
    frequency=st.sampled_from([0.0, -0.2, 0.3]),
    temperature=st.sampled_from([0.0, 0.8]),
)
def test_every_row_is_penalised_by_the_tokens_before_it(
    history: list[int], rows: int, repetition: float, presence: float, frequency: float, temperature: float
) -> None:
    """The same draws as without penalties from logits that were penalised row by row in numpy."""
    params = SamplingParams(
        temperature=temperature,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        seed=4,
    )
    rows = min(rows, len(history))
    position = len(history) - rows + 1
    logits = random_logits(rows, 16, seed=len(history))
    by_hand = [penalised(np.array(logits[j]), params, history[: position + j]) for j in range(rows)]
    bare = SamplingParams(temperature=temperature, seed=4)
    expected = drawn(bare, mx.array(np.stack(by_hand), mx.float32), position)
    assert Sampler(params).draw(logits, position, mx.array(history)).tolist() == expected


def test_the_caller_s_processors_come_after_the_penalties_and_see_fp32() -> None:
    seen = []

    def watch(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append((tokens.tolist(), logits.dtype, logits.tolist()))
        return logits

    params = SamplingParams(presence_penalty=1.0)
    logits = mx.array([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0]], mx.bfloat16)
    assert Sampler(params, [watch]).draw(logits, 1, mx.array([2, 1])).tolist() == [2, 2]
    assert seen == [([2], mx.float32, [[1, 2, 3]]), ([2, 1], mx.float32, [[1, 1, 3]])]
    assert logits.tolist() == [[1, 2, 4], [1, 2, 4]], "the pass's own logits stay as they are"
    assert Sampler(params).reads_history and not Sampler(GREEDY).reads_history


# The noise.


@pytest.mark.parametrize("along", ["ids", "positions", "seeds"])
def test_noise_is_uniform_and_neighbours_are_independent(along: str) -> None:
    n = 20_000
    if along == "ids":
        noise = _gumbel(mx.arange(n, dtype=mx.uint32), _keys(1, 5, 1))[0]
    elif along == "positions":
        noise = _gumbel(mx.array([7], mx.uint32), _keys(1, 0, n))[:, 0]
    else:
        keys = mx.concatenate([_keys(seed, 5, 1) for seed in range(n)])
        noise = _gumbel(mx.array([7], mx.uint32), keys)[:, 0]
    uniform = np.exp(-np.exp(-np.array(noise, np.float64)))
    cells = (uniform * 16).astype(int)
    assert p_value(np.bincount(cells, minlength=16), np.full(16, 1 / 16)) > LIKELY
    for lag in (1, 2, 16):
        pairs = np.bincount(cells[:-lag] * 16 + cells[lag:], minlength=256)
        assert p_value(pairs, np.full(256, 1 / 256)) > LIKELY


def test_noise_reaches_far_enough_for_rare_tokens() -> None:
    """The top of 4 million draws lies where theory puts it: no value above which the noise is cut off."""
    top = max(
        mx.max(_gumbel(mx.arange(2**18, dtype=mx.uint32), _keys(seed, 0, 1))).item() for seed in range(16)
    )
    assert np.log(2**22) - 2 < top < np.log(2**22) + 6


def test_noise_belongs_to_the_id_and_not_to_its_rank() -> None:
    """Raising one logit changes a draw to that token only."""
    logits = random_logits(200, 64, step=0.5)
    before = drawn(EVERYTHING, logits)
    raised = logits + mx.where(mx.arange(64) == 9, 1.0, 0.0)
    params = replace(EVERYTHING, top_k=0, top_p=1.0, min_p=0.0)
    for old, new in zip(drawn(params, logits), drawn(params, raised), strict=True):
        assert new in (old, 9)
    assert drawn(replace(params, top_k=64), logits) == drawn(params, logits), "a cut that cuts nothing"
    assert 9 in drawn(params, raised) and before != drawn(EVERYTHING, logits, 1000)


# Ties and cuts.


def test_equal_logits_give_the_lowest_id() -> None:
    logits = mx.array([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
    assert drawn(GREEDY, logits) == [1, 0]
    assert drawn(replace(EVERYTHING, top_k=1), logits) == [1, 0]


@pytest.mark.parametrize("vocab", [8, 300, 5003])
def test_among_equals_at_the_boundary_of_top_k_the_lowest_ids_stay(vocab: int) -> None:
    row = np.zeros(vocab)
    row[5] = 1.0
    params = SamplingParams(temperature=5.0, top_k=3, seed=1)
    sampler = Sampler(params)
    logits = mx.broadcast_to(mx.array(row, mx.float32), (200, vocab))
    assert set(sampler.draw_whole(logits, 0).tolist()) == {0, 1, 5}
    assert set(sampler.draw(logits, 0).tolist()) <= {0, 1, 5, UNDECIDED}


@settings(max_examples=40)
@given(
    vocab=st.sampled_from([2, 17, 255, 256, 257, 1000, 4095, 4096, 4097, 4111, 5003]),
    temperature=st.sampled_from([0.3, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 255, 256, 300]),
    top_p=st.sampled_from([0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    step=st.sampled_from([0.0, 0.25, 2.0]),
    seed=st.integers(0, 1000),
)
def test_the_shortlist_draws_what_the_whole_row_draws(
    vocab: int, temperature: float, top_k: int, top_p: float, min_p: float, step: float, seed: int
) -> None:
    params = SamplingParams(temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    sampler = Sampler(params)
    logits = random_logits(3, vocab, seed=seed, step=step)
    quick, whole = sampler.draw(logits, 4).tolist(), sampler.draw_whole(logits, 4).tolist()
    assert UNDECIDED not in whole
    for row, (a, b) in enumerate(zip(quick, whole, strict=True)):
        assert a in (b, UNDECIDED)
        assert law(np.array(logits[row]), params)[b] > 0
    if vocab <= 256 or (step == 0 and (top_k or min_p == 1)):
        assert quick == whole, "nothing to be undecided about"


def test_a_cut_that_reaches_past_the_shortlist_is_undecided() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.95, seed=1))
    flat, peaked = mx.zeros((1, 1000)), mx.where(mx.arange(1000) == 700, 30.0, 0.0)[None]
    assert sampler.draw(mx.concatenate([flat, peaked]), 3).tolist() == [UNDECIDED, 700]
    assert 0 <= sampler.draw_whole(flat, 3).item() < 950


def test_impossible_tokens_are_never_drawn_and_leave_nothing_undecided() -> None:
    """A grammar that leaves three of 3000 ids must not cost a full sort of every row."""
    row = np.full(3000, -np.inf)
    row[[17, 900, 2999]] = [1.0, 2.0, 0.5]
    logits = mx.broadcast_to(mx.array(row, mx.float32), (300, 3000))
    cuts = [{}, {"top_k": 40}, {"top_p": 0.999}, {"min_p": 0.001}, {"top_k": 40, "top_p": 0.999}]
    for cut in cuts:
        draws = drawn(SamplingParams(temperature=1.0, seed=2, **cut), logits)
        assert set(draws) == {17, 900, 2999}
    assert set(drawn(GREEDY, logits)) == {900}


def test_a_token_of_infinite_logit_is_drawn_always() -> None:
    logits = mx.array([[1.0, mx.inf, 3.0]])
    for params in (GREEDY, SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9)):
        assert drawn(params, logits) == [1]


def test_logits_that_are_no_numbers_are_told_and_give_no_id_past_the_end() -> None:
    """An id past the embedding would be read from anywhere in memory."""
    logits = mx.array([[1.0, mx.nan, 3.0], [mx.nan] * 3])
    for cut in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert set(drawn(SamplingParams(temperature=1.0, **cut), logits)) <= {0, 1, 2, NO_NUMBERS}
        assert drawn(SamplingParams(temperature=1.0, **cut), logits)[1] == NO_NUMBERS


# What a draw depends on.


def test_a_draw_does_not_depend_on_how_many_rows_a_pass_has() -> None:
    for params in (GREEDY, replace(GREEDY, temperature=1.0), EVERYTHING):
        sampler, logits = Sampler(params), random_logits(16, 700)
        together = sampler.draw(logits, 10).tolist()
        assert [sampler.draw(logits[j : j + 1], 10 + j).item() for j in range(16)] == together
        assert sampler.draw(logits[5:9], 15).tolist() == together[5:9]


def test_the_seed_alone_decides_in_this_process_and_in_another() -> None:
    """Python's own hash is salted for each process; keys must not come from it."""
    logits = random_logits(20, 50)
    mine = drawn(EVERYTHING, logits)
    assert mine == drawn(EVERYTHING, logits)
    assert mine != drawn(replace(EVERYTHING, seed=4), logits)
    code = (
        "from dflash_mlx.sampling import Sampler, SamplingParams\n"
        "import mlx.core as mx\n"
        "mx.random.seed(77)\n"
        f"print(Sampler({EVERYTHING}).draw(mx.array({logits.tolist()}), 0).tolist())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "5"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(mine)


def test_large_seeds_and_positions_have_keys_of_their_own() -> None:
    keys = [_keys(seed, at, 1).tolist() for seed in (0, 2**32, 2**64, 2**200) for at in (0, 2**31, 2**32)]
    assert len({str(key) for key in keys}) == 12


def test_temperature_goes_continuously_to_the_most_probable_token() -> None:
    logits = random_logits(64, 300)
    greedy = drawn(GREEDY, logits)
    for temperature in (1e-3, 1e-20, 1e-39, 1e-300):
        for cut in ({}, {"top_p": 0.9}, {"top_k": 5}):
            assert drawn(SamplingParams(temperature=temperature, seed=1, **cut), logits) == greedy
    agreeing = [
        np.mean(np.array(drawn(SamplingParams(temperature=t, seed=1), logits)) == greedy)
        for t in (0.01, 0.2, 1.0, 10.0)
    ]
    assert agreeing == sorted(agreeing, reverse=True) and agreeing[0] == 1 and agreeing[-1] < 0.5


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    logits = random_logits(64, 5003)
    for temperature in (0.1, 1.0, 50.0):
        assert drawn(SamplingParams(temperature=temperature, top_k=1), logits) == drawn(GREEDY, logits)


def test_a_higher_temperature_gives_more_different_tokens() -> None:
    logits = mx.broadcast_to(random_logits(1, 200), (500, 200))
    kinds = [len(set(drawn(SamplingParams(temperature=t, seed=1), logits))) for t in (0.2, 0.6, 1.2, 3.0)]
    assert kinds == sorted(set(kinds))


def test_half_precision_logits_are_lifted_before_anything_is_added() -> None:
    """In bf16 the noise would be rounded to a few dozen values."""
    logits = random_logits(200, 64, scale=0.1)
    half = logits.astype(mx.bfloat16)
    for params in (EVERYTHING, SamplingParams(temperature=1.0, seed=1)):
        assert drawn(params, half) == drawn(params, half.astype(mx.float32))
    flat = mx.zeros((4000, 8), mx.bfloat16)
    draws = drawn(SamplingParams(temperature=1.0, seed=1), flat)
    assert p_value(np.bincount(draws, minlength=8), np.full(8, 1 / 8)) > LIKELY


def test_the_gap_is_in_favour_of_what_was_drawn() -> None:
    logits = random_logits(1, 30)
    for params in (GREEDY, SamplingParams(temperature=1.5, seed=3)):
        sampler = Sampler(params)
        for position in range(5):
            token = sampler.draw(logits, position).item()
            others = [i for i in range(30) if i != token]
            gaps = [sampler.gap(logits, position, None, (token, other)) for other in others]
            assert min(gaps) > 0
            assert sampler.gap(logits, position, None, (others[0], token)) == pytest.approx(-gaps[0])
    assert Sampler(GREEDY).gap(mx.array([[1.0, 3.5]]), 0, None, (1, 0)) == 2.5


def test_a_token_that_was_cut_off_is_as_far_away_as_the_last_one_kept() -> None:
    """Its noise alone may be what would win: without the cut the gap would be negative."""
    logits = mx.array([[4.0, 3.0, 2.0, 1.0, 0.0, -1.0]])
    last = {"top_k": (2, 3.0), "min_p": (0.3, 3.0), "top_p": (0.85, 3.0)}
    for name, (value, kept) in last.items():
        cut = Sampler(SamplingParams(temperature=1.0, seed=0, **{name: value}))  # type: ignore[arg-type]
        free = Sampler(SamplingParams(temperature=1.0, seed=0))
        seen = set()
        for position in range(40):
            token = cut.draw(logits, position).item()
            assert token in (0, 1)
            for other in range(6):
                if other == token:
                    continue
                gap, plainly = (s.gap(logits, position, None, (token, other)) for s in (cut, free))
                if other in (0, 1):
                    assert gap == pytest.approx(plainly) and gap > 0
                else:
                    assert gap == pytest.approx(max(plainly, kept - logits[0, other].item()))
                    assert gap > 0
                    seen.add(plainly < 0)
        assert seen == {True, False}, name


def test_a_gap_behind_a_cut_is_in_units_of_the_logits() -> None:
    logits = mx.array([[4.0, 3.0, 2.0]])
    sampler = Sampler(SamplingParams(temperature=1e-3, top_k=1, seed=0))
    assert sampler.gap(logits, 0, None, (0, 2)) == pytest.approx(2.0, abs=0.02)


# What is refused.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", 10**39),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", float("-inf")),
        ("frequency_penalty", float("inf")),
        *((name, float("nan")) for name in SamplingParams.__slots__ if name not in ("seed", "top_k")),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name_and_number(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"^{name} is {value}; expected "):
        check(replace(SamplingParams(), **{name: value}))


def test_the_ends_of_the_ranges_are_accepted() -> None:
    check(SamplingParams(0.0, top_p=1.0, top_k=0, min_p=0.0))
    check(SamplingParams(100.0, top_p=1e-6, top_k=10**6, min_p=1.0, presence_penalty=-2, frequency_penalty=2))
