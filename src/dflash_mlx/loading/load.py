"""Two names -> a loaded pair: names, then configs, then whether they fit, then files, then weights.

The order matters: whatever can be refused is refused before anything large is fetched or read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.core import LoadStep, OnLoad
from dflash_mlx.drafter import DraftConfig, DraftNetwork, check_bits, check_draft_window
from dflash_mlx.errors import LoadError, PairError, UsageError
from dflash_mlx.loading import memory, names, pair
from dflash_mlx.loading.checkpoint import Checkpoint, FolderCheckpoint, open_target
from dflash_mlx.loading.names import Source, find_draft
from dflash_mlx.loading.registry import GB, KnownPair
from dflash_mlx.runtime import Machine
from dflash_mlx.target import MLXTarget
from dflash_mlx.target.caches import quantised

Mode = Literal["auto", "on", "off"]
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A target ready to verify, with what belongs to it; several generators can share one."""

    model: MLXTarget
    tokenizer: TokenizerWrapper
    eos_ids: tuple[int, ...]  # what ends an answer
    generation_config: Mapping[str, Any]  # {} where the checkpoint has none
    name: str
    known: KnownPair | None = None  # the registry's row of this target


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """A target and the drafter that was checked against it."""

    target: LoadedTarget
    draft: DraftNetwork | None  # None: decode plainly
    thinking: bool | None  # the mode the known pair was trained for; None: not known
    notes: tuple[str, ...]  # what was chosen for the user, one sentence each
    nbytes: int  # weights of both


def load_pair(
    target_model: str | Path | LoadedTarget | None = None,
    draft_model: str | Path | None = None,
    *,
    machine: Machine,
    mode: Mode = "auto",
    draft_bits: int | None = None,
    dtype: str | None = None,
    kv_bits: int | None = None,
    draft_window: int | None = None,
    on_load: OnLoad | None = None,
) -> LoadedPair:
    """Find, fetch, check and load a target and its drafter; everything returned is evaluated.

    Args:
        target_model: local folder, GGUF file, hub id, alias, or a target that is loaded already; None takes the
            machine's default pair.
        draft_model: local folder, hub id or alias; None looks it up among the known pairs.
        machine: where it will run.
        mode: "auto" drafts where a drafter is known and, when one that nobody named cannot be had, decodes plainly
            and says why in a note; "on" insists on a drafter; "off" loads none.
        draft_bits: 4 or 8 quantises the drafter's matrices at load.
        dtype: "float32", "bfloat16" or "float16" for both models; None takes the machine's default.
        kv_bits: 4 or 8 quantises the target's keys and values; None keeps them in the type of the activations, or
            as a target that is loaded already keeps them.
        draft_window: context tokens that the drafter keeps and sees at most; None for all that it was trained to see.
        on_load: told what is being fetched and read, and how far that is; what it raises ends the loading.

    Raises:
        UsageError: an option that cannot be honoured.
        LoadError: or a child of it, for names and files that do not become a working pair.
    """
    check_bits(draft_bits)
    quantised.check_bits(kv_bits)
    check_draft_window(draft_window)
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}.")
    if target_model is None and draft_model is not None:
        raise UsageError(f"draft_model is {str(draft_model)!r} without a target_model; give both or neither.")
    notes: list[str] = []
    target = _found_target(target_model, machine, notes, kv_bits)
    draft, row = None, target.known
    if mode != "off":
        draft, row = _found_draft(draft_model, target, mode, notes, draft_window, on_load)
    cast = machine.default_dtype if dtype is None else DTYPES[dtype]
    need = memory.Need(None, draft.held_bytes(dtype=cast) if draft else 0, None)
    if target.checkpoint is not None:
        packing = _Packing(draft_bits, kv_bits, draft_window)
        need = _check_memory(target, draft, machine, dtype, packing, notes, on_load)
    loaded = target.loaded or _load(target, cast, kv_bits, need, on_load)
    if dtype is not None and loaded.model.dtype != DTYPES[dtype]:
        raise UsageError(f"dtype is {dtype!r}, but the shared target {loaded.name} has {loaded.model.dtype}.")
    network = None
    if draft:
        if on_load:
            on_load(LoadStep("read", "drafter", draft.name, need.draft, 0, need.weights))
        network = draft.draft(
            bits=draft_bits, dtype=DTYPES[dtype] if dtype else None, draft_window=draft_window
        )
    nbytes = loaded.model.nbytes + (weight_bytes(network) if network else 0)
    return LoadedPair(loaded, network, row.thinking if row else None, tuple(notes), nbytes)


def find_target(given: str | Path, machine: Machine) -> None:
    """Look for a target as `load_pair` would, as far as its config and tokenizer; no weights are fetched.

    Raises:
        LoadError: it cannot be had.
    """
    _found_target(given, machine, [])


@dataclass(frozen=True, slots=True)
class _Target:
    """A target whose config was checked; its weights are loaded already or wait in `checkpoint`."""

    source: Source
    known: KnownPair | None
    shape: pair.TargetShape
    tokenizer: TokenizerWrapper
    checkpoint: Checkpoint | None
    loaded: LoadedTarget | None


@dataclass(frozen=True, slots=True)
class _Packing:
    """What the user gave to save memory."""

    draft_bits: int | None
    kv_bits: int | None
    draft_window: int | None


