"""One generation: a request in, chunks out, and what it leaves behind is kept for the next.

Knows no option and no file; time spent by whoever reads the chunks is not counted.
"""

import time
from collections.abc import Iterable, Iterator

from dflash_mlx import runtime
from dflash_mlx.conversation import Conversations, Mark, mark, state_of
from dflash_mlx.core import Chunk, Result, Stats
from dflash_mlx.decoding import Decoder, Meter, Policy
from dflash_mlx.drafter import Drafter
from dflash_mlx.engine import Engine
from dflash_mlx.policy import Adaptive, CostCurve, Dearer, WholeBlock
from dflash_mlx.request import Request
from dflash_mlx.sampling import Sampler
from dflash_mlx.text import Piece, Transcript


def answer(
    engine: Engine, request: Request, conversations: Conversations, *, policy: Policy | None = None
) -> Iterator[Chunk]:
    """Read what of the prompt is not held yet, decode, and keep the state, however it ends.

    Without a `policy` the measured costs decide; with one the pair drafts as it says, whether that pays or not.
    """
    stats, transcript = engine.stats(request), engine.transcript(request)
    drafter = engine.drafter(after=len(request.prompt), insist=policy is not None)
    target = engine.pair.target.model
    runtime.reset_peak_memory()
    since = time.perf_counter()
    start = conversations.resume(request.prompt, target, drafter)
    stats.reused_tokens = start.reused
    decoder = Decoder(
        target=target,
        cache=start.cache,
        drafter=drafter,
        sampler=Sampler(request.params, request.options.logits_processors, choices=engine.kernels),
        cut=transcript.cut,
        policy=policy or _policy(engine, drafter),
        max_new_tokens=request.budget,
        block_size=engine.block_size or 1,
        prefill_chunk=engine.pace,
        meter=Meter(enabled=request.options.profile),
        ids=request.prompt[: start.reused],
    )
    marks = list(start.marks)
    try:
        _read(decoder, request, marks)
        yield from _decode(decoder, transcript, stats, engine.curve, since)
    finally:
        left = state_of(target, decoder.cache, drafter, decoder.ids, marks)
        if left is not None:
            conversations.keep(left)


def _policy(engine: Engine, drafter: Drafter | None) -> Policy:
    """What the measured costs say; whole blocks where nothing was measured."""
    if engine.curve is None:
        return WholeBlock()
    if drafter is None or engine.shortlist is None:
        return Adaptive(engine.curve)
    return Dearer(engine.curve, extra=engine.shortlist.saved, is_dear=lambda: drafter.reads_whole_head)


def collected(chunks: Iterable[Chunk]) -> Result:
    """The whole of a generation."""
    parts = list(chunks)
    texts = {kind: "".join(c.text for c in parts if c.kind == kind) for kind in ("answer", "thought")}
    ids = tuple(token for c in parts for token in c.tokens)
    return Result(texts["answer"], texts["thought"], ids, parts[-1].finish_reason, parts[-1].stats)


def _read(decoder: Decoder, request: Request, marks: list[Mark]) -> None:
    """Read what is not held yet, remembering on the way the place that a next turn can come back to."""
    held = len(decoder.ids)
    if held < request.settled:
        for _ in decoder.read(request.prompt[held : request.settled]):
            pass
        marks.append(mark(decoder.cache, decoder.drafter, request.settled))
    for _ in decoder.prefill(request.prompt[len(decoder.ids) :]):
        pass


def _decode(
    decoder: Decoder, transcript: Transcript, stats: Stats, curve: CostCurve | None, since: float
) -> Iterator[Chunk]:
    """The answer; `since` is when the request began."""
    meter = decoder.meter
    for index, round_ in enumerate(decoder.rounds()):
        if index > 0:
            stats.rounds += 1
            stats.verified += round_.verified
            stats.accepted += round_.accepted
            stats.accept_lengths.append(round_.accepted)
            stats.verify_lengths.append(round_.verified)
            stats.plain_rounds += not round_.drafted
        stats.new_tokens += len(round_.tokens)
        stats.finish_reason = round_.finish_reason
        if round_.finish_reason is not None and (note := _why_plain(curve, stats)):
            stats.notes.append(note)
        stats.peak_memory_gb = runtime.peak_memory_gb()
        chunks = list(_chunks(transcript, round_.tokens, stats))
        elapsed = time.perf_counter() - since
        if index == 0:
            stats.seconds.prefill = elapsed
            meter.draft = meter.verify = 0.0
        else:
            stats.seconds.decode += elapsed
        if meter.enabled:
            stats.seconds.draft, stats.seconds.verify = meter.draft, meter.verify
            stats.seconds.other = stats.seconds.decode - meter.draft - meter.verify
        yield from chunks
        since = time.perf_counter()


def _why_plain(curve: CostCurve | None, stats: Stats) -> str | None:
    """A sentence where the policy decoded most of an answer plainly."""
    if curve is None or 2 * stats.plain_rounds <= stats.new_tokens:
        return None
    if not curve.can_pay_after(stats.prompt_tokens):
        costs = curve.at(stats.prompt_tokens)
        return (
            "Decoded plainly: on this machine not even a drafter that is always right would pay, as a round over "
            f"{curve.block_size} rows costs {costs.round(curve.block_size - 1) / costs.plain:.1f} plain steps."
        )
    return (
        f"Decoded plainly: {stats.plain_rounds} of {stats.new_tokens} tokens, as drafting did not pay here."
    )


def _chunks(transcript: Transcript, tokens: tuple[int, ...], stats: Stats) -> Iterator[Chunk]:
    """The pieces that a round made final; at least one chunk, so that every token is handed on."""
    pieces = transcript.pieces() or [Piece("", "answer")]
    for i, (text, kind) in enumerate(pieces):
        last = i == len(pieces) - 1
        yield Chunk(text, kind, tokens if i == 0 else (), stats.finish_reason if last else None, stats)
