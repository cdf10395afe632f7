"""A conversation as people hold one: a text in, the answer in chunks; what was said is remembered, and can be undone.

Comes in: a runner that answers messages. Goes out: chunks and a history. Knows no model and no terminal; what is
read again and what is not is the business of `conversation`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dflash_mlx.core import Chunk

Message = dict[str, Any]


class Loaded(NamedTuple):
    """Messages of a file, and a sentence where the state beside them does not fit."""

    messages: list[Message]
    note: str | None


class Runner(Protocol):
    """What a chat asks of a generator."""

    def stream(self, prompt: Sequence[Message], **options: Any) -> Iterator[Chunk]:
        """Answer messages, chunk by chunk."""

    def answer_ids(self, emitted: Sequence[int], text: str) -> tuple[int, ...]:
        """The emitted ids that make up this text."""

    def save_chat(self, path: str | Path, messages: Sequence[Message]) -> Path:
        """Write messages, and the state that holds them, to a file."""

    def load_chat(self, path: str | Path) -> Loaded:
        """Read messages, and the state that holds them, from a file."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and as much of its answer as was given."""

    said: str
    answer: str
    ids: tuple[int, ...] | None  # of the answer, as emitted; None where only its words are known


class Chat:
    """One conversation.

    Args:
        runner: answers.
        system: the system message.
        **options: of `DFlashGenerator.stream`, for every turn.
    """

    def __init__(self, runner: Runner, system: str | None = None, **options: Any):
        self.system = system
        self.options = options
        self.turns: list[Turn] = []
        self._runner = runner

    @property
    def history(self) -> list[Message]:
        """What was said so far, as messages."""
        return [
            {"role": message["role"], "content": message["content"]} for message in self._messages(self.turns)
        ]

    def send(self, text: str, **options: Any) -> Iterator[Chunk]:
        """Say something and stream the answer; it may be left at any chunk, and what was given of it is kept.

        A turn without any answer, because it failed or was left at once, is forgotten.

        Args:
            text: of the user.
            **options: for this turn, over those of the chat.

        Raises:
            UsageError: an option or a text that cannot be honoured, before any model work.
        """
        before = list(self.turns)
        asked = [*self._messages(before), {"role": "user", "content": text}]
        return self._recorded(self._runner.stream(asked, **{**self.options, **options}), before, text)

    def undo(self) -> str | None:
        """Forget the last question and its answer; gives the question, None where there is none."""
        return self.turns.pop().said if self.turns else None

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.turns.clear()

    def save(self, path: str | Path) -> Path:
        """Write the conversation to a safetensors file that only its owner can read; gives its whole name.

        Raises:
            OSError: it cannot be written.
        """
        return self._runner.save_chat(path, self._messages(self.turns))

    def load(self, path: str | Path) -> str | None:
        """Take up the conversation of a file in place of this one, its system message included.

        Returns:
            None where the next turn reads only what is new; a sentence where the file's state is of another pair,
            version, type or `kv_bits`, so that only the messages are taken up and all of them will be read again.

        Raises:
            UsageError: no such file, or one that is no conversation.
        """
        messages, note = self._runner.load_chat(path)
        first = messages[0] if messages else {}
        self.system = first["content"] if first.get("role") == "system" else None
        spoken = messages[self.system is not None :]
        self.turns = [
            Turn(question["content"], answer["content"], _ids(answer))
            for question, answer in zip(spoken[::2], spoken[1::2], strict=True)
        ]
        return note

    def _recorded(self, stream: Iterator[Chunk], before: list[Turn], said: str) -> Iterator[Chunk]:
        text = ""
        ids: list[int] = []
        try:
            for chunk in stream:
                ids += chunk.tokens
                text += chunk.text if chunk.kind == "answer" else ""
                yield chunk
        finally:
            stream.close()  # type: ignore[attr-defined]  # streams are generators; the state is kept right now
            if text or ids:
                self.turns = [*before, Turn(said, text, self._runner.answer_ids(ids, text))]

    def _messages(self, turns: Sequence[Turn]) -> list[Message]:
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in turns:
            messages.append({"role": "user", "content": turn.said})
            messages.append({"role": "assistant", "content": turn.answer, "token_ids": turn.ids})
        return messages


def _ids(answer: Message) -> tuple[int, ...] | None:
    ids = answer.get("token_ids")
    return None if ids is None else tuple(ids)
