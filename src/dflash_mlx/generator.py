"""DFlashGenerator: a prompt in, text out in chunks. Puts loading, decoding and text together; draws nothing.

Streaming is the one implementation: `generate` joins it, `compare` runs it beside mlx-lm's own loop.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import mlx.core as mx

from dflash_mlx import calibration, loading, runtime, saved, tuning
from dflash_mlx.chat import Chat
from dflash_mlx.conversation import Conversations, Mark, mark, state_of
from dflash_mlx.core import Chunk, Comparison, Result, Stats
from dflash_mlx.decoding import Decoder, Meter
from dflash_mlx.drafter import Drafter
from dflash_mlx.errors import UsageError
from dflash_mlx.loading import LoadedTarget, answer_ids, load_pair
from dflash_mlx.policy import Adaptive, WholeBlock
from dflash_mlx.prompting import next_prompt, requested
from dflash_mlx.request import Options, Prompt, Request
from dflash_mlx.sampling import Sampler
from dflash_mlx.target import kept
from dflash_mlx.text import Piece, Transcript
from dflash_mlx.yardstick import first_difference, plain_answer

Mode = Literal["auto", "on", "off"]

_PREFILL_CHUNK = {"gpu": 512, "cpu": 256}  # tokens; half a second or less for the models each is meant for


class DFlashGenerator:
    """A target with its drafter, loaded and ready.

    Args:
        target_model: a local folder, a hub id, an alias (`Qwen3-8B`), or the `target` of another generator,
            which is then shared; None takes the default pair of this machine.
        draft_model: a local folder or a hub id; None looks the target up among the known pairs.
        mode: "auto" drafts where a drafter is known and where that pays by this machine's own costs, which are
            measured once for each pair (a few seconds, kept in the cache folder; DFLASH_COSTS=off measures none
            and always verifies whole blocks), and says so where it decodes plainly; "on" insists on a drafter
            and verifies every block whole; "off" decodes plainly and loads none.
        block_size: tokens in a drafted block, the anchor included, at most the trained number.
        draft_bits: 4 or 8 quantises the drafter at load.
        dtype: "float32", "bfloat16" or "float16" for weights and activations; None keeps the stored type on a
            GPU and takes float32 on a CPU.
        kept_gb: memory for conversations kept between requests, so that a next turn reads only what is new; None
            takes a quarter of the machine's, 0 keeps none.
        on_note: told what was chosen for the user, a sentence each, as soon as it is known; `notes` keeps them.

    Raises:
        UsageError: options that cannot be honoured.
        LoadError: names and files that do not become a working pair.
    """

    def __init__(
        self,
        target_model: str | Path | LoadedTarget | None = None,
        draft_model: str | Path | None = None,
        *,
        mode: Mode = "auto",
        block_size: int | None = None,
        draft_bits: int | None = None,
        dtype: str | None = None,
        kept_gb: float | None = None,
        on_note: Callable[[str], None] | None = None,
    ):
        _check_mode(mode, draft_model, block_size, draft_bits)
        _check_kept(kept_gb)
        machine, chooser, measuring = runtime.machine(), tuning.chooser(), calibration.wanted()
        started = time.perf_counter()
        runtime.reset_peak_memory()
        pair = load_pair(
            target_model, draft_model, mode=mode, draft_bits=draft_bits, dtype=dtype, machine=machine
        )
        self.target = pair.target
        self.generation_defaults = pair.target.generation_config
        self._pair = pair
        self._machine = machine
        self._load_peak_gb = runtime.peak_memory_gb()
        self._block_size = pair.draft.config.effective_block_size(block_size) if pair.draft else None
        self._kernels, notes = tuning.tune(
            pair.target.model, pair.draft, block_size=self._block_size, chooser=chooser
        )
        with ExitStack() as resources:
            resources.enter_context(runtime.wired_limit(pair.target.model.model))
            tell = on_note or (lambda _: None)
            for note in (*pair.notes, *notes):
                tell(note)
            costs = self._measured(tell) if mode == "auto" and measuring else calibration.Known(None, ())
            for note in costs.notes:
                tell(note)
            self._resources = resources.pop_all()
        self._curve = costs.curve
        self.notes: tuple[str, ...] = (*pair.notes, *notes, *costs.notes)
        self.seconds_load = time.perf_counter() - started
        self._kept = Conversations(int((machine.memory_gb / 4 if kept_gb is None else kept_gb) * runtime.GB))

    @property
    def target_name(self) -> str:
        """The target as it was found."""
        return self._pair.target.name

    @property
    def draft_name(self) -> str | None:
        """The drafter as it was found; None when decoding plainly."""
        return self._pair.draft.name if self._pair.draft else None

    @property
    def weights_gb(self) -> float:
        """Size of both models' weights, in 1e9 bytes."""
        return self._pair.nbytes / runtime.GB

    def generate(self, prompt: Prompt, **options: Any) -> Result:
        """Answer a prompt; the options are those of `request.Options`.

        Args:
            prompt: text (put through the chat template unless `raw`), messages, or token ids.
            **options: `max_new_tokens`, `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`,
                `presence_penalty`, `frequency_penalty`, `seed`, `stop`, `system`, `think`, `raw`,
                `logits_processors`, `profile`.

        Raises:
            UsageError: a value or prompt that cannot be honoured, before any model work.
        """
        return _collect(self.stream(prompt, **options))

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Chunk]:
        """Like `generate`, chunk by chunk as text becomes final; may be left at any chunk."""
        return self._run(self._request(prompt, options), self._kept)

    def compare(self, prompt: Prompt, **options: Any) -> Comparison:
        """Decode twice with the same draws: by mlx-lm's plain loop, then with the drafter.

        Raises:
            UsageError: also when there is no drafter to compare.
        """
        if self._pair.draft is None:
            raise UsageError("There is nothing to compare: no drafter is loaded. Leave out mode='off'.")
        request = self._request(prompt, options)
        model, stats = self._pair.target.model, self._stats(request)
        plain = plain_answer(
            model,
            request,
            stats,
            self._transcript(request),
            prefill_chunk=_PREFILL_CHUNK[self._machine.device],
        )
        drafted = _collect(self._run(request, Conversations(0)))
        return Comparison(
            plain, drafted, first_difference(model, request, plain.token_ids, drafted.token_ids)
        )

    def chat(self, system: str | None = None, **options: Any) -> Chat:
        """Begin a conversation; `options` are those of `stream`, for every turn.

        Raises:
            UsageError: a value that cannot be honoured.
        """
        Options.checked(options)
        return Chat(self, system, **options)

    def answer_ids(self, emitted: Sequence[int], text: str) -> tuple[int, ...]:
        """The emitted ids that make up the text of an answer, for the `token_ids` of its message."""
        target = self._pair.target
        return answer_ids(target.tokenizer, emitted, text, target.eos_ids)

    def save_chat(self, path: str | Path, messages: Sequence[Mapping[str, Any]]) -> Path:
        """Write messages, and what is kept of them, to a safetensors file; gives its name.

        Raises:
            OSError: it cannot be written.
        """
        cache: dict[str, mx.array] = {}
        context: dict[str, mx.array] = {}
        state = self._kept.find(next_prompt(self._pair, messages)) if messages else None
        if state is not None and kept.goes_back(state.cache):
            cache = kept.arrays(state.cache)
            if drafter := self._drafter():
                drafter.restore(state.context)
                context = drafter.visible()
        ids = state.ids if state and cache else ()
        return saved.write(path, saved.Saved(saved.spoken(messages), self._holder(), ids, cache, context))

    def load_chat(self, path: str | Path) -> list[dict[str, Any]]:
        """Read the messages of a file; what it holds of them is kept here where this very pair wrote it.

        Raises:
            UsageError: no such file, or one of another target.
        """
        found = saved.read(path, target=self.target_name)
        if found.ids and found.holder == self._holder():
            model, drafter = self._pair.target.model, self._drafter()
            cache = model.make_cache()
            try:
                kept.fill(cache, found.cache, len(found.ids))
                if drafter:
                    drafter.fill(found.context, len(found.ids))
                state = state_of(model, cache, drafter, found.ids, ())
            except (ValueError, KeyError) as error:
                raise UsageError(f"{path} does not fit {self.target_name}: {error}.") from None
            if state is not None:
                self._kept.keep(state)
        return found.messages

    def close(self) -> None:
        """Release the memory of the models; the generator is of no use afterwards."""
        self._resources.close()
        self._kept.clear()
        self.__dict__.pop("_pair", None)
        self.__dict__.pop("target", None)
        mx.clear_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drafter(self) -> Drafter | None:
        """A drafter without context; None also where not even one that is always right would pay."""
        if self._pair.draft is None or (self._curve is not None and not self._curve.can_pay):
            return None
        return Drafter(self._pair.draft, self._pair.target.model)

    def _measured(self, tell: Callable[[str], None]) -> calibration.Known:
        """What drafting costs with this pair on this machine."""
        target, draft, machine = self._pair.target, self._pair.draft, self._machine
        if draft is None or self._block_size is None:
            return calibration.Known(None, ())
        bench = calibration.Bench(
            target.model,
            partial(Drafter, draft, target.model),
            _PREFILL_CHUNK[machine.device],
            self._kernels,
        )
        key = {
            "chip": machine.chip,
            "os": machine.os,
            "mlx": version("mlx"),
            "blas": machine.blas,
            "threads": calibration.threads(),
            "target": target.name,
            "draft": draft.name,
            "bytes": str(self._pair.nbytes),
            "dtype": str(target.model.dtype),
            "draft_bits": str(draft.bits),
            "kernels": str(self._kernels),
            "block_size": str(self._block_size),
        }
        return calibration.costs(bench, key, block_size=self._block_size, tell=tell)

    def _holder(self) -> saved.Holder:
        versions = ", ".join(f"{name} {version(name)}" for name in ("dflash-mlx", "mlx", "mlx-lm"))
        return saved.Holder(self.target_name, self.draft_name, str(self._pair.target.model.dtype), versions)

    def _request(self, prompt: Prompt, options: Mapping[str, Any]) -> Request:
        checked = Options.checked(options)
        if not hasattr(self, "_pair"):
            raise UsageError("This generator is closed; make a new one.")
        return requested(self._pair, prompt, checked)

    def _transcript(self, request: Request) -> Transcript:
        tokenizer = self._pair.target.tokenizer
        return Transcript(
            tokenizer,
            stop_ids=frozenset(self._pair.target.eos_ids),
            max_new_tokens=request.budget,
            stop_strings=request.options.stop_strings,
            think_tags=(tokenizer.think_start, tokenizer.think_end) if tokenizer.has_thinking else None,
            inside_thought=request.inside_thought,
        )

    def _stats(self, request: Request) -> Stats:
        pair = self._pair
        stats = Stats(
            target=pair.target.name,
            draft=self.draft_name,
            dtype=str(pair.target.model.dtype).removeprefix("mlx.core."),
            device=self._machine.device,
            blas=self._machine.blas,
            kernels=str(self._kernels),
            block_size=self._block_size,
            seed=request.params.seed,
            prompt_tokens=len(request.prompt),
            context_limit=pair.target.model.max_positions,
            load_peak_memory_gb=self._load_peak_gb,
            weights_gb=pair.nbytes / runtime.GB,
            notes=[*self.notes, *request.notes],
        )
        stats.seconds.load = self.seconds_load
        if self._curve is not None:
            stats.plain_tokens_per_second_estimate = 1 / self._curve.at(len(request.prompt)).plain
        return stats

    def _run(self, request: Request, conversations: Conversations) -> Iterator[Chunk]:
        """One generation; time spent by whoever reads the chunks is not counted."""
        pair, stats, transcript = self._pair, self._stats(request), self._transcript(request)
        drafter = self._drafter()
        runtime.reset_peak_memory()
        since = time.perf_counter()
        start = conversations.resume(request.prompt, pair.target.model, drafter)
        stats.reused_tokens = start.reused
        decoder = Decoder(
            target=pair.target.model,
            cache=start.cache,
            drafter=drafter,
            sampler=Sampler(request.params, request.options.logits_processors, choices=self._kernels),
            cut=transcript.cut,
            policy=Adaptive(self._curve) if self._curve else WholeBlock(),
            max_new_tokens=request.budget,
            block_size=self._block_size or 1,
            prefill_chunk=_PREFILL_CHUNK[self._machine.device],
            meter=Meter(enabled=request.options.profile),
            ids=request.prompt[: start.reused],
        )
        marks = list(start.marks)
        try:
            self._read(decoder, request, marks)
            yield from self._answer(decoder, transcript, stats, since)
        finally:
            left = state_of(pair.target.model, decoder.cache, drafter, decoder.ids, marks)
            if left is not None:
                conversations.keep(left)

    def _read(self, decoder: Decoder, request: Request, marks: list[Mark]) -> None:
        """Read what is not held yet, remembering on the way the place that a next turn can come back to."""
        held = len(decoder.ids)
        if held < request.settled:
            for _ in decoder.read(request.prompt[held : request.settled]):
                pass
            marks.append(mark(decoder.target, decoder.cache, decoder.drafter, request.settled))
        for _ in decoder.prefill(request.prompt[len(decoder.ids) :]):
            pass

    def _answer(
        self, decoder: Decoder, transcript: Transcript, stats: Stats, since: float
    ) -> Iterator[Chunk]:
        """Decode; `since` is when the request began."""
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
            if round_.finish_reason is not None and (note := self._why_plain(stats)):
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

    def _why_plain(self, stats: Stats) -> str | None:
        """A sentence where the policy decoded most of an answer plainly."""
        if self._curve is None or 2 * stats.plain_rounds <= stats.new_tokens:
            return None
        if not self._curve.can_pay:
            costs = self._curve.at(stats.prompt_tokens)
            return (
                "Decoded plainly: on this machine not even a drafter that is always right would pay, as a round over "
                f"{self._curve.block_size} rows costs {costs.round(self._curve.block_size - 1) / costs.plain:.1f} "
                "plain steps."
            )
        return f"Drafting did not pay here: {stats.plain_rounds} of {stats.new_tokens} tokens were decoded plainly."


