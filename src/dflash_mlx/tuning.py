"""Which kernels a loaded pair runs: the classes it will meet are tried, the winners are given to both halves.

In: a target, its drafter, a chooser. Out: the choices, fixed for as long as both are used, and what a person
should be told. Knows no prompt and no kernel.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

from dflash_mlx import runtime
from dflash_mlx.drafter import DraftNetwork
from dflash_mlx.drafter import kernels as draft_kernels
from dflash_mlx.kernels.attention_plan import key_bands
from dflash_mlx.kernels.choice import NO_KERNELS, Choices, Chooser, Contest
from dflash_mlx.target import MLXTarget

_LONGEST = 32768  # keys; a longer context runs MLX's own attention


class Tuned(NamedTuple):
    """What was chosen for a pair, and what to say about it."""

    choices: Choices
    notes: tuple[str, ...]


def chooser() -> Chooser:
    """The chooser of this machine, its verdicts in the user's cache folder.

    Raises:
        UsageError: DFLASH_KERNELS is not understood.
    """
    try:
        path = runtime.cache_dir() / "kernels.json"
    except RuntimeError:  # a user without a home
        path = None
    return Chooser(path)


def tune(target: MLXTarget, draft: DraftNetwork | None, *, block_size: int | None, chooser: Chooser) -> Tuned:
    """Choose kernels for a pair and put them to use; without a Metal device or a drafter there are none.

    On a CPU the target is quickened. A target that two generators share keeps the kernels that the first one gave it.
    """
    if chooser.lets_quicken and (slow := target.quicken()):
        chooser.notes.append(slow)
    if draft is None or block_size is None:
        return Tuned(NO_KERNELS, tuple(chooser.notes))
    bands = key_bands(min(_LONGEST, target.max_positions or _LONGEST))
    since = time.perf_counter()
    choices = chooser.prepare(_contests(target, draft, block_size, bands))
    notes = list(chooser.notes)
    if chooser.tried and chooser.path:
        notes.append(
            f"Tried the Metal kernels on {chooser.tried} shapes of this pair in "
            f"{time.perf_counter() - since:.0f} s; the next run finds what was chosen in {chooser.path}."
        )
    troubles = [draft_kernels.use(draft, choices, block_size=block_size)]
    shared = target.choices is not NO_KERNELS
    if not shared:
        troubles.append(target.use(choices))
    if wrong := [trouble for trouble in troubles if trouble]:
        draft_kernels.restore(draft)
        if not shared:
            target.use(NO_KERNELS)
        return Tuned(NO_KERNELS, (*notes, *wrong))
    return Tuned(choices, tuple(notes))


def in_use(target: MLXTarget, choices: Choices) -> str:
    """What a pair runs that is not MLX's own, in words; `stock` for nothing."""
    return "quick exponentials" if target.is_quick else str(choices)


def _contests(target: MLXTarget, draft: DraftNetwork, block_size: int, bands: list[int]) -> Iterator[Contest]:
    """A generator: where there is no Metal device, nobody asks for the first."""
    yield from target.contests(block_size=block_size, key_bands=bands)
    yield from draft_kernels.contests(draft, block_size=block_size, key_bands=bands)
