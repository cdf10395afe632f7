"""DFlashGenerator: the public object. Loads a pair, checks what is asked, hands on what the rooms below make.

Streaming is the one implementation: `generate` joins it, `compare` runs it beside mlx-lm's own loop.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import mlx.core as mx

from dflash_mlx import archive, calibration, drafting, loading, runtime, tuning
from dflash_mlx.answering import answer, collected
from dflash_mlx.chat import Chat, Loaded
from dflash_mlx.conversation import Conversations
from dflash_mlx.core import Chunk, Comparison, OnLoad, Result
from dflash_mlx.drafter import Drafter, Shortlist
from dflash_mlx.drafting import DraftBits, DraftVocab
from dflash_mlx.engine import PREFILL_CHUNK, Engine
from dflash_mlx.errors import UsageError
from dflash_mlx.kernels.choice import NO_KERNELS, Choices
from dflash_mlx.loading import LoadedPair, LoadedTarget, answer_ids, load_pair
from dflash_mlx.pace import Pace
from dflash_mlx.prompting import requested
from dflash_mlx.request import Options, Prompt, Request
from dflash_mlx.runtime import Machine
from dflash_mlx.yardstick import first_difference, plain_answer

Mode = Literal["auto", "on", "off"]


class DFlashGenerator:
    """A target with its drafter, loaded and ready.

    Args:
        target_model: a local folder, a hub id, an alias (`Qwen3-8B`), or the `target` of another generator,
            which is then shared; None takes the default pair of this machine.
        draft_model: a local folder or a hub id; None looks the target up among the known pairs.
        mode: "auto" drafts where a drafter is known and where that pays by this machine's own costs, which are
            measured once for each pair (some ten seconds, kept in the cache folder; DFLASH_COSTS=off measures none
            and always verifies whole blocks), and says so where it decodes plainly; "on" insists on a drafter
            and verifies every block whole; "off" decodes plainly and loads none.
        block_size: tokens in a drafted block, the anchor included, at most the trained number.
        draft_bits: 4 or 8 quantises the drafter at load; "auto" where that makes a round clearly faster on this
            machine (never on a CPU so far); None leaves it as it is stored.
        draft_vocab: how many words are proposed besides those of prompt and answer, the most frequent ones: "auto"
            (as None) takes what is fastest by this machine's costs and the words that are expected to be missed,
            "full" any word. The text is the same; a smaller head is read for each draft.
        dtype: "float32", "bfloat16" or "float16" for weights and activations; None keeps the stored type on a
            GPU and takes float32 on a CPU.
        kv_bits: 4 or 8 quantises the target's keys and values, which is another model: the text is that of plain
            decoding with the same `kv_bits`. A shared target keeps those that it was loaded with.
        draft_window: tokens of the context that the drafter keeps and sees: the first few and the latest, a block at
            least. The text is the same; long contexts take less memory and draft faster, and a little worse.
        kept_gb: memory for conversations kept between requests, so that a next turn reads only what is new; None
            takes a quarter of the machine's, 0 keeps none.
        on_note: told what was chosen for the user, a sentence each, as soon as it is known; `notes` keeps them.
        on_load: told which model is being fetched or read and how far that is (`core.LoadStep`); what it raises ends
            the loading.

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
        draft_bits: DraftBits | None = None,
        draft_vocab: DraftVocab | None = None,
        dtype: str | None = None,
        kv_bits: int | None = None,
        draft_window: int | None = None,
        kept_gb: float | None = None,
        on_note: Callable[[str], None] | None = None,
        on_load: OnLoad | None = None,
    ):
        _check_mode(
            mode,
            draft_model=draft_model,
            block_size=block_size,
            draft_bits=draft_bits,
            draft_vocab=draft_vocab,
            draft_window=draft_window,
        )
        drafting.check_draft_vocab("auto" if draft_vocab is None else draft_vocab)
        _check_kept(kept_gb)
        machine, chooser, measuring = runtime.machine(), tuning.chooser(), calibration.wanted()
        started = time.perf_counter()
        runtime.reset_peak_memory()
        pair = load_pair(
            target_model,
            draft_model,
            machine=machine,
            mode=mode,
            draft_bits=None if draft_bits == "auto" else draft_bits,
            dtype=dtype,
            kv_bits=kv_bits,
            draft_window=draft_window,
            on_load=on_load,
        )
        block_size = pair.draft.config.effective_block_size(block_size) if pair.draft else None
        load_peak_gb = runtime.peak_memory_gb()
        tell, of_bits = on_note or (lambda _: None), tuple[str, ...]()
        if draft_bits == "auto":
            key = _key(pair, machine, NO_KERNELS, block_size) if measuring else None
            pair, of_bits = drafting.packed(pair, key=key, block_size=block_size or 1, tell=tell)
        kernels, notes = tuning.tune(pair.target.model, pair.draft, block_size=block_size, chooser=chooser)
        with ExitStack() as resources:
            resources.enter_context(runtime.wired_limit(pair.target.model.model))
            for note in (*pair.notes, *of_bits, *notes):
                tell(note)
            key = _key(pair, machine, kernels, block_size)
            shortlist, of_words = drafting.listed(
                pair,
                "auto" if draft_vocab is None else draft_vocab,
                machine=machine,
                key=key if measuring else None,
                block_size=block_size or 1,
                tell=tell,
            )
            for note in of_words:
                tell(note)
            costs = calibration.Known(None, ())
            if mode == "auto" and measuring:
                costs = _measured(pair, machine, kernels, block_size, shortlist, key, tell)
            for note in costs.notes:
                tell(note)
            self._resources = resources.pop_all()
        self.notes: tuple[str, ...] = (*pair.notes, *of_bits, *notes, *of_words, *costs.notes)
        self.seconds_load = time.perf_counter() - started
        self.target = pair.target
        self.generation_defaults = pair.target.generation_config
        self._engine = Engine(
            pair=pair,
            machine=machine,
            kernels=kernels,
            curve=costs.curve,
            block_size=block_size,
            shortlist=shortlist,
            notes=self.notes,
            seconds_load=self.seconds_load,
            load_peak_gb=load_peak_gb,
            pace=Pace(PREFILL_CHUNK[machine.device]),
        )
        self._kept = Conversations(int((machine.memory_gb / 4 if kept_gb is None else kept_gb) * runtime.GB))

    @property
    def target_name(self) -> str:
        """The target as it was found."""
        return self._engine.pair.target.name

    @property
    def draft_name(self) -> str | None:
        """The drafter as it was found; None when decoding plainly."""
        draft = self._engine.pair.draft
        return draft.name if draft else None

    @property
    def weights_gb(self) -> float:
        """Size of both models' weights, the shortlist's copies included, in 1e9 bytes."""
        return self._engine.nbytes / runtime.GB

    @property
    def engine(self) -> Engine:
        """The pair made ready, for whoever measures it.

        Raises:
            UsageError: the generator is closed.
        """
        if not hasattr(self, "_engine"):
            raise UsageError("This generator is closed; make a new one.")
        return self._engine

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
        return collected(self.stream(prompt, **options))

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Chunk]:
        """Like `generate`, chunk by chunk as text becomes final; may be left at any chunk."""
        request = self._request(prompt, options)
        return answer(self._engine, request, self._kept)

    def compare(self, prompt: Prompt, **options: Any) -> Comparison:
        """Decode twice with the same draws: by mlx-lm's plain loop, then with the drafter.

        Raises:
            UsageError: also when there is no drafter to compare.
        """
        request, engine = self._request(prompt, options), self._engine
        if engine.pair.draft is None:
            raise UsageError("There is nothing to compare: no drafter is loaded. Leave out mode='off'.")
        model = engine.pair.target.model
        plain = plain_answer(
            model,
            request,
            engine.stats(request),
            engine.transcript(request),
            prefill_chunk=engine.prefill_chunk,
        )
        drafted = collected(answer(engine, request, Conversations(0)))
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
        target = self._engine.pair.target
        return answer_ids(target.tokenizer, emitted, text, target.eos_ids)

    def save_chat(self, path: str | Path, messages: Sequence[Mapping[str, Any]]) -> Path:
        """Write messages, and what is kept of them, to a safetensors file; gives its name.

        Raises:
            OSError: it cannot be written.
        """
        return archive.save(path, messages, self._engine, self._kept)

    def load_chat(self, path: str | Path) -> Loaded:
        """Read the messages of a file; what it holds of them is kept here where it fits this pair.

        Raises:
            UsageError: no such file, or one that is no conversation.
        """
        return archive.load(path, self._engine, self._kept)

    def measure_costs(self) -> calibration.Again:
        """Measure now what drafting costs with this pair, and keep it: generators made from now on go by it.

        Raises:
            UsageError: no drafter is loaded.
        """
        engine = self.engine
        if engine.block_size is None:
            raise UsageError("There is nothing to measure: no drafter is loaded.")
        bench = _bench(engine.pair, engine.machine, engine.kernels, engine.shortlist)
        key = _key(engine.pair, engine.machine, engine.kernels, engine.block_size)
        key = _with_words(key, engine.shortlist)
        return calibration.again(bench, key, block_size=engine.block_size)

    def close(self) -> None:
        """Release the memory of the models; the generator is of no use afterwards."""
        self._resources.close()
        self._kept.clear()
        self.__dict__.pop("_engine", None)
        self.__dict__.pop("target", None)
        mx.clear_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, prompt: Prompt, options: Mapping[str, Any]) -> Request:
        checked = Options.checked(options)
        return requested(self.engine.pair, prompt, checked)


