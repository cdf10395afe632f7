"""For every family: drafted text is the text of mlx-lm's own loop, whatever is accepted, past every ring's window."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.core import SamplingParams
from tests.families.support import GREEDY, PENALISED, SAMPLED, drafted, family_of, truth_of
from tests.kit.families import FAMILIES, WINDOW

ALL = list(FAMILIES)
PLANS = {
    "none": [0],
    "part": [3],
    "all": [7],
    "two full in a row": [2, 7, 7, 0],
    "mixed": [1, 7, 0, 5, 7, 7, 4, 6],
}


@pytest.mark.parametrize("name", ALL)
def test_drafted_text_is_plain_text(name: str) -> None:
    """Nothing, a part and two whole blocks in a row accepted; the prompt comes in pieces."""
    truth = truth_of(name, SAMPLED, 40)
    assert len(set(truth)) > WINDOW, "a text that says something of the state"
    assert drafted(family_of(name), truth, [2, 7, 7, 0], SAMPLED) == truth


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("name", ALL)
def test_drafted_text_is_plain_text_at_length(name: str, params: SamplingParams, plan: str) -> None:
    """Several windows long; the prompt in pieces shorter than a window, or whole."""
    truth = truth_of(name, params, 96)
    chunk = 3 if plan in ("part", "mixed") else 64
    assert drafted(family_of(name), truth, PLANS[plan], params, prefill_chunk=chunk) == truth


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=6)
@given(plan=st.lists(st.integers(0, 7), min_size=1, max_size=8), budget=st.integers(1, 60))
def test_any_plan_and_any_budget_give_plain_text(name: str, plan: list[int], budget: int) -> None:
    """A budget ends inside blocks."""
    truth = truth_of(name, SAMPLED, 60)[:budget]
    assert drafted(family_of(name), truth, plan, SAMPLED) == truth
