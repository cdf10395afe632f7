"""Ids to text, one at a time, exactly as decoding all of them at once gives it.

Knows a tokenizer by the methods of `Tokenizer`; nothing of stops, thoughts or rounds.
"""

import re
from collections.abc import Mapping, Sequence, Set
from typing import Protocol

MIN_ANCHOR = (
    8  # tokens of settled text that new ones are decoded behind, before a new anchor is worth a decode
)
MAX_OPEN = 64  # tokens to wait for bytes to become characters; only garbage comes near
BYTES_OF_CHARACTER = 4  # the most that UTF-8 has

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
REPLACEMENT = "\ufffd"


class AddedToken(Protocol):
    """An entry of `Tokenizer.added_tokens_decoder`."""

    @property
    def special(self) -> bool:
        """Whether `skip_special_tokens` leaves it out."""


class Tokenizer(Protocol):
    """What text needs of a tokenizer; those of transformers and mlx-lm's wrapper around them have it."""

    @property
    def all_special_ids(self) -> Sequence[int]:
        """Ids with a role: begin, end, padding and the like."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """Added tokens by id, special or not."""

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        """The text of all ids."""

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """The token of one id, None where there is none (padded rows of the embedding)."""

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        """The id of one token; None or the unknown id where there is none."""


class Detokenizer:
    """Ids to text, one at a time, as decoding all of them at once gives it, without decoding all of them.

    New ids (`open`) are decoded behind a few older ones (`anchor`), whose text is cut off again: a decoder
    that drops the first space or joins bytes then sees what it would see in the whole. Ids that are no text
    (`hidden`, or without a token) stay out, as an anchor without text would be no left side at all. An id of
    `marks` is no text either: its mark stands in its place, and characters do not reach across it.
    """

    def __init__(self, tokenizer: Tokenizer, *, hidden: Set[int], marks: Mapping[int, str]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._marks = marks
        self._anchor: list[int] = []
        self._anchor_text = ""
        self._open: list[int] = []
        self._open_text = ""

    def push(self, token: int) -> tuple[str, bool]:
        """The text after the last settled one, and whether it is settled now; if not, it may yet change."""
        if token in self._marks:
            text = self.flush() + self._marks[token]
            self._anchor, self._anchor_text = [token], self._decode([token])
            return text, True
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None or token in self._hidden:
            return self._open_text, False
        self._open.append(token)
        self._open_text = text = self._decode(self._anchor + self._open)[len(self._anchor_text) :]
        # A run of byte tokens is decoded as a whole: one wrong byte at its end spoils all of it.
        is_byte = BYTE_TOKEN.fullmatch(name) is not None
        incomplete = text.endswith(REPLACEMENT)
        waited = len(self._open)
        if (is_byte and waited < MAX_OPEN) or (incomplete and waited < MAX_OPEN + BYTES_OF_CHARACTER):
            return text, False
        self._settle(inside_run=is_byte)
        return text, True

    def flush(self) -> str:
        """The text after the last settled one, taken as it stands."""
        text = self._open_text
        self._settle(inside_run=False)
        return text

    def _settle(self, *, inside_run: bool) -> None:
        if inside_run and self._anchor:
            pass  # a part of the run in the anchor would be decoded with the rest of the run
        elif len(self._anchor) >= MIN_ANCHOR and self._open_text:
            self._anchor, self._anchor_text = self._open, self._decode(self._open)
        else:
            self._anchor, self._anchor_text = self._anchor + self._open, self._anchor_text + self._open_text
        self._open, self._open_text = [], ""

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
