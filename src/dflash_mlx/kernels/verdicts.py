"""The file of what was found about kernels on this machine.

In: verdicts. Out: the verdicts of one machine, also those that other processes added meanwhile. Knows no
arrays and takes no decision. A file that cannot be read counts as empty; a write replaces the file in one
step under a lock, so that a reader sees one whole file and no process loses another's lines.
"""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

# failed: not for a fault of the text (memory, for one); holds for the process and is not filed
Outcome = Literal["faster", "slow", "wrong", "unbuilt", "failed", "unraced"]

_VERSION = 1


class Machine(NamedTuple):
    """What a verdict holds for."""

    chip: str
    system: str
    mlx: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found for one kernel text and shape class."""

    kernel: str
    digest: str
    shape_class: str
    outcome: Outcome
    why: str
    stock_ms: float | None = None  # one call, median
    kernel_ms: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What it is looked up by."""
        return self.kernel, self.digest, self.shape_class


def read(path: Path, machine: Machine) -> tuple[list[Verdict], str | None]:
    """The verdicts for this machine, and a sentence about the file when it could not be used."""
    lines, trouble = _read_all(path)
    return [verdict for where, verdict in lines if where == machine], trouble


def merge(path: Path, machine: Machine, fresh: list[Verdict]) -> list[Verdict]:
    """Add verdicts to the file and return those of this machine that it then holds.

    Where another process was first, its verdict stays (except that a timed one replaces one that was not
    timed), so that all processes go on with the same.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        kept = {(where, verdict.key): verdict for where, verdict in _read_all(path)[0]}
        for verdict in fresh:
            earlier = kept.get((machine, verdict.key))
            if earlier is None or earlier.outcome == "unraced":
                kept[machine, verdict.key] = verdict
        lines = [{**where._asdict(), **asdict(verdict)} for (where, _), verdict in kept.items()]
        _replace(path, json.dumps({"version": _VERSION, "verdicts": lines}, indent=1))
    return [verdict for (where, _), verdict in kept.items() if where == machine]


def _read_all(path: Path) -> tuple[list[tuple[Machine, Verdict]], str | None]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], None
    except (OSError, UnicodeDecodeError) as failure:
        return [], f"The kernel measurements in {path} cannot be read ({failure}) and are made again."
    try:
        content = json.loads(text)
        if content["version"] != _VERSION:
            return [], None
        lines = content["verdicts"]
    except (ValueError, KeyError, TypeError):
        return [], f"The kernel measurements in {path} are damaged and are made again."
    found = [_line(line) for line in lines] if isinstance(lines, list) else [None]
    whole = [line for line in found if line is not None]
    if len(whole) < len(found):
        return whole, f"Some kernel measurements in {path} are damaged and are made again."
    return whole, None


def _line(line: object) -> tuple[Machine, Verdict] | None:
    if not isinstance(line, dict):
        return None
    texts = [line.get(name) for name in (*Machine._fields, "kernel", "digest", "shape_class", "why")]
    times = [line.get("stock_ms"), line.get("kernel_ms")]
    if not all(isinstance(text, str) for text in texts) or line.get("outcome") not in get_args(Outcome):
        return None
    if not all(ms is None or (isinstance(ms, int | float) and not isinstance(ms, bool)) for ms in times):
        return None
    chip, system, mlx, kernel, digest, shape_class, why = texts
    verdict = Verdict(kernel, digest, shape_class, line["outcome"], why, times[0], times[1])  # type: ignore[arg-type]
    return Machine(chip, system, mlx), verdict  # type: ignore[arg-type]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # the lock is a file of its own: the other one is replaced, and a lock on it would go with it
    with open(path.with_name(path.name + ".lock"), "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
