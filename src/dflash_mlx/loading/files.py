"""Checkpoint files on disk, checked before anything is loaded: a folder in, nothing out but an error.

Reads JSON files and the headers of safetensors, never the weights themselves, so it costs milliseconds whatever the
size. Knows the safetensors layout: 8 bytes of header length, a JSON header with each tensor's byte range, the data.
"""

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

from dflash_mlx.errors import CheckpointError

WEIGHTS = "model*.safetensors"  # what mlx-lm reads
INDEX = "model.safetensors.index.json"
POINTER = b"version https://git-lfs"
MAX_HEADER = 100_000_000  # bytes, the limit of the format's own library


class Stored(NamedTuple):
    """One tensor as its file describes it."""

    dtype: str  # in the words of safetensors: BF16, F32, U32
    shape: tuple[int, ...]
    nbytes: int


def read_json(path: Path, *, name: str) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint called `name`.

    Raises:
        CheckpointError: missing, a pointer, no JSON, or JSON that is no object.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{name} has no {path.name} (looked in {path.parent}).") from None
    except OSError as error:
        raise CheckpointError(f"{path.name} of {name} cannot be read: {error.strerror}.") from error
    _refuse_pointer(path, raw, name)
    try:
        found = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(
            f"{path.name} of {name} is not valid JSON ({error}; {len(raw):,} bytes); fetch the file again."
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{path.name} of {name} holds a JSON {type(found).__name__}, expected an object."
        )
    return found


def check_weights(folder: Path, *, name: str) -> int:
    """Check every weights file of a checkpoint against its header and the index; gives their bytes.

    Raises:
        CheckpointError: naming the file, what was found and what was expected.
    """
    files = {file.name: file for file in sorted(folder.glob(WEIGHTS))}
    expected: dict[str, list[str]] = {}
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX, name=name).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{INDEX} of {name} has no weight_map; fetch the file again.")
        for tensor, shard in weight_map.items():
            expected.setdefault(shard, []).append(tensor)
        if missing := sorted(set(expected) - set(files)):
            raise CheckpointError(
                f"{name} lacks {_some(missing)}: its index names {len(expected)} files and {folder} holds "
                f"{len(set(expected) & set(files))} of them. Fetch the rest."
            )
    elif not files:
        raise CheckpointError(f"{name} has no {WEIGHTS} (looked in {folder}); only safetensors are read.")
    size = 0
    for file in files.values():
        header = _checked_header(file, name)
        size += file.stat().st_size
        if absent := sorted(set(expected.get(file.name, ())) - set(header)):
            raise CheckpointError(
                f"{file.name} of {name} lacks {_some(absent)}, which the index places there; "
                "the files are of different versions. Fetch them again."
            )
    return size


def tensors(folder: Path, *, name: str) -> dict[str, Stored]:
    """Every tensor in the weights files of a checkpoint, from their headers; {} where there are no files.

    Raises:
        CheckpointError: a file that is truncated or no safetensors.
    """
    found: dict[str, Stored] = {}
    for file in sorted(folder.glob(WEIGHTS)):
        header = _checked_header(file, name)
        for key, entry in header.items():
            if key != "__metadata__":
                start, end = entry["data_offsets"]
                found[key] = Stored(str(entry["dtype"]), tuple(entry["shape"]), end - start)
    return found


def complete(folder: Path, *, tokenizer: bool) -> bool:
    """Whether a folder holds config, weights files (all that an index names) and, if asked, a tokenizer."""
    if not (folder / "config.json").exists():
        return False
    if tokenizer and not any(
        (folder / n).exists() for n in ("tokenizer.json", "tokenizer.model", "vocab.json")
    ):
        return False
    try:
        shards = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
    except FileNotFoundError:
        return any(folder.glob(WEIGHTS))
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / shard).exists() for shard in shards)


def _checked_header(path: Path, name: str) -> dict[str, Any]:
    """The header of one safetensors file whose size is what the header says."""
    size = path.stat().st_size
    label = f"{path.name} of {name}"
    if size == 0:
        raise CheckpointError(f"{label} is empty (0 bytes); fetch it again.")
    with path.open("rb") as file:
        start = file.read(200)
        _refuse_pointer(path, start, name)
        length = struct.unpack("<Q", start[:8])[0] if size >= 8 else 0
        if not 2 <= length <= MAX_HEADER or start[8:9] != b"{":
            raise CheckpointError(f"{label} is not a safetensors file (it begins with {start[:8]!r}).")
        if 8 + length > size:
            raise CheckpointError(
                f"{label} is truncated inside its header: {size:,} bytes, at least {8 + length:,} expected. "
                "Fetch it again."
            )
        file.seek(8)
        raw = file.read(length)
    try:
        header = json.loads(raw)
        end = max((int(t["data_offsets"][1]) for k, t in header.items() if k != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{label} has a header that is not readable JSON; fetch it again.") from error
    if size != (expected := 8 + length + end):
        verb = "is truncated" if size < expected else "has bytes after its end"
        raise CheckpointError(
            f"{label} {verb}: {size:,} bytes, {expected:,} expected by its header. Fetch it again."
        )
    return dict(header)


def _refuse_pointer(path: Path, start: bytes, name: str) -> None:
    if start.startswith(POINTER):
        size = next(
            (line[5:].decode() for line in start.splitlines() if line.startswith(b"size ")),
            "an unknown number of",
        )
        raise CheckpointError(
            f"{path.name} of {name} is a Git LFS pointer of {path.stat().st_size} bytes instead of the file of {size} "
            "bytes; run `git lfs pull` there, or give the hub id."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
