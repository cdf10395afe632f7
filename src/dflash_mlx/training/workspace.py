"""The folder of a run: which stage keeps what where, and the figures of training as lines of a log.

data/        answers-*.jsonl, manifest.json
train/       checkpoints/, log.jsonl, run.json
drafter/     config.json, model.safetensors, README.md: what DFlashGenerator loads
figures/     *.svg
eval.json
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mlx.errors import UsageError, WriteError


@dataclass(frozen=True, slots=True)
class Workspace:
    """Paths of one run."""

    root: Path

    @property
    def data(self) -> Path:
        """Answers and their manifest."""
        return self.root / "data"

    @property
    def train(self) -> Path:
        """Checkpoints, features, log."""
        return self.root / "train"

    @property
    def checkpoints(self) -> Path:
        """States that a stopped run goes on from."""
        return self.train / "checkpoints"

    @property
    def log(self) -> Path:
        """Figures of training, a line each."""
        return self.train / "log.jsonl"

    @property
    def run(self) -> Path:
        """What the training was asked for, and how it ended."""
        return self.train / "run.json"

    @property
    def drafter(self) -> Path:
        """The drafter's own folder."""
        return self.root / "drafter"

    @property
    def figures(self) -> Path:
        """Pictures."""
        return self.root / "figures"

    @property
    def evaluation(self) -> Path:
        """Everything measured."""
        return self.root / "eval.json"

    def check(self) -> None:
        """Refuse a folder that is somebody else's.

        Raises:
            UsageError: it is a file, or holds other things than a run.
        """
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"{self.root} is a file; give a folder.")
        known = {path.name for path in (self.data, self.train, self.drafter, self.figures, self.evaluation)}
        found = sorted(path.name for path in self.root.iterdir()) if self.root.exists() else []
        if others := [name for name in found if name not in known and not name.startswith(".")]:
            raise UsageError(
                f"{self.root} holds {others[0]}, which is no part of a training run; give a folder of its own."
            )


def write_file(path: Path, text: str) -> None:
    """Write a small file in one step.

    Raises:
        WriteError: it cannot be written; what was there before stays.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise WriteError(f"{path} cannot be written: {error.strerror}.") from None


def read_json(path: Path) -> dict[str, Any] | None:
    """A small file of a run; None where there is none.

    Raises:
        UsageError: it is damaged.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read ({error}); remove it, and its stage is done again."
        ) from None


class Log:
    """Lines of figures that grow with a run; a resumed run writes over what came after its checkpoint."""

    def __init__(self, path: Path):
        self.path = path

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line.

        Raises:
            WriteError: it cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise WriteError(f"{self.path} cannot be written: {error.strerror}.") from None

    def read(self) -> list[dict[str, Any]]:
        """The lines by step; of a step that was run twice the later one."""
        found: list[dict[str, Any]] = []
        for line in self._lines():
            while found and found[-1]["step"] >= line["step"]:
                found.pop()
            found.append(line)
        return found

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Every whole line; the last one may be broken where a run was killed."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        for line in text.splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue
