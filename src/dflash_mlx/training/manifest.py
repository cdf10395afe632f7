"""The folder of gathered answers: shards of JSON lines, and a manifest that says whose they are and how they were made.

A shard has its name only once it is whole, so what is there counts, whoever stopped and when. The manifest can be
counted again from the shards; what it alone holds is the target and the recipe.
"""

import errno
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_mlx.errors import UsageError, WriteError
from dflash_mlx.training.identity import Identity
from dflash_mlx.training.records import Answer, is_held_out, read_answers

FORMAT = "dflash-mlx answers 1"
MANIFEST = "manifest.json"


@dataclass(slots=True)
class Counts:
    """What a folder holds; grows with `add`."""

    shards: int = 0
    answers: int = 0
    held_out: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    sampled: int = 0
    stopped: int = 0  # came to a stop id of themselves
    by_class: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, answers: Iterable[Answer], stop_ids: Sequence[int]) -> None:
        """Count one more shard."""
        self.shards += 1
        for answer in answers:
            held = is_held_out(answer)
            self.answers += 1
            self.held_out += held
            self.prompt_tokens += len(answer.prompt_ids)
            self.answer_tokens += len(answer.answer_ids)
            self.sampled += bool(answer.temperature)
            self.stopped += answer.answer_ids[-1] in stop_ids
            row = self.by_class.setdefault(answer.prompt_class or "unknown", Counter())
            row.update(answers=1, held_out=int(held), answer_tokens=len(answer.answer_ids))

    def record(self) -> dict[str, Any]:
        """As JSON holds it."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "by_class"}
        return plain | {"by_class": {kind: dict(row) for kind, row in sorted(self.by_class.items())}}


class AnswerFolder:
    """The shards of one target under one recipe.

    Args:
        path: the folder, made if need be.
        identity: whose answers these are.
        recipe: how they are made; a folder made otherwise is refused.

    Raises:
        UsageError: the folder holds something else, answers of another target, or of another recipe.
        WriteError: it cannot be made.
    """

    def __init__(self, path: Path, identity: Identity, recipe: Mapping[str, Any]):
        self.path = path
        self._about = {"format": FORMAT, "target": identity.record(), "recipe": dict(recipe)}
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError(f"The folder {path} cannot be made: {error.strerror}.") from None
        if (path / MANIFEST).exists():
            self._check(identity, recipe)
        elif self.shards():
            raise UsageError(
                f"{path} holds answers without a {MANIFEST}, so nobody knows whose they are; give another folder."
            )

    def shards(self) -> list[Path]:
        """The whole shards, in order, without a gap."""
        found: list[Path] = []
        while (shard := self.path / f"answers-{len(found):05}.jsonl").exists():
            found.append(shard)
        return found

    def read(self, stop_ids: Sequence[int]) -> tuple[Counts, set[int]]:
        """What is there already, and the hashes of all prompts."""
        counts, seen = Counts(), set[int]()
        for shard in self.shards():
            answers = list(read_answers([shard])) if shard.stat().st_size else []
            counts.add(answers, stop_ids)
            seen.update(hash(answer.prompt_ids) for answer in answers)
        return counts, seen

    def write(self, answers: Sequence[Answer], counts: Counts, stop_ids: Sequence[int]) -> None:
        """Add a shard, and count it.

        Raises:
            WriteError: it cannot be written; what was there before is untouched.
        """
        text = "".join(f"{answer.line()}\n" for answer in answers)
        self._put(self.path / f"answers-{counts.shards:05}.jsonl", text)
        counts.add(answers, stop_ids)
        self._put(
            self.path / MANIFEST, json.dumps({**self._about, "counts": counts.record()}, indent=1) + "\n"
        )

    def start(self, counts: Counts) -> None:
        """Write the manifest before the first shard, so that the folder is this target's from the start."""
        self._put(
            self.path / MANIFEST, json.dumps({**self._about, "counts": counts.record()}, indent=1) + "\n"
        )

    def _put(self, path: Path, text: str) -> None:
        partial = path.with_name(f"{path.name}.partial")
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            why = "the disk is full" if error.errno == errno.ENOSPC else str(error.strerror)
            raise WriteError(
                f"{path} cannot be written: {why}. The {len(self.shards())} shards before it are whole; make room and "
                "run the same command again, it goes on behind them."
            ) from None

    def _check(self, identity: Identity, recipe: Mapping[str, Any]) -> None:
        found = read_manifest(self.path)
        theirs = Identity(**found["target"])
        if wrong := identity.differences(theirs):
            raise UsageError(
                f"{self.path} holds answers of {theirs.name}, and this run is for {identity.name}: "
                f"{' and '.join(wrong)} differ. Give another folder."
            )
        for name, value in json.loads(json.dumps(dict(recipe))).items():
            if (other := found["recipe"].get(name)) != value:
                raise UsageError(
                    f"{self.path} was begun with {name} {_short(other)}, and this run has {_short(value)}; "
                    "give the same again, or another folder."
                )


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder of answers.

    Raises:
        UsageError: none there, or one that is not readable.
    """
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise UsageError(f"{path} is of another version ({found['format']}, expected {FORMAT}).")
        Identity(**found["target"]), found["recipe"], found["counts"]
    except FileNotFoundError:
        raise UsageError(f"{folder} has no {MANIFEST}; is it a folder of the data stage?") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} cannot be read as a manifest ({error}); give another folder.") from None
    return dict(found)


def _short(value: object) -> str:
    return "unset" if value is None else f"{value!r:.60}"
