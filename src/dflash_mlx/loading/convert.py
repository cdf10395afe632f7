"""A drafter of any format and place in, a local MLX folder out, read again and held against its source.

Everything is written into a folder beside the one asked for, checked there, and moved in one step: what has the
name that was asked for is whole. Knows no target.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx.drafter import DraftConfig, DraftNetwork, Probe, expand, load_draft, probe, save_draft
from dflash_mlx.drafter.frequent import FILE
from dflash_mlx.errors import DFlashError, UsageError, WriteError
from dflash_mlx.loading import files
from dflash_mlx.loading.agreement import Agreement, compared
from dflash_mlx.loading.checkpoint import FolderCheckpoint
from dflash_mlx.loading.names import draft_named
from dflash_mlx.loading.pair import is_drafter
from dflash_mlx.loading.registry import GB

BITS = (4, 8, 16)
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
_STORED = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
# What a tokenizer needs: a drafter that brings one is still refused for a target with another. And frequent words.
_CARRIED = ("tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", FILE)


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was written."""

    source: str
    format: str
    out: Path
    bits: int | None  # of packed matrices; None: not packed
    dtype: str
    parameters: int
    tensors: int
    nbytes: int  # of its tensors
    source_nbytes: int
    agreement: Agreement
    notes: tuple[str, ...]


def convert_draft(
    source: str | Path,
    out: str | Path,
    *,
    bits: int | None = None,
    dtype: str | None = None,
    force: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Conversion:
    """Write a drafter to a local folder that `load_draft` reads.

    Args:
        source: a local folder, a hub id or a known drafter's name.
        out: the folder to make; one that exists must be empty.
        bits: 4 or 8 packs the matrices, 16 unpacks them; None keeps them as they are stored.
        dtype: "bfloat16", "float16" or "float32" for what is not packed; None keeps what is stored.
        force: replace a drafter's folder that is there.
        say: told what is being done, a sentence at a time.

    Raises:
        UsageError: an option that cannot be honoured, before anything is fetched.
        LoadError: or a child of it, for a source that is no readable drafter.
        NumericalError: numbers that `dtype` cannot hold.
        WriteError: the folder cannot be written, or does not read back as the drafter it was made of.
    """
    _check_options(bits, dtype)
    out = Path(out).expanduser().resolve()
    _check_out(out, force)
    notes: list[str] = []
    draft = FolderCheckpoint(draft_named(source, notes)[0], "drafter")
    config = DraftConfig.from_dict(draft.config, name=draft.name)
    packed = config.quantization.bits if config.quantization else None
    if bits in (4, 8) and packed not in (None, bits):
        raise UsageError(
            f"{draft.name} is packed to {packed} bits already, which cannot become {bits}; "
            f"leave the bits out, give 16, or take an unpacked drafter."
        )
    draft.check()
    if out == draft.folder.resolve():
        raise UsageError(f"{out} is the drafter's own folder; give another one to write to.")
    stored = files.tensors(draft.folder, name=draft.name)
    kept = _dtype_of(stored)
    given = dtype or ("bfloat16" if bits == 16 and kept == "float32" else kept)
    source_nbytes = sum(tensor.nbytes for tensor in stored.values())

    say(f"Reading {draft.name} ({config.format.title}, {source_nbytes / GB:.2f} GB)")
    computed = _computed(kept, given)
    before = _probed(draft.folder, draft.name, computed)
    network = _converted(draft, bits, DTYPES[given])
    nbytes = _nbytes(network)
    with _beside(out, force) as partial:
        say(f"Writing {out} ({nbytes / GB:.2f} GB)")
        _write(network, draft.folder, partial, out)
        say("Reading it again")
        tensors = _check_written(network, partial, out)
        parameters, now = _count(network), network.bits
        del network
        same_weights = now == packed and given in (kept, "float32")
        after = _probed(partial, out.name, computed)
        agreement = compared(before, after, bits=now, dtype=given, same_weights=same_weights)
    return Conversion(
        source=draft.name,
        format=config.format.title,
        out=out,
        bits=now,
        dtype=given,
        parameters=parameters,
        tensors=tensors,
        nbytes=nbytes,
        source_nbytes=source_nbytes,
        agreement=agreement,
        notes=tuple(notes),
    )


def _check_options(bits: int | None, dtype: str | None) -> None:
    if bits is not None and (isinstance(bits, bool) or bits not in BITS):
        raise UsageError(f"bits is {bits!r}; expected 4, 8 or 16 (not packed).")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPES)}.")
    if bits == 16 and dtype == "float32":
        raise UsageError("bits is 16 and dtype is 'float32', which has 32; leave one of them out.")