def _found_target(
    given: str | Path | LoadedTarget | None, machine: Machine, notes: list[str], kv_bits: int | None = None
) -> _Target:
    if isinstance(given, LoadedTarget):
        if kv_bits is not None and kv_bits != given.model.kv_bits:
            raise UsageError(
                f"kv_bits is {kv_bits}, but the shared target {given.name} was loaded with kv_bits "
                f"{given.model.kv_bits}; leave it out, or load the target again."
            )
        source, shape = Source(given.name), pair.shape_of(given.model)
        return _Target(source, given.known, shape, given.tokenizer, None, given)
    on_gpu, memory = machine.device == "gpu", int(machine.memory_gb * GB)
    source, known = names.find_target(given, gpu=on_gpu, memory_bytes=memory, notes=notes)
    checkpoint = open_target(source)
    shape = pair.check_target(checkpoint.config, name=checkpoint.name, kv_bits=kv_bits)
    if note := pair.beyond_text(checkpoint.config, name=checkpoint.name):
        notes.append(note)
    return _Target(source, known, shape, checkpoint.tokenizer(), checkpoint, None)


def _found_draft(
    given: str | Path | None,
    target: _Target,
    mode: Mode,
    notes: list[str],
    draft_window: int | None,
    on_load: OnLoad | None,
) -> tuple[FolderCheckpoint | None, KnownPair | None]:
    """The drafter, checked against the target, and the row that holds both."""
    source, row = find_draft(given, target.source, target.known, insist=mode == "on", notes=notes)
    if source is None:
        return None, None
    if source.place == target.source.place:
        raise PairError(
            f"Target and drafter are both {source.name}; give a target and the drafter made for it."
        )
    try:
        return _checked_draft(source, target, draft_window, notes, on_load), row
    except LoadError as error:
        if given is not None or mode == "on":
            raise
        notes.append(f"Decoding plainly, without a drafter. {error}")
        return None, row


def _checked_draft(
    source: Source, target: _Target, draft_window: int | None, notes: list[str], on_load: OnLoad | None
) -> FolderCheckpoint:
    draft = FolderCheckpoint(source, "drafter")
    config = DraftConfig.from_dict(draft.config, name=draft.name)
    narrow = config.with_draft_window(draft_window)
    if draft_window is not None and narrow.sights == config.sights:
        notes.append(
            f"draft_window {draft_window} changes nothing: no layer of {draft.name} sees more than "
            f"{max(sight.most or 0 for sight in config.sights)} tokens of the context."
        )
    words = target.tokenizer
    pair.check_pair(target.shape, config, draft_name=draft.name, tokens=len(words))
    if draft.has_tokenizer():
        pair.check_same_tokens(
            words.get_vocab(),
            draft.tokenizer().get_vocab(),
            target_name=target.shape.name,
            draft_name=draft.name,
        )
    draft.check(on_load)
    return draft


def _load(
    target: _Target,
    dtype: mx.Dtype | None,
    kv_bits: int | None,
    need: memory.Need,
    on_load: OnLoad | None,
) -> LoadedTarget:
    checkpoint, words = target.checkpoint, target.tokenizer
    assert checkpoint is not None, "a target that is not loaded has a checkpoint"
    checkpoint.check(on_load)

    def read(done: int) -> None:
        if on_load:
            on_load(LoadStep("read", "target", target.source.name, need.target, done, need.weights))

    read(0)
    model = checkpoint.target(dtype=dtype, kv_bits=kv_bits, on_bytes=read)
    eos = tuple(sorted(words.eos_token_ids))
    return LoadedTarget(model, words, eos, checkpoint.generation_config, checkpoint.name, target.known)


def _check_memory(
    target: _Target,
    draft: FolderCheckpoint | None,
    machine: Machine,
    dtype: str | None,
    packing: _Packing,
    notes: list[str],
    on_load: OnLoad | None,
) -> memory.Need:
    """Say before anything is loaded whether the pair fits; a target whose size nothing tells is fetched first."""
    checkpoint = target.checkpoint
    assert checkpoint is not None
    cast = machine.default_dtype if dtype is None else DTYPES[dtype]
    size = checkpoint.held_bytes(dtype=cast)
    if size is None:
        checkpoint.check(on_load)
        size = checkpoint.held_bytes(dtype=cast)
    itemsize = 2 if cast is None else cast.size
    context = memory.context_bytes(checkpoint.config, itemsize=itemsize, kv_bits=packing.kv_bits)
    drafts = 0
    if draft is not None:
        config = DraftConfig.from_dict(draft.config, name=draft.name)
        config = config.with_draft_window(packing.draft_window)
        drafts = memory.packed_bytes(draft.held_bytes(dtype=cast) or 0, itemsize, packing.draft_bits)
        own = memory.draft_context_bytes(config, itemsize=itemsize)
        context = None if context is None else context + own
    need = memory.Need(size, drafts, context)
    name = draft.name if draft else None
    if note := memory.verdict(need, machine, target_name=target.source.name, draft_name=name):
        notes.append(note)
    return need


def weight_bytes(network: DraftNetwork) -> int:
    """Bytes of a drafter's weights as they are held."""
    arrays: dict[str, mx.array] = dict(tree_flatten(network.parameters()))
    return sum(array.nbytes for array in arrays.values())
