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
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

import mlx.core as mx

from dflash_mlx import runtime
from dflash_mlx.errors import UsageError
from dflash_mlx.kernels import contest as contests
from dflash_mlx.kernels import verdicts
from dflash_mlx.kernels.contest import Contest
from dflash_mlx.kernels.source import Factory, usable
from dflash_mlx.kernels.verdicts import Machine, Verdict

__all__ = [
    "NO_KERNELS",
    "Chooser",
    "Choices",
    "Contest",
    "Mode",
    "Row",
    "mode_from_environment",
    "this_machine",
]

Mode = Literal["auto", "off", "on"]  # on: every kernel that is right, whatever its speed
_STOCK = "MLX's own operations are used"
_MARGIN = 0.97
_BUILD_FAILURE = re.compile(r"\berror:|[Uu]nable to (build|load)|maximum allowed threads")  # as MLX says it


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
    """Holds contests and remembers their verdicts.

    Attributes:
        path: the file of verdicts, if any.
        notes: what a person should be told.
        tried: contests held, those whose verdict was known not counted.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        mode: Mode | None = None,
        factory: Factory | None = None,
        machine: Machine | None = None,
        clock: Callable[[], float] = time.perf_counter,
        run: contests.Run | None = None,
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
        self.path = path
        self.notes: list[str] = []
        self.tried = 0
        self._mode = mode or mode_from_environment()
        self._factory = usable(factory)
        self._machine = machine or this_machine()
        self._clock = clock
        self._run = run or contests.evaluate
        self._known: dict[tuple[str, str, str], Verdict] | None = None
        self._lock = threading.Lock()

    @property
    def lets_quicken(self) -> bool:
        """Whether a CPU may compute otherwise what MLX computes slowly: no kernels are there, and none are refused."""
        return self._factory is None and self._mode != "off"

    def prepare(self, wanted: Iterable[Contest]) -> Choices:
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
            for contest in wanted:
                verdict = known.get((contest.kernel, contest.digest, contest.shape_class))
                if verdict is None or (verdict.outcome == "unraced" and self._mode == "auto"):
                    verdict = self._hold(contest, self._factory)
                    self.tried += 1
                    known[verdict.key] = verdict
                    if verdict.outcome != "failed":
                        fresh.append(verdict)
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
            return self._compare(contest, factory)
        except (RuntimeError, ValueError) as failure:
            line = contests.first_line(failure)
            self._tell(f"The kernel {contest.kernel} does not run on this system ({line}): {_STOCK}.")
            outcome: verdicts.Outcome = "unbuilt" if _BUILD_FAILURE.search(str(failure)) else "failed"
            return self._verdict(contest, outcome, f"does not run here: {line}")

    def _compare(self, contest: Contest, factory: Factory) -> Verdict:
        error = contests.error(contest, factory, self._run)
        if error > contest.bound:
            self._tell(
                f"The kernel {contest.kernel} gives a wrong result here for {contest.shape_class} (off by "
                f"{error:.2g}, allowed {contest.bound:.2g}): {_STOCK}."
            )
            return self._verdict(contest, "wrong", f"wrong: off by {error:.2g}, allowed {contest.bound:.2g}")
        if self._mode == "on":
            return self._verdict(contest, "unraced", "right, not timed")
        stock, kernel = contests.race(contest, factory, self._run, self._clock)
        gain = (stock / kernel - 1) * 100 if kernel > 0 else math.inf
        if kernel <= _MARGIN * stock:
            return self._verdict(contest, "faster", f"{gain:.0f} % faster", stock * 1e3, kernel * 1e3)
        why = f"not 3 % faster ({gain:+.0f} %)"
        return self._verdict(contest, "slow", why, stock * 1e3, kernel * 1e3)

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
            if self.path is not None:
                found, trouble = verdicts.read(self.path, self._machine)
                self._known = {verdict.key: verdict for verdict in found}
                if trouble:
                    self._tell(trouble)
        return self._known

    def _save(self, fresh: list[Verdict]) -> None:
        if self.path is None:
            return
        try:
            for verdict in verdicts.merge(self.path, self._machine, fresh):
                self._verdicts()[verdict.key] = verdict
        except OSError as failure:
            self._tell(f"What was measured of the kernels could not be kept in {self.path}: {failure}")

    def _tell(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)
