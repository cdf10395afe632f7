"""Answers of a target as JSON lines: files in, `Answer` records out, and back to lines.

A line is `{"prompt_ids": [...], "answer_ids": [...], "temperature": 0.0, "class": "code"}`: the prompt as the target
read it, template included, and what the target answered, its stop id included where it came to one. `temperature`
is null where it is not known, `class` may be missing. Knows no tokenizer and no model.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mlx.errors import UsageError

HELD_OUT_EVERY = 50


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt and the target's own answer to it, as token ids."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    temperature: float | None = None  # None: not known
    prompt_class: str | None = None  # such as "code"; the file's "class"

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and answer in one sequence."""
        return self.prompt_ids + self.answer_ids

    def line(self) -> str:
        """The record as a line of a file, without its end."""
        fields: dict[str, Any] = {
            "prompt_ids": list(self.prompt_ids),
            "answer_ids": list(self.answer_ids),
            "temperature": self.temperature,
        }
        if self.prompt_class is not None:
            fields["class"] = self.prompt_class
        return json.dumps(fields, separators=(",", ":"))


def read_answers(paths: Iterable[str | Path], *, growing: bool = False) -> Iterator[Answer]:
    """Read the answers of files and of the `*.jsonl` files of folders, in the order of names.

    Args:
        paths: files and folders.
        growing: leave out a last line that has no end yet, as a file has that is being written.

    Raises:
        UsageError: nothing there, a file without answers, or a broken line, named by file and number.
    """
    found = 0
    for path in paths:
        for file in _files(Path(path)):
            count = 0
            for answer in _read_file(file, growing=growing):
                yield answer
                count += 1
            if not count and not growing:
                raise UsageError(f"{file} holds no answers; a JSON object a line is expected.")
            found += count
    if not found:
        raise UsageError(
            "There are no answers to read; run the data stage first, or name a file of JSON lines."
        )


def is_held_out(answer: Answer, every: int = HELD_OUT_EVERY) -> bool:
    """Whether the answer is kept from training: every 50th prompt, told by a hash of its ids alone.

    So the same prompt is held out in every file, at every temperature and in every run.
    """
    digest = hashlib.blake2b(array("q", answer.prompt_ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % every == 0


def _files(path: Path) -> Sequence[Path]:
    if not path.exists():
        raise UsageError(
            f"{path} does not exist; a file of JSON lines or a folder of such files is expected."
        )
    if path.is_dir():
        return sorted(path.glob("*.jsonl"))
    return [path]


def _read_file(file: Path, *, growing: bool) -> Iterator[Answer]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip() or (growing and not line.endswith(b"\n")):
                continue
            try:
                yield parse_answer(line)
            except ValueError as error:
                raise UsageError(f"{file}, line {number}: {error}.") from error


def parse_answer(line: str | bytes) -> Answer:
    """One line to its record.

    Raises:
        ValueError: saying what is wrong with it.
    """
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"this is no JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError("a JSON object was expected")
    temperature, prompt_class = fields.get("temperature"), fields.get("class")
    if temperature is not None and (
        isinstance(temperature, bool) or not isinstance(temperature, (int, float))
    ):
        raise ValueError(f"temperature is {temperature!r}, a number or null was expected")
    if prompt_class is not None and not isinstance(prompt_class, str):
        raise ValueError(f"class is {prompt_class!r}, a word was expected")
    return Answer(
        _ids(fields, "prompt_ids"),
        _ids(fields, "answer_ids"),
        None if temperature is None else float(temperature),
        prompt_class,
    )


def _ids(fields: dict[str, Any], key: str) -> tuple[int, ...]:
    ids = fields.get(key)
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{key} must be a list of token ids, not empty")
    return tuple(ids)
