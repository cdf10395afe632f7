"""What a sampler should do, said a second time in numpy float64, and a measure of how far frequencies are off it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_mlx.core import SamplingParams

Floats = NDArray[np.float64]

LOOK_BACK = 20  # tokens that the penalties see


def law(logits: Sequence[float] | Floats, params: SamplingParams, history: Sequence[int] = ()) -> Floats:
    """The probabilities of the next token: penalties, temperature, top-k, top-p, min-p, in this order."""
    x = penalised(logits, params, history)
    if params.temperature == 0:
        return np.eye(len(x))[int(np.argmax(x))]
    weights = np.exp((x - x.max()) / params.temperature)
    ranked = np.argsort(-x, kind="stable")  # the lowest id first among equals
    if params.top_k:
        weights[ranked[params.top_k :]] = 0
    before = np.cumsum(weights[ranked]) - weights[ranked]
    weights[ranked[before >= params.top_p * weights.sum()]] = 0
    weights[weights < params.min_p * weights.max()] = 0
    return weights / weights.sum()


def penalised(logits: Sequence[float] | Floats, params: SamplingParams, history: Sequence[int]) -> Floats:
    x = np.array(logits, np.float64)
    recent = list(history)[-LOOK_BACK:]
    for token in set(recent):
        if params.repetition_penalty != 1:
            x[token] *= params.repetition_penalty if x[token] < 0 else 1 / params.repetition_penalty
        x[token] -= params.presence_penalty + params.frequency_penalty * recent.count(token)
    return x


def p_value(counts: NDArray[Any], probabilities: Floats) -> float:
    """Chi-square: how likely frequencies at least this far off are; 0 if something impossible happened.

    Rare cells are pooled until each expects five; the tail is Wilson and Hilferty's approximation.
    """
    counts, expected = counts.ravel().astype(float), probabilities.ravel() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    order = np.argsort(expected)
    cells: list[tuple[float, float]] = []
    seen = awaited = 0.0
    for cell in order[expected[order] > 0]:
        seen, awaited = seen + counts[cell], awaited + expected[cell]
        if awaited >= 5:
            cells.append((seen, awaited))
            seen = awaited = 0.0
    freedom = len(cells) - 1
    if freedom == 0:
        return 1.0
    distance = sum((o - e) ** 2 / e for o, e in cells)
    z = ((distance / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))
    return math.erfc(z / math.sqrt(2)) / 2
