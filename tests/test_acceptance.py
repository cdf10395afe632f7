"""Whatever is proposed, what is emitted has the target's law: the real draws and the real rule on a toy target."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dflash_mlx.acceptance import agree
from dflash_mlx.core import SamplingParams
from dflash_mlx.sampling import Sampler
from tests.kit.law import Floats, law, p_value

VOCAB, LENGTH = 8, 3
LIKELY = 1e-3  # seeds are fixed, so a test passes always or never

Ints = NDArray[np.int64]
Proposer = Callable[[Ints], Ints]
"""Texts so far [N, LENGTH] (rubbish after what is emitted) to proposals for every place [N, LENGTH]."""

# A target by table: logits after 0, 1 or 2 tokens.
TABLE: list[Floats] = [np.random.default_rng(7).normal(0, 1.5, (VOCAB,) * (n + 1)) for n in range(LENGTH)]


def logits_after(texts: Ints) -> Floats:
    """Row [t, j]: what the target says after the first j tokens of text t."""
    first, second = texts[:, 0], texts[:, 1]
    return np.stack(
        [np.broadcast_to(TABLE[0], (len(texts), VOCAB)), TABLE[1][first], TABLE[2][first, second]], axis=1
    )


def exact(params: SamplingParams) -> Floats:
    """The probability of each text of three tokens."""
    one = law(TABLE[0], params)
    two = np.stack([law(row, params) for row in TABLE[1]])
    three = np.stack([[law(row, params) for row in rows] for rows in TABLE[2]])
    return one[:, None, None] * two[:, :, None] * three


def emit(propose: Proposer, params: SamplingParams, trials: int = 10_000) -> tuple[Ints, float]:
    """Texts made in rounds of propose, verify, agree; and how many proposals were accepted a trial."""
    sampler = Sampler(params)
    texts, done = np.zeros((trials, LENGTH), np.int64), np.zeros(trials, np.int64)
    accepted_in_all = 0
    places = np.arange(LENGTH)
    while (done < LENGTH).any():
        proposed = propose(texts)
        seen = np.where(places < done[:, None], texts, proposed)
        # Each trial has its own positions, so one call draws for all of them.
        rows = mx.array(logits_after(seen).reshape(-1, VOCAB), mx.float32)
        draws = np.array(sampler.draw(rows, 0)).reshape(trials, LENGTH)
        for text, at, proposal, drawn, t in zip(texts, done, proposed, draws, range(trials), strict=True):
            if at < LENGTH:
                # The last place has a draw and no proposal: the target's own token.
                accepted = agree(proposal[at : LENGTH - 1].tolist(), drawn[at:].tolist())
                text[at : at + accepted + 1] = drawn[at : at + accepted + 1]
                done[t] += accepted + 1
                accepted_in_all += accepted
    return texts, accepted_in_all / trials


def counts(texts: Ints) -> Ints:
    return np.bincount(texts @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**LENGTH)


def favourites(texts: Ints) -> Ints:
    """A greedy drafter that sees the target: always its most probable token."""
    best = np.zeros((len(texts), LENGTH), np.int64)
    for j in range(LENGTH):
        best[:, j] = logits_after(best)[:, j].argmax(-1)
    return best


def always_seven(texts: Ints) -> Ints:
    return np.full((len(texts), LENGTH), VOCAB - 1)


def arbitrary(texts: Ints) -> Ints:
    """Random proposals from a law of their own, with zeros where the target has none."""
    q = np.array([0.4, 0, 0.2, 0, 0.1, 0.1, 0.2, 0])
    return np.random.default_rng(3).choice(VOCAB, size=(len(texts), LENGTH), p=q)


def hostile(texts: Ints) -> Ints:
    """The least probable tokens, and some that do not exist."""
    worst = np.zeros((len(texts), LENGTH), np.int64)
    for j in range(LENGTH):
        worst[:, j] = logits_after(worst)[:, j].argmin(-1)
    worst[::2, 2] = 10**6
    return worst


PROPOSERS = [favourites, always_seven, arbitrary, hostile]
CUTS = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.6, top_k=3, seed=2),
    SamplingParams(temperature=1.3, top_p=0.7, seed=3),
    SamplingParams(temperature=1.0, min_p=0.2, seed=4),
    SamplingParams(temperature=0.9, top_k=5, top_p=0.8, min_p=0.1, seed=5),
]


@pytest.mark.parametrize("params", CUTS, ids=["plain", "top-k", "top-p", "min-p", "all cuts"])
def test_what_is_emitted_has_the_target_s_law(params: SamplingParams) -> None:
    """Proposals of each kind in turn; a proposal made without looking at the noise cannot bend the law."""
    propose = PROPOSERS[CUTS.index(params) % len(PROPOSERS)]
    texts, _ = emit(propose, params)
    assert p_value(counts(texts), exact(params)) > LIKELY


@pytest.mark.parametrize("propose", PROPOSERS)
def test_no_proposal_changes_a_single_text(propose: Proposer) -> None:
    """Stronger than a law: the same draws, token by token, as with proposals that are never right."""
    params = CUTS[-1]
    never, accepted = emit(lambda texts: np.full((len(texts), LENGTH), -5), params, 2000)
    assert accepted == 0
    texts, accepted = emit(propose, params, 2000)
    assert accepted > 0 or propose is hostile
    assert np.array_equal(texts, never)


def test_a_greedy_drafter_is_accepted_as_often_as_its_tokens_are_probable() -> None:
    """With one-hot proposals the rule accepts with probability p(proposal), the most that is possible."""
    params = CUTS[0]
    first = int(np.argmax(TABLE[0]))
    second = int(np.argmax(TABLE[1][first]))
    p_first, p_second = law(TABLE[0], params)[first], law(TABLE[1][first], params)[second]
    texts, _ = emit(favourites, params)
    assert np.mean(texts[:, 0] == first) == pytest.approx(p_first, abs=0.015)
    both = np.mean((texts[:, 0] == first) & (texts[:, 1] == second))
    assert both == pytest.approx(p_first * p_second, abs=0.015)


def test_the_measure_sees_a_rule_that_is_slightly_wrong() -> None:
    """Keeping one refused proposal in twenty bends the law, and the chi-square says so."""
    params = CUTS[0]
    texts, _ = emit(always_seven, params)
    lucky = np.random.default_rng(1).random(len(texts)) < 0.05
    texts[lucky, 0] = VOCAB - 1
    assert p_value(counts(texts), exact(params)) < 1e-6


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_agree_counts_the_common_beginning(proposal: list[int], draws: list[int]) -> None:
    accepted = agree(proposal, draws)
    assert proposal[:accepted] == draws[:accepted]
    assert accepted == min(len(proposal), len(draws)) or proposal[accepted] != draws[accepted]
