"""What a round costs here: the curve of a pair on this machine, measured once and kept in the user's cache folder.

In: a loaded pair and what tells it from others. Out: a `CostCurve` and a sentence for the user. Knows no prompt
and takes no decision.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from dflash_mlx import runtime
from dflash_mlx.calibration import stored
from dflash_mlx.calibration.drafts import Drafts, Ways, draft_costs, forget_drafts
from dflash_mlx.calibration.measure import Bench, Measured, measure
from dflash_mlx.errors import UsageError
from dflash_mlx.policy import CostCurve, Depth

__all__ = [
    "Again",
    "Bench",
    "Drafts",
    "Known",
    "Measured",
    "Ways",
    "again",
    "costs",
    "draft_costs",
    "known_pairs",
    "measure",
    "threads",
    "wanted",
]


class Known(NamedTuple):
    """What is known of a pair's costs."""

    curve: CostCurve | None  # None: nothing was to be measured
    notes: tuple[str, ...]


class Again(NamedTuple):
    """Costs measured anew, beside those that were known."""

    old: CostCurve | None
    new: CostCurve
    note: str


def wanted() -> bool:
    """Whether costs are to be measured and used: not with DFLASH_COSTS=off.

    Raises:
        UsageError: DFLASH_COSTS is not understood.
    """
    value = os.environ.get("DFLASH_COSTS", "auto")
    if value not in ("auto", "off"):
        raise UsageError(f"DFLASH_COSTS is {value!r}; expected 'auto' or 'off'.")
    return value == "auto"


def costs(
    bench: Bench, key: Mapping[str, str], *, block_size: int, tell: Callable[[str], None] = lambda _: None
) -> Known:
    """The costs of a pair, from the cache folder or else measured now, which takes some seconds.

    Args:
        bench: the pair, run only where something is to be measured.
        key: what the costs hold for; another chip, version, type or block size is another key.
        block_size: tokens in a drafted block, its anchor included.
        tell: told before anything is measured.
    """
    path = _path(key)
    found = stored.read(path, key) if path else None
    if found is not None:
        return Known(CostCurve(found, block_size), ())
    tell("Measuring what drafting costs on this machine; this is done once for a pair ...")
    depths, note = _measured(bench, key, block_size, path, again=False)
    return Known(CostCurve(depths, block_size), (note,))


def again(bench: Bench, key: Mapping[str, str], *, block_size: int) -> Again:
    """Measure the costs of a pair now and keep them in the place of those that were known; arguments as for `costs`.

    What a draft costs in several ways is forgotten with them, so that the next load chooses anew how to draft.
    """
    forget_drafts(key)
    path = _path(key)
    found = stored.read(path, key) if path else None
    depths, note = _measured(bench, key, block_size, path, again=True)
    return Again(CostCurve(found, block_size) if found else None, CostCurve(depths, block_size), note)


def known_pairs() -> list[tuple[dict[str, str], CostCurve]]:
    """What is kept in the cache folder: what each curve holds for, and the curve.

    Raises:
        RuntimeError: there is no cache folder, as the user has no home.
    """
    kept = stored.every(runtime.cache_dir() / "costs")
    return [(key, CostCurve(depths, int(key["block_size"]))) for key, depths in kept if "block_size" in key]


def _measured(
    bench: Bench, key: Mapping[str, str], block_size: int, path: Path | None, *, again: bool
) -> tuple[list[Depth], str]:
    """The costs that are then known, and a sentence on how long it took and where they are kept."""
    since = time.perf_counter()
    measured = measure(bench, block_size=block_size)
    depths, kept = [found.depth for found in measured], "there is no home folder to keep it in"
    if path is not None:
        try:
            depths, kept = stored.write(path, key, depths, again=again), f"kept in {path}"
            if not all(found.steady for found in measured):
                kept += "; the machine was busy meanwhile: `dflash-mlx doctor --recalibrate` measures again"
        except OSError as error:
            kept = f"it cannot be kept in {path.parent} ({error.strerror or type(error).__name__})"
    spent = time.perf_counter() - since
    return depths, f"Measured what drafting costs on this machine, in {spent:.0f} s; {kept}."


def threads() -> str:
    """How many threads products run on, where that is for the environment to say."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        if given := os.environ.get(name):
            return given
    return str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())


def _path(key: Mapping[str, str]) -> Path | None:
    try:
        return runtime.cache_dir() / "costs" / stored.file_name(key)
    except RuntimeError:  # a user without a home
        return None
