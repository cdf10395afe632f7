"""What gathering will take, before it begins: a few passes of the real batch, and sums.

Time hangs on how long the answers will be, which nobody knows yet; half of the longest allowed is assumed.
"""

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
_LENGTH = 0.5  # of answers, as a part of the longest allowed


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of what is still to be gathered."""

    seconds: float
    memory_bytes: int | None  # None: the config does not tell how keys and values are kept
    disk_bytes: int

    def sentence(self) -> str:
        """As people read it."""
        memory = "" if self.memory_bytes is None else f", {self.memory_bytes / GB:.1f} GB of memory"
        return f"about {_duration(self.seconds)}{memory} and {self.disk_bytes / 1e6:,.0f} MB of disk"


def estimate(
    target: LoadedTarget,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    batch_size: int,
    max_answer_tokens: int,
) -> Estimate:
    """Time a batch, and scale it up.

    Args:
        target: loaded.
        prompts: some that will be asked; repeated to fill the batch.
        tokens: of answers, still to be gathered.
        batch_size: answers at once.
        max_answer_tokens: of each.
    """
    batch = [prompts[i % len(prompts)] for i in range(batch_size)]
    model = target.model
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
    mx.clear_cache()
    step = (marks[-1] - marks[1]) / (len(marks) - 2)
    reading = (marks[0] - started) / batch_size
    seconds = tokens * step / (_FULL * batch_size) + reading * tokens / max(1, _LENGTH * max_answer_tokens)
    longest = max(map(len, batch)) + max_answer_tokens
    held = context_bytes(model.config, itemsize=model.dtype.size, tokens=longest)
    # Rows that come and go copy the keys and values of all.
    memory = None if held is None else model.nbytes + 2 * batch_size * held
    return Estimate(seconds, memory, int(tokens * BYTES_PER_TOKEN))


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
