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

from dflash_mlx.drafter import DraftConfig, DraftNetwork, check_bits
from dflash_mlx.errors import PairError, UsageError
from dflash_mlx.loading import pair
from dflash_mlx.loading.checkpoint import FolderCheckpoint, open_target
from dflash_mlx.loading.names import Source, find_draft, find_target
from dflash_mlx.loading.registry import GB, KnownPair
from dflash_mlx.runtime import Machine
from dflash_mlx.target import MLXTarget

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
) -> LoadedPair:
    """Find, fetch, check and load a target and its drafter; everything returned is evaluated.

    Args:
        target_model: local folder, GGUF file, hub id, alias, or a target that is loaded already; None takes the
            machine's default pair.
        draft_model: local folder, hub id or alias; None looks it up among the known pairs.
        machine: where it will run.
        mode: "auto" drafts where a drafter is known, "on" insists on one, "off" loads none.
        draft_bits: 4 or 8 quantises the drafter's matrices at load.
        dtype: "float32", "bfloat16" or "float16" for both models; None takes the machine's default.

    Raises:
        UsageError: an option that cannot be honoured.
        LoadError: or a child of it, for names and files that do not become a working pair.
    """
    check_bits(draft_bits)
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}.")
    notes: list[str] = []
    loaded = target_model if isinstance(target_model, LoadedTarget) else None
    if isinstance(target_model, LoadedTarget):
        if dtype is not None and target_model.model.dtype != DTYPES[dtype]:
            raise UsageError(
                f"dtype is {dtype!r}, but the shared target {target_model.name} has {target_model.model.dtype}."
            )
        source, known = Source(target_model.name), target_model.known
    else:
        if target_model is None and draft_model is not None:
            raise UsageError(
                f"draft_model is {str(draft_model)!r} without a target_model; give both or neither."
            )
        on_gpu, memory = machine.device == "gpu", int(machine.memory_gb * GB)
        source, known = find_target(target_model, gpu=on_gpu, memory_bytes=memory, notes=notes)
    draft_source = None
    if mode != "off":
        draft_source, known = find_draft(draft_model, source, known, insist=mode == "on", notes=notes)
    if draft_source and draft_source.place == source.place:
        raise PairError(
            f"Target and drafter are both {source.name}; give a target and the drafter made for it."
        )

    checkpoint = None if loaded else open_target(source)
    draft = FolderCheckpoint(draft_source, "drafter") if draft_source else None
    if checkpoint is None:
        assert loaded is not None
        words, shape = loaded.tokenizer, pair.shape_of(loaded.model)
    else:
        shape = pair.check_target(checkpoint.config, name=checkpoint.name)
        words = checkpoint.tokenizer()
    if draft:
        config = DraftConfig.from_dict(draft.config, name=draft.name)
        pair.check_pair(shape, config, draft_name=draft.name, tokens=len(words))
        if draft.has_tokenizer():
            theirs = draft.tokenizer().get_vocab()
            pair.check_same_tokens(words.get_vocab(), theirs, target_name=shape.name, draft_name=draft.name)

    if checkpoint:
        checkpoint.check()
    if draft:
        draft.check()
    if checkpoint:
        model = checkpoint.target(dtype=machine.default_dtype if dtype is None else DTYPES[dtype])
        eos = tuple(sorted(words.eos_token_ids))
        loaded = LoadedTarget(model, words, eos, checkpoint.generation_config, checkpoint.name, known)
    assert loaded is not None
    network = draft.draft(bits=draft_bits, dtype=DTYPES[dtype] if dtype else None) if draft else None
    nbytes = loaded.model.nbytes + (_nbytes(network) if network else 0)
    return LoadedPair(loaded, network, known.thinking if known else None, tuple(notes), nbytes)


def _nbytes(network: DraftNetwork) -> int:
    arrays: dict[str, mx.array] = dict(tree_flatten(network.parameters()))
    return sum(array.nbytes for array in arrays.values())
