"""A text whose acceptance is known at every position, and what decoding it costs under a policy: no model runs."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from dflash_mlx.decoding import Policy
from dflash_mlx.policy import CostCurve, Depth


class Place(NamedTuple):
    """What a block drafted at this token would be like."""

    right: int  # its leading tokens that the target accepts
    confidences: list[float]


class Spent(NamedTuple):
    """A text decoded to its end."""

    seconds: float
    choices: list[int]  # verified proposals, round by round; 0 for each plain token
    looks: int


def text_of(seed: int, length: int, block_size: int, chance: Callable[[int, int], float]) -> list[Place]:
    """A text in which position j of a block drafted at token i is accepted with `chance(i, j)`."""
    dice, places = Random(seed), []
    for i in range(length):
        right, chances = 0, [chance(i, j) for j in range(block_size - 1)]
        while right < block_size - 1 and dice.random() < chances[right]:
            right += 1
        places.append(Place(right, [0.5] * (block_size - 1)))
    return places


def telling(seed: int, length: int, block_size: int, *, honest: bool = True) -> list[Place]:
    """A text whose blocks differ, and whose confidences say so (or say the opposite)."""
    dice, places = Random(seed), []
    for _ in range(length):
        chance = dice.choice([0.05, 0.97])
        right = 0
        while right < block_size - 1 and dice.random() < chance:
            right += 1
        places.append(Place(right, [chance if honest else 1 - chance] * (block_size - 1)))
    return places


def answers() -> dict[str, list[list[Place]]]:
    """Answers of the bundled pair by class, a block drafted at every token (greedy, float32, 2026-11-30).

    In the file a place is a digit and seven pairs of digits: accepted tokens, confidences in hundredths.
    """
    read = json.loads(Path(__file__).with_name("answers.json").read_text(encoding="utf-8"))
    found: dict[str, list[list[Place]]] = {}
    for question, text in read.items():
        places = [
            Place(int(place[0]), [int(place[i : i + 2]) / 100 for i in range(1, 15, 2)])
            for place in text.split()
        ]
        found.setdefault(question.split(":")[0], []).append(places)
    return found


def decode(policy: Policy, curve: CostCurve, places: Sequence[Place], *, depth: int = 0) -> Spent:
    """Seconds and choices; `depth` tokens are there before the text."""
    at, seconds, looks, choices = 0, 0.0, 0, []
    while at < len(places):
        costs = curve.at(depth + at)
        most = min(curve.block_size, len(places) - at) - 1
        plan = policy.plan(depth=depth + at, most=most)
        if plan.verify == 0 or most == 0:
            steps = min(plan.steps, len(places) - at)
            seconds, at = seconds + steps * costs.plain, at + steps
            choices += [0] * steps
            continue
        n = plan.verify
        if plan.look:
            looks, seconds = looks + 1, seconds + costs.look
            n = policy.choose(places[at].confidences)
        accepted = min(n, places[at].right)
        policy.observe(n, accepted)
        seconds, at = seconds + costs.round(n), at + accepted + 1
        choices.append(n)
    return Spent(seconds, choices, looks)


def fixed(curve: CostCurve, places: Sequence[Place], n: int, *, depth: int = 0) -> float:
    """Seconds when always n proposals are verified; 0: plain decoding."""
    at, seconds = 0, 0.0
    while at < len(places):
        costs, most = curve.at(depth + at), min(n, len(places) - at - 1)
        seconds += costs.round(most) if most else costs.plain
        at += 1 + min(most, places[at].right)
    return seconds


def curve(
    plain: float, draft: float, verify: dict[int, float], *, block_size: int, look: float = 0.0
) -> CostCurve:
    """One depth, in any unit of time."""
    return CostCurve([Depth(0, plain, draft, look, verify)], block_size)


# reference.md 3.11 and 6, in milliseconds; where only speeds are published the rest is filled in between.
CURVES = {
    # SmolLM2-135M, float32, OpenBLAS on two cores: 8 rows cost little more than one.
    "openblas": curve(52, 16, {1: 54, 2: 57, 4: 62, 8: 75}, block_size=8, look=3),
    # A dense model of 4 bits on an M1: the arithmetic of the rows counts, 16 cost more than four steps.
    "m1": curve(40, 12, {1: 42, 2: 60, 4: 100, 8: 150, 16: 180}, block_size=16, look=1),
    # The same on an M5: 4 rows at the price of one, then a step.
    "m5": curve(5.7, 1.5, {1: 5.8, 2: 5.9, 4: 6.3, 5: 7.4, 8: 8.5, 16: 12}, block_size=16, look=0.3),
    # A mixture of experts: every row reads experts of its own.
    "moe": curve(8.5, 2, {1: 8.7, 2: 13.5, 3: 15.6, 5: 20.7, 8: 28.1, 16: 45}, block_size=16, look=0.3),
}
# The bundled pair, as its costs are measured on two cores with a shortlist of 12,288 words.
BUNDLED = curve(80.7, 17.5, {1: 82, 2: 88.5, 3: 93, 4: 93.5, 5: 109, 6: 122, 8: 97.5}, block_size=8, look=2.5)
# MLX's own BLAS on Linux: n rows cost n steps.
REFERENCE_BLAS = curve(50, 60, {1: 50, 2: 100, 4: 200, 8: 400, 16: 800}, block_size=16, look=1)
# A draft whose cost grows with the context while a plain step's hardly does: pays at first, not at the end.
LONG_CONTEXT = CostCurve(
    [
        Depth(0, 20, 5, 0.3, {1: 20, 4: 23, 8: 30, 16: 45}),
        Depth(4000, 22, 30, 0.3, {1: 22, 4: 40, 8: 70, 16: 130}),
    ],
    16,
)