def find_target(target_model: str | Path) -> None:
    """Look for a target without loading it.

    Raises:
        LoadError: it cannot be had.
    """
    loading.find_target(target_model, runtime.machine())


def _check_mode(
    mode: str, draft_model: str | Path | None, block_size: int | None, draft_bits: int | None
) -> None:
    if mode not in ("auto", "on", "off"):
        raise UsageError(f"mode is {mode!r}; expected 'auto', 'on' or 'off'.")
    given = {"draft_model": draft_model, "block_size": block_size, "draft_bits": draft_bits}
    if mode == "off" and (useless := [name for name, value in given.items() if value is not None]):
        raise UsageError(
            f"mode='off' decodes without a drafter, so {useless[0]} would be ignored; leave one out."
        )


def _check_kept(kept_gb: float | None) -> None:
    if kept_gb is not None and not (isinstance(kept_gb, int | float) and 0 <= kept_gb < 1e6):
        raise UsageError(f"kept_gb is {kept_gb!r}; expected gigabytes from 0 up, or None.")


def _chunks(transcript: Transcript, tokens: tuple[int, ...], stats: Stats) -> Iterator[Chunk]:
    """The pieces that a round made final; at least one chunk, so that every token is handed on."""
    pieces = transcript.pieces() or [Piece("", "answer")]
    for i, (text, kind) in enumerate(pieces):
        last = i == len(pieces) - 1
        yield Chunk(text, kind, tokens if i == 0 else (), stats.finish_reason if last else None, stats)


def _collect(chunks: Iterable[Chunk]) -> Result:
    parts = list(chunks)
    texts = {kind: "".join(c.text for c in parts if c.kind == kind) for kind in ("answer", "thought")}
    ids = tuple(token for c in parts for token in c.tokens)
    return Result(texts["answer"], texts["thought"], ids, parts[-1].finish_reason, parts[-1].stats)