def _check_out(out: Path, force: bool) -> None:
    """Refuse what would be lost; with `force` only a folder of files that is a drafter's is replaced."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"{out} is a file; give a folder that does not exist or is empty.")
    held = sorted(out.iterdir())
    if not held:
        return
    if not force:
        raise UsageError(
            f"{out} is not empty (it holds {held[0].name}); give another folder, or force=True (--force) to replace it."
        )
    try:
        replaceable = is_drafter(files.read_json(out / "config.json", name=out.name))
    except DFlashError:
        replaceable = False
    if not replaceable or any(path.is_dir() for path in held):
        raise UsageError(f"{out} is no drafter's folder, which alone is replaced; give another folder.")


def _dtype_of(stored: dict[str, files.Stored]) -> str:
    """The type that holds every stored number exactly."""
    found = {_STORED.get(tensor.dtype) for tensor in stored.values() if tensor.dtype.startswith(("F", "BF"))}
    return next(iter(found)) or "float32" if len(found) == 1 else "float32"


def _computed(kept: str, given: str) -> mx.Dtype:
    """One type for both sides of the comparison, as wide as either's where the machine is fast with it."""
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    return mx.float32 if on_cpu or "float32" in (kept, given) else mx.bfloat16


def _probed(folder: Path, name: str, dtype: mx.Dtype) -> Probe:
    """What the drafter in a folder drafts; it is let go again, so that two never lie side by side."""
    found = probe(load_draft(folder, name=name, dtype=dtype))
    mx.clear_cache()
    return found


def _converted(draft: FolderCheckpoint, bits: int | None, dtype: mx.Dtype) -> DraftNetwork:
    try:
        network = load_draft(draft.folder, name=draft.name, bits=None if bits == 16 else bits, dtype=dtype)
    except UsageError as error:  # widths that cannot be packed
        raise UsageError(str(error).replace("draft_bits", "bits")) from error
    if bits == 16:
        expand(network)
        mx.eval(network.parameters())
    return network


@contextmanager
def _beside(out: Path, force: bool) -> Iterator[Path]:
    """A fresh folder on the same disk, which becomes `out` if all goes well and else disappears."""
    ground = next(parent for parent in out.parents if parent.is_dir())
    partial = ground / f".{out.name}.partial-{os.getpid()}"
    old = ground / f".{out.name}.old-{os.getpid()}"
    try:
        with _explained(out):
            partial.mkdir()
        yield partial
        with _explained(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            _check_out(out, force)  # it may have been filled meanwhile
            if out.exists():
                out.rename(old)
            partial.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteError(f"{out} cannot be written: {error.strerror or error}.") from error
    except RuntimeError as error:  # of MLX
        raise WriteError(f"{out} cannot be written ({error}); is the disk full?") from error


def _write(network: DraftNetwork, source: Path, partial: Path, out: Path) -> None:
    need, free = _nbytes(network), shutil.disk_usage(partial).free
    if need > free:
        raise WriteError(
            f"{out} needs {need / GB:.2f} GB and its disk has {free / GB:.2f} GB left; make room, or give "
            "another folder."
        )
    with _explained(out):
        save_draft(network, partial)
        for pattern in _CARRIED:
            for file in source.glob(pattern):
                shutil.copyfile(file, partial / file.name)


def _check_written(network: DraftNetwork, partial: Path, out: Path) -> int:
    """Hold every tensor of the file against the one in memory; gives their number.

    MLX's writer does not report every write that failed; the file's size and content do.
    """
    try:
        files.check_weights(partial, name=out.name)
    except DFlashError as error:
        raise WriteError(f"{out} was not written whole; is the disk full? {error}") from error
    held: dict[str, mx.array] = dict(tree_flatten(network.parameters()))
    read = mx.load(str(partial / "model.safetensors"))
    assert isinstance(read, dict)
    for key in sorted(held.keys() | read.keys()):
        if key not in held or key not in read or not _same(held[key], read[key]):
            raise WriteError(f"{out} does not read back as it was written: {key} differs. Is the disk sound?")
    if (found := _count(network)) != (expected := network.config.num_parameters()):
        raise WriteError(f"{out} has {found:,} parameters, but its config makes {expected:,}.")
    return len(read)


def _same(held: mx.array, read: mx.array) -> bool:
    return held.dtype == read.dtype and mx.array_equal(held, read, equal_nan=True).item() is True


def _nbytes(network: DraftNetwork) -> int:
    arrays: dict[str, mx.array] = dict(tree_flatten(network.parameters()))
    return sum(array.nbytes for array in arrays.values())


def _count(network: DraftNetwork) -> int:
    """Parameters, those that are packed counted as numbers."""
    packed = {
        path: module.scales.size * module.group_size
        for path, module in network.named_modules()
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding))
    }
    total = sum(packed.values())
    arrays: dict[str, mx.array] = dict(tree_flatten(network.parameters()))
    for key, array in arrays.items():
        module, _, leaf = key.rpartition(".")
        if (module not in packed or leaf == "bias") and mx.issubdtype(array.dtype, mx.floating):
            total += array.size
    return total
