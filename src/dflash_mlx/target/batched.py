"""Many prompts answered at once by mlx-lm's batched generation: ids in, ids out, each as soon as it is complete.

Runs the target's own forward through mlx-lm's `BatchGenerator`; knows no text and no drafter. The draws of an answer
depend on its own seed and place alone, so whoever shares the batch changes no more than the rounding.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, GenerationBatch

from dflash_mlx.errors import UnsupportedError
from dflash_mlx.target.model import MLXTarget


class Finished(NamedTuple):
    """One prompt's answer."""

    prompt: int  # its place among the prompts
    ids: tuple[int, ...]  # the stop id included
    stopped: bool  # it came to a stop id; False: it reached the most tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """How the tokens of an answer are drawn."""

    temperature: float = 0.0  # 0 takes the most probable token
    min_p: float = 0.0  # tokens less probable than this share of the most probable one are not drawn
    seed: int = 0


def batched_answers(
    target: MLXTarget,
    prompts: Sequence[Sequence[int]],
    *,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    drawings: Sequence[Drawing],
    batch_size: int,
    prefill_chunk: int = 512,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Generator[Finished, None, None]:
    """Answer every prompt, at most `batch_size` of them at once.

    Args:
        target: the model.
        prompts: token ids, none of them empty.
        stop_ids: ids that end an answer.
        max_new_tokens: of each answer.
        drawings: how the tokens of each are drawn.
        batch_size: rows of one pass.
        prefill_chunk: prompt tokens of a row in one pass.
        on_tokens: told after each pass how many tokens it gave.

    Raises:
        UnsupportedError: mlx-lm cannot put this model's caches into one batch.
    """
    generator = BatchGenerator(
        target.model,
        max_tokens=max_new_tokens,
        stop_tokens=[[stop] for stop in stop_ids],
        completion_batch_size=batch_size,
        prefill_batch_size=batch_size,
        prefill_step_size=prefill_chunk,
    )
    waiting, answers = list(range(len(prompts))), dict[int, list[int]]()
    index_of: dict[int, int] = {}
    try:
        while waiting or answers:
            # Rows that begin copy the caches of all: a quarter of the batch is exchanged at once.
            free = batch_size - len(answers)
            if waiting and (free >= max(1, batch_size // 4) or not answers):
                taken, waiting = waiting[:free], waiting[free:]
                uids = generator.insert(
                    [list(prompts[index]) for index in taken],
                    samplers=[_sampler(drawings[index]) for index in taken],
                )
                index_of |= dict(zip(uids, taken, strict=True))
                answers |= {index: [] for index in taken}
            given = _step(generator, target)
            on_tokens(len(given))
            for one in given:
                index = index_of[one.uid]
                answers[index].append(one.token)
                if one.finish_reason is not None:
                    ids = tuple(answers.pop(index))
                    yield Finished(index, ids, one.finish_reason == "stop")
    finally:
        generator.close()


def _step(generator: BatchGenerator, target: MLXTarget) -> list[GenerationBatch.Response]:
    """One pass of all rows, out of reach of taps that another thread has set."""
    try:
        with target._lock:
            return list(generator.next_generated())
    except ValueError as error:
        if "batching" not in str(error):
            raise
        raise UnsupportedError(
            f"mlx-lm cannot answer several prompts at once with a '{target.model_type}' model ({error})."
        ) from error


def _sampler(drawing: Drawing) -> Callable[[mx.array], mx.array]:
    """Log-probabilities [B, V] to token ids [B]; each call draws with a key of its own.

    Greedy rows share one function, as mlx-lm takes them all at once where no other row draws.
    """
    if drawing.temperature == 0:
        return _likeliest
    keys = [mx.random.key(drawing.seed)]

    def sample(logprobs: mx.array) -> mx.array:
        keys[0], key = mx.random.split(keys[0])
        scores = logprobs.astype(mx.float32)
        if drawing.min_p > 0:
            floor = mx.max(scores, axis=-1, keepdims=True) + mx.log(mx.array(drawing.min_p))
            scores = mx.where(scores < floor, -mx.inf, scores)
        return mx.random.categorical(scores / drawing.temperature, key=key)

    return sample


def _likeliest(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)
