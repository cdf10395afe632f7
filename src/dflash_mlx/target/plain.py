"""Plain decoding as mlx-lm does it: the yardstick for text and speed. Runs `generate_step`, nothing of ours."""

from collections.abc import Callable, Generator, Sequence

import mlx.core as mx
from mlx_lm.generate import generate_step

from dflash_mlx.errors import NumericalError
from dflash_mlx.target import caches
from dflash_mlx.target.caches import Cache
from dflash_mlx.target.model import MLXTarget

Draw = Callable[[mx.array, int, mx.array], mx.array]
"""Logits [1, V], position and history [position] to one token id [1]; negative where it cannot decide."""


def plain_tokens(
    target: MLXTarget,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    draw: Draw,
    draw_whole: Draw,
    prefill_chunk: int,
) -> Generator[int, None, None]:
    """Yield token ids of mlx-lm's pipelined loop, drawn by our rule.

    Args:
        target: the model.
        prompt: token ids, at least one.
        max_new_tokens: yields at most this many.
        draw: called once a step while the graph is built.
        draw_whole: takes over for a step in which `draw` gave a negative id.
        prefill_chunk: prompt tokens in one pass.
    """
    reading = _Reading(target)
    ids, unread = list(prompt), list(prompt)
    while unread and len(ids) - len(prompt) < max_new_tokens:
        step = _Step(draw, ids[: len(ids) - len(unread)])
        tokens = generate_step(
            mx.array(unread),
            reading.forward,
            max_tokens=max_new_tokens - (len(ids) - len(prompt)),
            prompt_cache=reading.cache,
            prefill_step_size=prefill_chunk,
            logits_processors=[step.observe],
            sampler=step.sample,
        )
        unread = []
        for token, _ in tokens:
            if token < 0:
                # The step after this one has run on no token: undo it and decide this one in full.
                tokens.close()
                reading.go_back(len(ids))
                decided = draw_whole(step.logits[len(ids)], len(ids), mx.array(ids, mx.int32))
                token = int(decided.item())  # type: ignore[arg-type]  # an id is no complex number
                if token < 0:
                    raise NumericalError(
                        f"The logits of {target.name} are no numbers; try dtype 'bfloat16' or 'float32'."
                    )
                unread = [token]
            ids.append(token)
            yield token


class _Reading:
    """A cache, how many tokens it has read, and how to undo the last pass."""

    def __init__(self, target: MLXTarget):
        self.cache = target.make_cache()
        self._target = target
        self._read = 0

    def forward(self, ids: mx.array, cache: Cache) -> mx.array:
        """The stock forward; all that comes on top is a note of where the cache stands."""
        rows = ids.shape[1]
        self._tape = caches.before(cache, rows)
        self._read += rows
        return self._target.forward(ids, cache)

    def go_back(self, count: int) -> None:
        """Hold `count` tokens again: those before the last pass, where that has run ahead."""
        if self._read == count:
            return
        assert self._read - self._tape.rows == count
        caches.commit(self.cache, self._tape, 0)
        self._read = count


class _Step:
    """generate_step's two hooks: the first sees raw logits and history and draws, the second hands the draw on."""

    def __init__(self, draw: Draw, before: Sequence[int]):
        self._draw, self._before = draw, mx.array(list(before), mx.int32)
        self.logits: dict[int, mx.array] = {}  # of the last two steps, by the position that they decide

    def observe(self, tokens: mx.array, logits: mx.array) -> mx.array:
        history = mx.concatenate([self._before, tokens.astype(mx.int32)])
        position = history.shape[0]
        self.logits.pop(position - 2, None)
        self.logits[position] = logits
        self._drawn = self._draw(logits, position, history)
        return logits

    def sample(self, _: mx.array) -> mx.array:
        return self._drawn
