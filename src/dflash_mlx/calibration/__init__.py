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
from dflash_mlx.calibration.drafts import Drafts, Ways, draft_costs
from dflash_mlx.calibration.measure import Bench, Measured, measure
from dflash_mlx.errors import UsageError
from dflash_mlx.policy import CostCurve

__all__ = [
    "Bench",
    "Drafts",
    "Known",
    "Measured",
    "Ways",
    "costs",
    "draft_costs",
    "measure",
    "threads",
    "wanted",
]


class Known(NamedTuple):
    """What is known of a pair's costs."""

    curve: CostCurve | None  # None: nothing was to be measured
    notes: tuple[str, ...]


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
    since = time.perf_counter()
    measured = measure(bench, block_size=block_size)
    depths, kept = [found.depth for found in measured], "there is no home folder to keep it in"
    if path is not None:
        try:
            depths, kept = stored.write(path, key, depths), f"kept in {path}"
            if not all(found.steady for found in measured):
                kept += "; the machine was busy meanwhile: remove the file to have it measured again"
        except OSError as error:
            kept = f"it cannot be kept in {path.parent} ({error.strerror or type(error).__name__})"
    spent = time.perf_counter() - since
    note = f"Measured what drafting costs on this machine, in {spent:.0f} s; {kept}."
    return Known(CostCurve(depths, block_size), (note,))


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
