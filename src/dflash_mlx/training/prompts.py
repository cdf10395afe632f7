"""What the target is asked, from files: text (a prompt a line) or JSON lines in, messages with a class out.

A JSON line is a string, or an object with one of `messages` (or `conversations`), `prompt`, `instruction` (with
`input`), `question` or `text`, and optionally `class`. A conversation is cut behind its last question, since the target
answers itself. Knows no tokenizer.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mlx.errors import UsageError

GIVEN = "given"  # the class of prompts that name none

_JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
_TEXT_KEYS = ("prompt", "question", "text", "content", "query")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation that waits for an answer."""

    messages: tuple[Mapping[str, str], ...]
    prompt_class: str
    place: str  # where it stands, for messages


def asked(text: str, prompt_class: str, place: str) -> Prompt:
    """A single question."""
    return Prompt(({"role": "user", "content": text},), prompt_class, place)


def read_prompts(paths: Sequence[str | Path]) -> list[Prompt]:
    """Read all prompts of these files, in order.

    Raises:
        UsageError: a file that is missing, empty or broken; a broken line is named.
    """
    found: list[Prompt] = []
    for path in map(Path, paths):
        before = len(found)
        found += _read_file(path)
        if len(found) == before:
            raise UsageError(f"{path} holds no prompts; expected one a line, as text or as JSON.")
    return found


def prompts_of_rows(rows: Sequence[object], name: str) -> list[Prompt]:
    """Read prompts from rows of a data set, in the forms of a JSON line.

    Raises:
        UsageError: a row that is none of them, by its number.
    """
    return list(_entries(rows, f"{name}, row"))


def digest(prompts: Iterable[Prompt]) -> str:
    """The same for the same prompts in the same order."""
    hashed = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        hashed.update(json.dumps([prompt.messages, prompt.prompt_class], sort_keys=True).encode())
    return hashed.hexdigest()


def _read_file(path: Path) -> Iterator[Prompt]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}; expected prompts, one a line.") from None
    except UnicodeDecodeError as error:
        number = path.read_bytes()[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}, line {number}: this is not UTF-8 text; convert the file first.") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    if path.suffix == ".json" and text.lstrip().startswith("["):
        yield from _array(path, text)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        if path.suffix not in _JSON_ENDINGS:
            yield asked(line.strip(), GIVEN, place)
            continue
        try:
            yield _prompt(json.loads(line), place)
        except json.JSONDecodeError as error:
            raise UsageError(f"{place}: this is no JSON ({error.msg} at column {error.colno}).") from None
        except ValueError as error:
            raise UsageError(f"{place}: {error}.") from None


def _array(path: Path, text: str) -> Iterator[Prompt]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}, line {error.lineno}: this is no JSON ({error.msg}).") from None
    yield from _entries(rows, f"{path}, entry")


def _entries(rows: Iterable[object], name: str) -> Iterator[Prompt]:
    for number, row in enumerate(rows, start=1):
        place = f"{name} {number}"
        try:
            yield _prompt(row, place)
        except ValueError as error:
            raise UsageError(f"{place}: {error}.") from None


def _prompt(row: object, place: str) -> Prompt:
    """One entry.

    Raises:
        ValueError: saying what is wrong with it.
    """
    if isinstance(row, str):
        return asked(_said(row, "the prompt"), GIVEN, place)
    if not isinstance(row, dict):
        raise ValueError(f"a text or an object was expected, this is a {type(row).__name__}")
    prompt_class = row.get("class", GIVEN)
    if not isinstance(prompt_class, str) or not prompt_class.strip():
        raise ValueError(f"class is {prompt_class!r}, a word was expected")
    for key in ("messages", "conversations", "conversation"):
        if key in row:
            return Prompt(_conversation(row[key], key), prompt_class, place)
    if "instruction" in row:
        text, more = _said(row["instruction"], "instruction"), row.get("input")
        return asked(
            f"{text}\n\n{more}" if isinstance(more, str) and more.strip() else text, prompt_class, place
        )
    for key in _TEXT_KEYS:
        if key in row:
            return asked(_said(row[key], key), prompt_class, place)
    raise ValueError(
        f"none of messages, instruction, {', '.join(_TEXT_KEYS)} is there, "
        f"only {', '.join(map(str, row)) or 'nothing'}"
    )


def _conversation(turns: Any, key: str) -> tuple[Mapping[str, str], ...]:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{key} must be a list of messages, not empty")
    messages: list[tuple[str, object]] = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise ValueError(f"{key} holds a {type(turn).__name__}, messages were expected")
        role = turn.get("role", turn.get("from"))
        if not isinstance(role, str):
            raise ValueError(f"a message of {key} has no role")
        messages.append((_ROLES.get(role, role), turn["content"] if "content" in turn else turn.get("value")))
    while messages and messages[-1][0] != "user":
        messages.pop()  # whatever it holds
    if not messages:
        raise ValueError(f"{key} has no message of a user")
    return tuple({"role": role, "content": _said(said, f"the {role} message")} for role, said in messages)


def _said(text: object, what: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{what} is {text!r:.40}, a text was expected")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{what} holds half of a character pair, \\u escapes that stand for no text"
        ) from None
    return text
