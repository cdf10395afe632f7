"""The state of a training run as folders: arrays and a few facts in, the newest whole one out.

A checkpoint is written beside its place and renamed, so that a folder of its name is complete; the newest two are
kept. Knows no network and no data.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from dflash_mlx.errors import CheckpointError, WriteError

_KEPT = 2
_ARRAYS, _FACTS = "state.safetensors", "state.json"


class Checkpoint(NamedTuple):
    """What a run goes on from."""

    arrays: dict[str, mx.array]
    facts: dict[str, Any]
    path: Path


def save_checkpoint(
    folder: Path, step: int, arrays: Mapping[str, mx.array], facts: Mapping[str, Any]
) -> Path:
    """Write the state after `step` steps into a folder of its own under `folder`.

    Raises:
        WriteError: the disk is full, say; earlier checkpoints stay.
    """
    whole, partial = folder / f"step-{step:07d}", folder / "partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _write(partial, arrays, facts)
        if whole.exists():
            shutil.rmtree(whole)
        partial.rename(whole)
        for old in _found(folder)[:-_KEPT]:
            shutil.rmtree(old)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise WriteError(
            f"The checkpoint of step {step} cannot be written to {folder}: {error}. What was saved before is kept; "
            "make room and resume."
        ) from error
    return whole


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint under `folder`; None where there is none.

    Raises:
        CheckpointError: it cannot be read.
    """
    found = _found(folder)
    if not found:
        return None
    path = found[-1]
    try:
        arrays = mx.load(str(path / _ARRAYS))
        assert isinstance(arrays, dict)
        mx.eval(arrays)
        facts = json.loads((path / _FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"The checkpoint {path} cannot be read ({error}); remove it, and the one before is taken."
        ) from error
    return Checkpoint(arrays, facts, path)


def _write(folder: Path, arrays: Mapping[str, mx.array], facts: Mapping[str, Any]) -> None:
    mx.save_safetensors(str(folder / _ARRAYS), dict(arrays))
    (folder / _FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    least = sum(array.nbytes for array in arrays.values())
    with (folder / _ARRAYS).open("rb") as file:
        os.fsync(file.fileno())
        if os.fstat(file.fileno()).st_size < least:
            raise OSError("the file is shorter than what was written")


def _found(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if (path / _FACTS).exists())
