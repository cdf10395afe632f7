"""A conversation in one safetensors file: messages with their ids, who held it, and what cache and context hold.

Comes in: plain data and arrays. Goes out: a file that only its owner can read, and the same data again. Knows no
model; whether a file fits a pair is asked of its header.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.errors import UsageError

FORMAT = "dflash-mlx conversation 1"
_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class Holder:
    """What held a conversation; its state fits no other."""

    target: str
    draft: str | None
    dtype: str
    versions: str


@dataclass(frozen=True, slots=True)
class Saved:
    """What a file holds."""

    messages: list[dict[str, Any]]
    holder: Holder
    ids: tuple[int, ...]  # those that the rows stand for; () without rows
    cache: Mapping[str, mx.array]
    context: Mapping[str, mx.array]


def write(path: str | Path, saved: Saved) -> Path:
    """Write a file, its suffix added where it has another; gives its name.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(path).expanduser()
    path = path if path.suffix == _SUFFIX else path.with_name(path.name + _SUFFIX)
    arrays = {"ids": mx.array(saved.ids or [-1], mx.int32)}
    for part in ("cache", "context"):
        arrays |= {f"{part}.{name}": array for name, array in getattr(saved, part).items()}
    header = {
        "format": FORMAT,
        "messages": json.dumps(saved.messages),
        "holder": json.dumps(asdict(saved.holder)),
    }
    # A new file beside the old one: whoever looks finds a whole one, and its mode was never another.
    fresh = path.with_name(f".{path.stem}.{os.getpid()}{_SUFFIX}")
    os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        mx.save_safetensors(str(fresh), arrays, header)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    return path


def read(path: str | Path, *, target: str) -> Saved:
    """Read a file.

    Raises:
        UsageError: there is none, it is no conversation, or one with another target than `target`.
    """
    path = Path(path).expanduser()
    if not path.exists() and path.suffix != _SUFFIX:
        path = path.with_name(path.name + _SUFFIX)
    if not path.is_file():
        raise UsageError(f"There is no file {path}; expected a saved conversation.")
    try:
        arrays, header = _load(path)
        if header.get("format") != FORMAT:
            raise UsageError(
                f"{path} is no conversation of this version (expected {FORMAT!r} in its header)."
            )
        messages, holder = json.loads(header["messages"]), Holder(**json.loads(header["holder"]))
        mx.eval(list(arrays.values()))
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} cannot be read as a saved conversation: {error}.") from None
    if holder.target != target:
        raise UsageError(f"{path} is a conversation with {holder.target}; this one is with {target}.")
    ids: list[int] = arrays.pop("ids").tolist()  # type: ignore[assignment]
    return Saved(
        messages,
        holder,
        tuple(i for i in ids if i >= 0),
        _part("cache.", arrays),
        _part("context.", arrays),
    )


def spoken(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as JSON holds them."""
    return [
        {name: list(value) if isinstance(value, tuple) else value for name, value in message.items()}
        for message in messages
    ]


def _load(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    loaded: Any = mx.load(
        str(path), format="safetensors", return_metadata=True
    )  # typed as any of what it may give
    arrays, header = loaded
    return arrays, header


def _part(prefix: str, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
