"""What a run will take: a run that is about to begin in, time, memory and disk of the whole out.

A few pieces of it are done and timed, steps included, which are then undone.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash_mlx.training.batches import Batch
from dflash_mlx.training.simulate import measure

if TYPE_CHECKING:
    from dflash_mlx.training.loop import Trainer

GB = 1e9
_ANSWERS = 3  # whose features are timed, and that are measured


@dataclass(frozen=True, slots=True)
class Pieces:
    """What was timed, and how much of it there is."""

    seconds_per_row: float  # of a step, by block row
    rows: int  # block rows of all steps that are left
    seconds_per_token: float  # of the target's features
    tokens: int  # whose features are to be computed, as often as they are
    seconds_per_held_out_token: float  # of a measurement
    held_out_tokens: int  # of all measurements that are left
    peak_bytes: int  # of memory while the pieces were done, what was kept before included
    kept_bytes: int  # of features that will be kept
    kept_on_disk: bool
    weight_bytes: int  # of the network in float32
    seconds_at_most: float = math.inf  # where a run ends by the clock; measurements at its end come after


@dataclass(frozen=True, slots=True)
class Estimate:
    """Before a run begins; `str` of it is a sentence or two for the user."""

    training_seconds: float
    feature_seconds: float
    measuring_seconds: float
    memory_bytes: int
    disk_bytes: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.training_seconds + self.feature_seconds + self.measuring_seconds

    def __str__(self) -> str:
        parts = {
            "steps": self.training_seconds,
            "the target's hidden states": self.feature_seconds,
            "measuring": self.measuring_seconds,
        }
        told = ", ".join(f"{name} {_time(seconds)}" for name, seconds in parts.items() if seconds >= 1)
        return (
            f"About {_time(self.seconds)}{f' ({told})' if told else ''}, {self.memory_bytes / GB:.1f} GB of memory, "
            f"{self.disk_bytes / GB:.2f} GB of disk."
        )


def foreseen(trainer: "Trainer") -> Estimate:
    """Do some pieces of the run, time them, and undo what they changed; features stay kept."""
    return estimate(_timed(trainer))


def estimate(pieces: Pieces) -> Estimate:
    """Scale the pieces up.

    On the disk lie two checkpoints, for a moment three, each of weights and two moments, and the finished drafter.
    """
    features = pieces.seconds_per_token * pieces.tokens
    return Estimate(
        training_seconds=min(
            pieces.seconds_per_row * pieces.rows, max(0.0, pieces.seconds_at_most - features)
        ),
        feature_seconds=features,
        measuring_seconds=pieces.seconds_per_held_out_token * pieces.held_out_tokens,
        memory_bytes=pieces.peak_bytes + (0 if pieces.kept_on_disk else pieces.kept_bytes),
        disk_bytes=3 * 3 * pieces.weight_bytes
        + pieces.weight_bytes // 2
        + (pieces.kept_bytes if pieces.kept_on_disk else 0),
    )


def _timed(trainer: "Trainer") -> Pieces:
    options, store, minutes = trainer.options, trainer.store, trainer.options.minutes
    plans = sorted(trainer.plans(trainer.place.epoch), key=lambda plan: len(plan.members) * plan.anchors)
    block_size = trainer.stepper.network.config.block_size
    rows = [len(plan.members) * plan.anchors * block_size for plan in plans]
    left = max(0, trainer.steps - trainer.place.step)
    mx.reset_peak_memory()
    wanted = [*trainer.answers, *trainer.held_out]
    missing = [answer for answer in wanted if store is None or answer not in store]
    some = missing[:: max(1, len(missing) // _ANSWERS)][:_ANSWERS]
    features = _seconds(lambda: [trainer.features(answer) for answer in some])
    passes = left / max(1, len(plans)) if store is None else 1.0
    counted = sum(len(answer.ids) for answer in missing) * passes
    before = trainer.stepper.state()
    tried = [plans[len(plans) // 2], plans[-1]]
    batches = [trainer.batch(plan) for plan in tried]

    def steps_over(some: list[Batch]) -> None:
        for batch in some:
            trainer.stepper(batch, trainer.frequent, 0.0, trainer.rng(1))

    steps_over(batches[:1])  # not timed: what MLX does once
    steps = _seconds(lambda: steps_over(batches))
    trainer.stepper.restore(before)
    tried_rows = sum(len(plan.members) * plan.anchors * block_size for plan in tried)
    held = trainer.held_out[:_ANSWERS]
    known = [trainer.features(answer) for answer in held]
    measuring = _seconds(lambda: measure(trainer.stepper, held, known)) if held else 0.0
    times = 1 + (left // options.evaluate_steps if options.evaluate_steps else 0)
    weights: dict[str, mx.array] = dict(tree_flatten(trainer.stepper.network.parameters()))
    return Pieces(
        seconds_per_row=steps / tried_rows,
        rows=left * sum(rows) // len(rows),
        seconds_per_token=features / max(1, sum(len(answer.ids) for answer in some)),
        tokens=int(counted),
        seconds_per_held_out_token=measuring / max(1, sum(len(answer.answer_ids) for answer in held)),
        held_out_tokens=times * sum(len(answer.answer_ids) for answer in trainer.held_out),
        peak_bytes=mx.get_peak_memory(),
        kept_bytes=0 if store is None else sum(store.bytes_of(answer) for answer in wanted),
        kept_on_disk=store is not None and store.on_disk,
        weight_bytes=sum(4 * array.size for array in weights.values()),
        seconds_at_most=math.inf if minutes is None else max(0.0, 60 * minutes - trainer.place.seconds),
    )


def _seconds(work: Callable[[], object]) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
