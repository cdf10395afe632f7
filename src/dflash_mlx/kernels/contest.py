"""One kernel against its reference on random data: how far apart they are, and what a call of each takes.

In: a contest, a factory, something that evaluates, a clock. Out: an error, seconds. Decides nothing and
remembers nothing.
"""

import functools
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.kernels.source import Factory

Work = Callable[[], Sequence[mx.array]]
Run = Callable[[Work], Sequence[mx.array]]  # makes the arrays of a work and evaluates them

_CHECKS = 2  # data sets on which a kernel must be right
_ROUNDS = 7
_CALLS = 16  # in one timed sample, so that the launch of a sample does not count
_COLD_BYTES = 64 << 20  # a sample reads this much before it reads the same weights again: beyond the caches


@dataclass(frozen=True, slots=True)
class Contest:
    """One kernel, its reference, and data of one shape class."""

    kernel: str
    digest: str  # of the kernel's text
    shape_class: str
    bound: float  # allowed difference relative to the largest entry of the reference; integers must be equal
    bytes: int  # what one call reads, roughly
    inputs: Callable[[int], tuple[mx.array, ...]]  # seed -> random data; touches no global state
    reference: Callable[..., Sequence[mx.array]]  # (*inputs)
    candidate: Callable[..., Sequence[mx.array]]  # (factory, *inputs)
    # (*inputs); given where the reference itself rounds more than the kernel may
    exact: Callable[..., Sequence[mx.array]] | None = None


def evaluate(work: Work) -> Sequence[mx.array]:
    """Make the arrays of a work and wait until they are computed."""
    arrays = work()
    mx.eval(arrays)
    return arrays


def error(contest: Contest, factory: Factory, run: Run) -> float:
    """The worst difference to the exact result, else to the reference, over a few data sets."""
    worst = 0.0
    for seed in range(_CHECKS):
        data = contest.inputs(seed)
        expected = run(functools.partial(contest.exact or contest.reference, *data))
        got = run(functools.partial(contest.candidate, factory, *data))
        worst = max(worst, _difference(expected, got))
    return worst


def race(contest: Contest, factory: Factory, run: Run, clock: Callable[[], float]) -> tuple[float, float]:
    """Median seconds of one call of the reference and of the kernel."""
    copies = max(1, min(8, -(-_COLD_BYTES // max(contest.bytes, 1))))
    data = [contest.inputs(_CHECKS + seed) for seed in range(copies)]
    run(lambda: [array for arrays in data for array in arrays])
    turns = [data[i % copies] for i in range(max(_CALLS, copies))]
    arms: list[Work] = [
        lambda: [out for arrays in turns for out in contest.reference(*arrays)],
        lambda: [out for arrays in turns for out in contest.candidate(factory, *arrays)],
    ]
    for arm in arms:
        run(arm)
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(_ROUNDS):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            start = clock()
            run(arms[which])
            seconds[which].append((clock() - start) / len(turns))
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def _difference(expected: Sequence[mx.array], got: Sequence[mx.array]) -> float:
    """The largest difference of any output, relative to its largest entry; infinite if unlike or NaN."""
    worst = 0.0
    for want, have in zip(expected, got, strict=True):
        if want.shape != have.shape or want.dtype != have.dtype:
            return math.inf
        if not mx.issubdtype(want.dtype, mx.floating):
            if not mx.array_equal(want, have):
                return math.inf
            continue
        want, have = want.astype(mx.float32), have.astype(mx.float32)
        scale = mx.maximum(mx.abs(want).max(), 1e-6)
        error = float(mx.abs(want - have).max() / scale)
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def first_line(failure: Exception) -> str:
    """The compiler's first complaint, or the first line of the message when there is none."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    complaint = next((line for line in lines if re.search(r"\berror:", line)), None)
    return (complaint or (lines[0] if lines else type(failure).__name__))[:200]