def find_target(target_model: str | Path) -> None:
    """Look for a target without loading it.

    Raises:
        LoadError: it cannot be had.
    """
    loading.find_target(target_model, runtime.machine())


def _check_mode(mode: str, **of_the_drafter: object) -> None:
    if mode not in ("auto", "on", "off"):
        raise UsageError(f"mode is {mode!r}; expected 'auto', 'on' or 'off'.")
    useless = [name for name, value in of_the_drafter.items() if value is not None]
    if mode == "off" and useless:
        raise UsageError(
            f"mode='off' decodes without a drafter, so {useless[0]} would be ignored; leave one out."
        )


def _check_kept(kept_gb: float | None) -> None:
    if kept_gb is not None and not (isinstance(kept_gb, int | float) and 0 <= kept_gb < 1e6):
        raise UsageError(f"kept_gb is {kept_gb!r}; expected gigabytes from 0 up, or None.")


def _key(pair: LoadedPair, machine: Machine, kernels: Choices, block_size: int | None) -> dict[str, str]:
    """What costs of a pair hold for."""
    target, draft = pair.target, pair.draft
    return {
        "chip": machine.chip,
        "os": machine.os,
        "mlx": version("mlx"),
        "blas": machine.blas,
        "threads": calibration.threads(),
        "target": target.name,
        "draft": draft.name if draft else "",
        "bytes": str(pair.nbytes),
        "dtype": str(target.model.dtype),
        "draft_bits": str(draft.bits if draft else None),
        "kv_bits": str(target.model.kv_bits),
        "draft_window": str(draft.config.draft_window if draft else None),
        "kernels": tuning.in_use(target.model, kernels),
        "block_size": str(block_size),
    }


def _measured(
    pair: LoadedPair,
    machine: Machine,
    kernels: Choices,
    block_size: int | None,
    shortlist: Shortlist | None,
    key: Mapping[str, str],
    tell: Callable[[str], None],
) -> calibration.Known:
    """What drafting costs with this pair on this machine."""
    if pair.draft is None or block_size is None:
        return calibration.Known(None, ())
    bench = _bench(pair, machine, kernels, shortlist)
    return calibration.costs(bench, _with_words(key, shortlist), block_size=block_size, tell=tell)


def _bench(
    pair: LoadedPair, machine: Machine, kernels: Choices, shortlist: Shortlist | None
) -> calibration.Bench:
    """A pair with a drafter, ready to be measured."""
    assert pair.draft is not None
    # What is measured on means nothing, and holds words that no text would.
    bearing = shortlist.bearing(1.0) if shortlist else None
    make_drafter = partial(Drafter, pair.draft, pair.target.model, shortlist=bearing)
    return calibration.Bench(pair.target.model, make_drafter, PREFILL_CHUNK[machine.device], kernels)


def _with_words(key: Mapping[str, str], shortlist: Shortlist | None) -> dict[str, str]:
    return {**key, "draft_vocab": str(len(shortlist) if shortlist else None)}
