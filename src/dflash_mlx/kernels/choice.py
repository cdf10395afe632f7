"""Which kernels are used on this machine: those that are right here, and faster here.

In: contests (a kernel, its reference, random data of one shape class) and the file of earlier verdicts. Out:
`Choices`, an immutable value that a generation holds from its start to its end. Knows no kernel by name.

A kernel is first compared with its reference. One that is wrong is refused aloud, one that does not build is
reported once with the compiler's first line; both leave the work to the reference. Then the two are timed in
turn, and the kernel is taken when it is at least 3 % faster. Verdicts are filed by chip, system, mlx version,
kernel text and shape class, so that runs on one machine agree with each other.
"""

import importlib.metadata
import math
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

import mlx.core as mx

from dflash_mlx import runtime
from dflash_mlx.errors import UsageError
from dflash_mlx.kernels import verdicts
from dflash_mlx.kernels.source import Factory, usable
from dflash_mlx.kernels.verdicts import Machine, Verdict

Mode = Literal["auto", "off", "on"]  # on: every kernel that is right, whatever its speed
Work = Callable[[], Sequence[mx.array]]

_STOCK = "MLX's own operations are used"
_MARGIN = 0.97
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
    exact: Callable[..., Sequence[mx.array]] | None = (
        None  # (*inputs); where the reference itself rounds more
    )


@dataclass(frozen=True, slots=True)
class Choices:
    """What was chosen, for the length of a generation; a class that is not listed runs the reference."""

    chosen: frozenset[tuple[str, str]] = frozenset()  # (kernel, shape class)
    factory: Factory | None = None

    def factory_for(self, kernel: str, shape_class: str) -> Factory | None:
        """What to build the kernel with, or None where the reference is to run."""
        return self.factory if (kernel, shape_class) in self.chosen else None

    def __str__(self) -> str:
        """The kernels in use, for stats: `stock` when there are none."""
        return ", ".join(sorted({kernel for kernel, _ in self.chosen})) or "stock"


NO_KERNELS = Choices()


class Row(NamedTuple):
    """A line of the table that `doctor` prints."""

    kernel: str
    shape_class: str
    chosen: Literal["kernel", "stock"]
    why: str
    stock_ms: float | None
    kernel_ms: float | None


def mode_from_environment(environment: Mapping[str, str] = os.environ) -> Mode:
    """The value of DFLASH_KERNELS, `auto` when it is unset or empty.

    Raises:
        UsageError: it is none of auto, off, on.
    """
    value = environment.get("DFLASH_KERNELS", "").strip().lower() or "auto"
    if value not in get_args(Mode):
        raise UsageError(f"DFLASH_KERNELS is '{value}'; it must be one of auto, off, on.")
    return cast(Mode, value)


def this_machine() -> Machine:
    """What a verdict depends on besides the kernel itself."""
    here = runtime.machine()
    return Machine(chip=here.chip, system=here.os, mlx=importlib.metadata.version("mlx"))


