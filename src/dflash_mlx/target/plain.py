"""Plain decoding as mlx-lm does it: the yardstick for text and speed. Runs `generate_step`, nothing of ours."""

from collections.abc import Callable, Generator, Sequence

import mlx.core as mx
from mlx_lm.generate import generate_step

from dflash_mlx.errors import NumericalError
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
    cache = target.make_cache()
    ids, unread, decide = list(prompt), list(prompt), draw
    while unread:
        first = len(ids) - len(unread)
        step = _Step(decide, draw, mx.array(ids[:first], mx.int32))
        tokens = generate_step(
            mx.array(unread),
            target.forward,
            max_tokens=max_new_tokens - (len(ids) - len(prompt)),
            prompt_cache=cache,
            prefill_step_size=prefill_chunk,
            logits_processors=[step.observe],
            sampler=step.sample,
        )
        unread, decided = [], decide is draw_whole
        for token, _ in tokens:
            if token < 0 and decided:
                raise NumericalError(
                    f"The logits of {target.name} are no numbers; try dtype 'bfloat16' or 'float32'."
                )
            decided = False
            if token < 0:
                # The step after this one has run on no token: go back and decide this one in full.
                tokens.close()
                for layer in cache:
                    layer.offset = len(ids) - 1
                unread, decide = ids[-1:], draw_whole
                break
            ids.append(token)
            yield token


class _Step:
    """generate_step's two hooks: the first sees raw logits and history and draws, the second hands the draw on."""

    def __init__(self, first: Draw, then: Draw, before: mx.array):
        self._draw, self._then, self._before = first, then, before

    def observe(self, tokens: mx.array, logits: mx.array) -> mx.array:
        history = mx.concatenate([self._before, tokens.astype(mx.int32)])
        self._drawn = self._draw(logits, history.shape[0], history)
        self._draw = self._then
        return logits

    def sample(self, _: mx.array) -> mx.array:
        return self._drawn
