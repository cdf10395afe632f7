"""What gathering will take, before it begins: a few passes of the real batch, and sums.

Time hangs on how long the answers will be, which nobody knows before the first ones are there; until then they are
assumed to end at any token alike, and after 250 in the mean.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.loading import LoadedTarget
from dflash_mlx.loading.memory import context_bytes
from dflash_mlx.runtime import GB
from dflash_mlx.target.batched import Drawing, batched_answers

BYTES_PER_TOKEN = 6.0  # of an answer's token in a shard, its part of the prompt included

_STEPS = 6  # timed passes over a whole batch
_FULL = 0.8  # part of a batch that is answering, in the mean
_LENGTH = 250.0  # tokens of an answer that nothing cuts off, in the mean


@dataclass(frozen=True, slots=True)
class Work:
    """What is still to be gathered: whole shards, as no part of one is kept."""

    answers: int
    answer_length: float  # tokens, in the mean
    own_passes: int  # of batches in which the target makes up prompts

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return math.ceil(self.answers * self.answer_length)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of what is still to be gathered."""

    seconds: float
    memory_bytes: int
    disk_bytes: int

    def sentence(self) -> str:
        """As people read it."""
        disk = "less than 1 MB" if self.disk_bytes < 1e6 else f"{self.disk_bytes / 1e6:,.0f} MB"
        return (
            f"about {_duration(self.seconds)}, {self.memory_bytes / GB:.1f} GB of memory and {disk} of disk"
        )


def work_left(
    missing: int,
    *,
    shard_answers: int,
    own_passes: int,
    max_answer_tokens: int,
    known: tuple[int, int] = (0, 0),
) -> Work:
    """The shards that are left.

    Args:
        missing: tokens of answers that are wanted.
        shard_answers: in a shard.
        own_passes: for the made-up prompts of a shard.
        max_answer_tokens: of an answer.
        known: answers that are there, and their tokens.
    """
    answers, tokens = known
    length = tokens / answers if answers else _LENGTH * -math.expm1(-max_answer_tokens / _LENGTH)
    shards = math.ceil(missing / (shard_answers * length))
    return Work(shards * shard_answers, length, shards * own_passes)


def estimate(
    target: LoadedTarget,
    prompts: Sequence[Sequence[int]],
    work: Work,
    *,
    batch_size: int,
    max_answer_tokens: int,
) -> Estimate:
    """Time a batch whose answers are half written, and scale it up.

    Args:
        target: loaded.
        prompts: some that will be asked; repeated to fill the batch.
        work: what is left.
        batch_size: answers at once.
        max_answer_tokens: of each.
    """
    model = target.model
    asked = [prompts[i % len(prompts)] for i in range(batch_size)]
    batch = [_lengthened(ids, int(work.answer_length / 2)) for ids in asked]
    mx.reset_peak_memory()
    started = time.perf_counter()
    marks: list[float] = []
    answers = batched_answers(
        model,
        batch,
        stop_ids=(),
        max_new_tokens=_STEPS + 2,
        drawings=[Drawing()] * batch_size,
        batch_size=batch_size,
        on_tokens=lambda count: marks.append(time.perf_counter()),
    )
    for _ in answers:
        pass
    peak = mx.get_peak_memory()
    mx.clear_cache()
    step = (marks[-1] - marks[1]) / (len(marks) - 2)
    reading = (marks[0] - started) / sum(map(len, batch))  # seconds a token
    passes = work.tokens / (_FULL * batch_size) + work.own_passes
    read = work.answers * sum(map(len, asked)) / batch_size
    timed, longest = max(map(len, batch)) + _STEPS, max(map(len, asked)) + max_answer_tokens
    itemsize = model.dtype.size
    held = [context_bytes(model.config, itemsize=itemsize, tokens=tokens) or 0 for tokens in (timed, longest)]
    # Rows that come and go copy the keys and values of all.
    memory = peak + max(0, 2 * batch_size * (held[1] - held[0]))
    return Estimate(passes * step + read * reading, memory, int(work.tokens * BYTES_PER_TOKEN))


def _lengthened(ids: Sequence[int], by: int) -> list[int]:
    """The ids over again, as a text that is longer by so many."""
    times = -(-(len(ids) + by) // len(ids))
    return (list(ids) * times)[: len(ids) + by]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