class Chooser:
    """Holds contests and remembers their verdicts; `notes` collects what a person should be told."""

    def __init__(
        self,
        path: Path | None,
        *,
        mode: Mode | None = None,
        factory: Factory | None = None,
        machine: Machine | None = None,
        clock: Callable[[], float] = time.perf_counter,
        run: Callable[[Work], Sequence[mx.array]] | None = None,
    ) -> None:
        """Decide nothing yet.

        Args:
            path: the file of verdicts; None keeps them in memory only.
            mode: overrides DFLASH_KERNELS.
            factory: what to build kernels with; unset, Metal's on a GPU and none elsewhere.
            machine: what verdicts are filed under, this machine when unset.
            clock: seconds, rising.
            run: makes the arrays of a work and evaluates them.

        Raises:
            UsageError: DFLASH_KERNELS is not understood.
        """
        self.notes: list[str] = []
        self._path = path
        self._mode = mode or mode_from_environment()
        self._factory = usable(factory)
        self._machine = machine or this_machine()
        self._clock = clock
        self._run = run or _evaluate
        self._known: dict[tuple[str, str, str], Verdict] | None = None
        self._lock = threading.Lock()

    def prepare(self, contests: Iterable[Contest]) -> Choices:
        """Settle what is not yet known and return the choices for a generation; call it before one starts."""
        if self._mode == "off":
            return NO_KERNELS
        if self._factory is None:
            if self._mode == "on":
                self._tell(
                    "DFLASH_KERNELS is on, but there is no Metal device here: MLX's own operations are used."
                )
            return NO_KERNELS
        with self._lock:
            known = self._verdicts()
            fresh = []
            chosen = []
            for contest in contests:
                verdict = known.get((contest.kernel, contest.digest, contest.shape_class))
                if verdict is None or (verdict.outcome == "unraced" and self._mode == "auto"):
                    verdict = self._hold(contest, self._factory)
                    fresh.append(verdict)
                    known[verdict.key] = verdict
                chosen.append(verdict)
            if fresh:
                self._save(fresh)
                mx.clear_cache()  # the contests' data
                chosen = [known[verdict.key] for verdict in chosen]  # another process may have been first
            taken = frozenset((v.kernel, v.shape_class) for v in chosen if self._takes(v))
        return Choices(taken, self._factory) if taken else NO_KERNELS

    def table(self) -> list[Row]:
        """Every verdict of this machine, by kernel and class."""
        with self._lock:
            found = sorted(self._verdicts().values(), key=lambda verdict: verdict.key)
        return [
            Row(
                v.kernel,
                v.shape_class,
                "kernel" if self._takes(v) else "stock",
                v.why if self._mode == "auto" else f"{v.why}; DFLASH_KERNELS is {self._mode}",
                v.stock_ms,
                v.kernel_ms,
            )
            for v in found
        ]

    def _takes(self, verdict: Verdict) -> bool:
        right = verdict.outcome in ("faster", "slow", "unraced")
        return verdict.outcome == "faster" if self._mode == "auto" else right and self._mode == "on"

    def _hold(self, contest: Contest, factory: Factory) -> Verdict:
        try:
            error = max(self._error(contest, factory, seed) for seed in range(_CHECKS))
        except (RuntimeError, ValueError) as failure:
            line = _first_line(failure)
            note = f"The kernel {contest.kernel} does not run on this system ({line}): {_STOCK}."
            self._tell(note)
            return self._verdict(contest, "unbuilt", f"does not run here: {line}")
        if error > contest.bound:
            self._tell(
                f"The kernel {contest.kernel} gives a wrong result here for {contest.shape_class} (off by "
                f"{error:.2g}, allowed {contest.bound:.2g}): {_STOCK}."
            )
            return self._verdict(contest, "wrong", f"wrong: off by {error:.2g}, allowed {contest.bound:.2g}")
        if self._mode == "on":
            return self._verdict(contest, "unraced", "right, not timed")
        stock, kernel = self._race(contest, factory)
        gain = (stock / kernel - 1) * 100 if kernel > 0 else math.inf
        if kernel <= _MARGIN * stock:
            return self._verdict(contest, "faster", f"{gain:.0f} % faster", stock * 1e3, kernel * 1e3)
        why = f"not 3 % faster ({gain:+.0f} %)"
        return self._verdict(contest, "slow", why, stock * 1e3, kernel * 1e3)

    def _error(self, contest: Contest, factory: Factory, seed: int) -> float:
        data = contest.inputs(seed)
        expected = self._run(lambda: (contest.exact or contest.reference)(*data))
        got = self._run(lambda: contest.candidate(factory, *data))
        return _difference(expected, got)

    def _race(self, contest: Contest, factory: Factory) -> tuple[float, float]:
        """Median seconds of one call of the reference and of the kernel."""
        copies = max(1, min(8, -(-_COLD_BYTES // max(contest.bytes, 1))))
        data = [contest.inputs(_CHECKS + seed) for seed in range(copies)]
        self._run(lambda: [array for arrays in data for array in arrays])
        turns = [data[i % copies] for i in range(max(_CALLS, copies))]
        arms: list[Work] = [
            lambda: [out for arrays in turns for out in contest.reference(*arrays)],
            lambda: [out for arrays in turns for out in contest.candidate(factory, *arrays)],
        ]
        for arm in arms:
            self._run(arm)
        seconds: tuple[list[float], list[float]] = ([], [])
        for turn in range(_ROUNDS):
            for which in (0, 1) if turn % 2 == 0 else (1, 0):
                start = self._clock()
                self._run(arms[which])
                seconds[which].append((self._clock() - start) / len(turns))
        return statistics.median(seconds[0]), statistics.median(seconds[1])

    def _verdict(
        self,
        contest: Contest,
        outcome: verdicts.Outcome,
        why: str,
        stock_ms: float | None = None,
        kernel_ms: float | None = None,
    ) -> Verdict:
        return Verdict(contest.kernel, contest.digest, contest.shape_class, outcome, why, stock_ms, kernel_ms)

    def _verdicts(self) -> dict[tuple[str, str, str], Verdict]:
        if self._known is None:
            self._known = {}
            if self._path is not None:
                found, trouble = verdicts.read(self._path, self._machine)
                self._known = {verdict.key: verdict for verdict in found}
                if trouble:
                    self._tell(trouble)
        return self._known

    def _save(self, fresh: list[Verdict]) -> None:
        if self._path is None:
            return
        try:
            for verdict in verdicts.merge(self._path, self._machine, fresh):
                self._verdicts()[verdict.key] = verdict
        except OSError as failure:
            self._tell(f"What was measured of the kernels could not be kept in {self._path}: {failure}")

    def _tell(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _evaluate(work: Work) -> Sequence[mx.array]:
    arrays = work()
    mx.eval(arrays)
    return arrays


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


def _first_line(failure: Exception) -> str:
    """The compiler's first complaint, or the first line of the message when there is none."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    complaint = next((line for line in lines if re.search(r"\berror:", line)), None)
    return (complaint or (lines[0] if lines else type(failure).__name__))[:200]
