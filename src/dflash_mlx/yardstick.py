"""The yardstick of `compare`: the same request through mlx-lm's own loop, and where two texts part."""

import time
from collections.abc import Sequence

import mlx.core as mx

from dflash_mlx import runtime
from dflash_mlx.core import Difference, Result, Stats
from dflash_mlx.request import Request
from dflash_mlx.sampling import Sampler
from dflash_mlx.target import MLXTarget, plain_tokens
from dflash_mlx.text import Transcript


def plain_answer(
    target: MLXTarget, request: Request, stats: Stats, transcript: Transcript, *, prefill_chunk: int
) -> Result:
    """A request through mlx-lm's `generate_step`, with our draws and our stops.

    Args:
        target: the model, no drafter.
        request: what is asked.
        stats: filled, and part of the result.
        transcript: empty; takes the tokens.
        prefill_chunk: prompt tokens in one pass, as many as in the run that this is held against.
    """
    stats.draft = stats.block_size = stats.draft_bits = stats.draft_window = None
    sampler = Sampler(request.params, request.options.logits_processors)
    runtime.reset_peak_memory()
    since = time.perf_counter()
    tokens = plain_tokens(
        target,
        request.prompt,
        max_new_tokens=request.budget,
        draw=sampler.draw,
        draw_whole=sampler.draw_whole,
        prefill_chunk=prefill_chunk,
    )
    for token in tokens:
        if not transcript.tokens:
            stats.seconds.prefill, since = time.perf_counter() - since, time.perf_counter()
        if transcript.cut([token]).finish_reason is not None:
            break
    stats.seconds.decode = time.perf_counter() - since
    tokens.close()
    stats.new_tokens = len(transcript.tokens)
    stats.rounds = stats.new_tokens - 1
    stats.accept_lengths, stats.verify_lengths = [0] * stats.rounds, [0] * stats.rounds
    stats.plain_rounds = stats.rounds
    stats.finish_reason = transcript.finish_reason
    stats.peak_memory_gb = runtime.peak_memory_gb()
    return Result(
        transcript.text, transcript.thinking, tuple(transcript.tokens), transcript.finish_reason, stats
    )


def first_difference(
    target: MLXTarget, request: Request, plain: Sequence[int], drafted: Sequence[int]
) -> Difference | None:
    """The first place where two texts of a request part, and how clearly plain decoding preferred its own token."""
    if plain == drafted:
        return None
    pairs = zip(plain, drafted, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(drafted)))
    if index == min(len(plain), len(drafted)):
        ends = [ids[index] if index < len(ids) else None for ids in (plain, drafted)]
        return Difference(index, ends[0], ends[1], None)
    before = mx.array([*request.prompt, *plain[:index]])
    logits = target.verify(before, target.make_cache(), ()).logits[-1:]
    sampler = Sampler(request.params, request.options.logits_processors)
    gap = sampler.gap(logits, before.shape[0], before, (plain[index], drafted[index]))
    return Difference(index, plain[index], drafted[index], gap)
