"""A conversation in one safetensors file: messages with their ids, who held it, and what cache and context hold.

Comes in: plain data and arrays. Goes out: a file that only its owner can read, and the same data again. Knows no
model; whether a file fits a pair is asked of its header.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from dflash_mlx.errors import UsageError

FORMAT = "dflash-mlx conversation 1"
_SUFFIX = ".safetensors"
_SAID = {
    "target": "is of {}, and this is {}",
    "draft": "is of the drafter {}, and this one is {}",
    "weights": "is of models of {} bytes, and these have {}",
    "dtype": "was computed in {}, and this is {}",
    "kv_bits": "has kv_bits {}, and these are {}",
    "draft_window": "has draft_window {}, and this is {}",
    "versions": "was written with {}, and these are {}",
}


@dataclass(frozen=True, slots=True)
class Holder:
    """What held a conversation; what is kept of it fits no other."""

    target: str
    draft: str | None
    weights: int  # bytes of both
    dtype: str
    kv_bits: int | None
    draft_window: int | None
    versions: str


class Held(NamedTuple):
    """What cache and context hold of a conversation."""

    ids: tuple[int, ...]
    lengths: tuple[int, ...]  # of the ids: the whole, then places that the state can be brought back to
    cache: Mapping[str, mx.array]
    context: Mapping[str, mx.array]


@dataclass(frozen=True, slots=True)
class Saved:
    """What a file holds."""

    messages: list[dict[str, Any]]
    holder: Holder
    held: Held | None


def write(path: str | Path, saved: Saved) -> Path:
    """Write a file, its suffix added where it has another; gives its name.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(path).expanduser()
    path = path if path.suffix == _SUFFIX else path.with_name(path.name + _SUFFIX)
    held = saved.held or Held((), (), {}, {})
    arrays = {name: mx.array(getattr(held, name) or [-1], mx.int32) for name in ("ids", "lengths")}
    for part in ("cache", "context"):
        arrays |= {f"{part}.{name}": array for name, array in getattr(held, part).items()}
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


def read(path: str | Path) -> Saved:
    """Read a file.

    Raises:
        UsageError: there is none, or it is no conversation.
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
    ids, lengths = (_whole(arrays[name]) for name in ("ids", "lengths"))
    held = Held(ids, lengths, _part("cache.", arrays), _part("context.", arrays)) if ids else None
    return Saved(messages, holder, held)


def difference(then: Holder, now: Holder) -> str | None:
    """In what two holders differ, as the end of a sentence; None where they do not."""
    for name, said in _SAID.items():
        was, is_ = getattr(then, name), getattr(now, name)
        if was != is_:
            return said.format(*("none" if value is None else value for value in (was, is_)))
    return None


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


def _whole(numbers: mx.array) -> tuple[int, ...]:
    """Whole numbers [n]; an empty array cannot be written, so that -1 stands for none."""
    values: list[int] = numbers.tolist()  # type: ignore[assignment]
    return tuple(value for value in values if value >= 0)
