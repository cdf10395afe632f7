"""The files of measured costs, one for each key. Times nothing.

A file is written whole and once: of several processes that measured at the same time the first one's figures
stay, so that all go on with the same. A file that cannot be read counts as absent and is replaced.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflash_mlx.policy import Depth

_VERSION = 1


def file_name(key: Mapping[str, str]) -> str:
    """Where the costs of this key are kept."""
    text = json.dumps(sorted(key.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16] + ".json"


def read(path: Path, key: Mapping[str, str]) -> list[Depth] | None:
    """The costs in a file; None where there is none, or one that is damaged or holds another key's."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["version"] != _VERSION or record["key"] != dict(key):
            return None
        depths = [_depth(entry) for entry in record["depths"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return depths or None


def every(folder: Path) -> list[tuple[dict[str, str], list[Depth]]]:
    """The key and the costs in each file of a folder, in the order of their keys; no other file counts."""
    found = []
    for path in folder.glob("*.json"):
        try:
            key = json.loads(path.read_text(encoding="utf-8"))["key"]
            depths = read(path, key)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if depths is not None:
            found.append((dict(key), depths))
    return sorted(found, key=lambda entry: sorted(entry[0].items()))


def write(path: Path, key: Mapping[str, str], depths: Sequence[Depth], *, again: bool = False) -> list[Depth]:
    """Keep the costs, unless another process was first; returns those that are then kept.

    Args:
        path: where.
        key: what the costs hold for.
        depths: the costs.
        again: replace what is there.

    Raises:
        OSError: the folder cannot be written.
    """
    entries = [{**depth._asdict(), "verify": sorted(depth.verify.items())} for depth in depths]
    text = json.dumps({"version": _VERSION, "key": dict(key), "depths": entries}, indent=1) + "\n"
    keep(path, text, good=lambda: not again and read(path, key) is not None)
    return read(path, key) or list(depths)


def keep(path: Path, text: str, *, good: Callable[[], bool]) -> None:
    """Write a file whole, unless there is one that is `good`.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        if not good():
            path.unlink(missing_ok=True)
        with suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)


def _depth(entry: dict[str, Any]) -> Depth:
    """An entry as a depth; `Any` because it is what JSON gives.

    Raises:
        ValueError, TypeError, KeyError: it is not one.
    """
    plain, draft, look = (float(entry[name]) for name in ("plain", "draft", "look"))
    verify = {int(rows): float(seconds) for rows, seconds in entry["verify"]}
    figures = [plain, draft, look, *verify.values()]
    if not verify or min(verify) < 1 or not all(0 <= figure < 1e6 for figure in figures) or plain == 0:
        raise ValueError(f"no costs: {entry}")
    return Depth(int(entry["tokens"]), plain, draft, look, verify)
