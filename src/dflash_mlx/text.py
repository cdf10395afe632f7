"""Tokens of rounds to final pieces of text: UTF-8, special ids, stop strings, thoughts, the budget.

In come token ids, a round at a time, before anything is committed; out go how many of them to keep, and
pieces of text that nothing later can change. Of a tokenizer this room knows the methods of `Tokenizer`,
of models nothing. Everything is decided token by token, so the way tokens fall into rounds changes nothing.
"""

from collections.abc import Sequence, Set
from typing import NamedTuple

from dflash_mlx.core import ChunkKind, Cut, FinishReason
from dflash_mlx.detokenizer import Detokenizer, Tokenizer
from dflash_mlx.errors import UsageError

FIRST_SURROGATE = 0xD800  # no text holds these, so they can stand for tags


class Piece(NamedTuple):
    """Final text of one kind."""

    text: str
    kind: ChunkKind


def check_stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The `stop` option as a tuple; one string stands for itself.

    Raises:
        UsageError: an empty stop string, which would stop before the first character, or not a string.
    """
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for string in strings:
        if not isinstance(string, str):
            raise UsageError(
                f"A stop string must be text, found {string!r}; give a string or a list of them."
            )
        if not string:
            raise UsageError("A stop string is empty and would stop at once; give at least one character.")
    return strings


class Transcript:
    """The text of one generation as it grows; `cut` takes tokens in, `pieces` gives final text out.

    Joined, the answer and thought pieces are `tokenizer.decode` of the kept tokens, with these exceptions:

    * Special ids are no text unless `keep_special`, nor is the stop id at the end. Spaces are not cleaned up
      (`clean_up_tokenization_spaces=False`): the text is what the model wrote.
    * Think tags are in neither kind. A tag that is one token of the vocabulary is known by its id alone, so
      that the same letters spelled by other tokens remain text; any other tag is found in the text. A tag
      that changes nothing (an end without a start) is left out too, and so are newlines right after a tag.
    * Stop strings apply to the answer and never inside a thought or across one, where they would end a
      generation before its answer. The match that completes first counts, of several that complete with
      the same character the longest. The text ends before it.
    * After `MAX_OPEN` tokens without one whole character, or in a single run of byte tokens, what is there is
      taken as it stands.

    Attributes:
        tokens: every kept token, stop id and special ids included.
        finish_reason: why it ended; None while it goes on or where `finish` ended it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_ids: Set[int],
        max_new_tokens: int,
        stop_strings: Sequence[str] = (),
        think_tags: tuple[str, str] | None = None,
        inside_thought: bool = False,
        keep_special: bool = False,
    ) -> None:
        """Start with nothing kept.

        Args:
            tokenizer: the target's.
            stop_ids: ids that end the generation.
            max_new_tokens: the budget, at least 1.
            stop_strings: as `check_stop_strings` gives them.
            think_tags: opening and closing tag of a thought; None takes everything as answer.
            inside_thought: the prompt ended with the opening tag.
            keep_special: special ids, the stop id included, are shown as the tokenizer writes them.
        """
        assert max_new_tokens >= 1 and all(stop_strings)
        assert think_tags is not None or not inside_thought
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._stop_ids = stop_ids
        self._max_new_tokens = max_new_tokens
        self._stop_strings = tuple(stop_strings)
        marks, self._tags = _mark_tags(tokenizer, think_tags)
        names = {mark: tokenizer.convert_ids_to_tokens(token) for token, mark in marks.items()}
        self._lone_marks = str.maketrans(names if keep_special else dict.fromkeys(names))
        self._silent_stop = not keep_special
        hidden: Set[int] = frozenset() if keep_special else _special_ids(tokenizer)
        self._detokenizer = Detokenizer(tokenizer, hidden=hidden, marks=marks)
        self._kind: ChunkKind = "thought" if inside_thought else "answer"
        self._after_tag = inside_thought
        self._held = ""  # settled, but perhaps the beginning of a stop string or a tag
        self._final: dict[ChunkKind, list[str]] = {"answer": [], "thought": []}
        self._fresh: list[Piece] = []
        self._ended = False

    @property
    def text(self) -> str:
        """The answer as far as it is final."""
        return "".join(self._final["answer"])

    @property
    def thinking(self) -> str:
        """The thoughts as far as they are final."""
        return "".join(self._final["thought"])

    def cut(self, tokens: Sequence[int]) -> Cut:
        """Take in the tokens of a round up to the one that ends the generation, and say how many those are.

        The rest of the round is as if never seen. Not to be called again after a finish reason.
        """
        assert not self._ended
        for keep, token in enumerate(tokens, 1):
            self._take(token)
            if self.finish_reason is not None:
                return Cut(keep, self.finish_reason)
        return Cut(len(tokens), None)

    def pieces(self) -> list[Piece]:
        """What became final since the last call; neighbours differ in kind, none is empty."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def finish(self) -> None:
        """Release what is still held back; `cut` did so where it gave a finish reason."""
        if not self._ended:
            self._end(None)

    def _take(self, token: int) -> None:
        self.tokens.append(token)
        stops = token in self._stop_ids
        if not (stops and self._silent_stop) and self._read(token):
            self._ended, self.finish_reason = True, "stop"
        elif stops:
            self._end("stop")
        elif len(self.tokens) == self._max_new_tokens:
            self._end("length")

    def _read(self, token: int) -> bool:
        """Take in a token of text; True where it completed a stop string."""
        text, settled = self._detokenizer.push(token)
        scan = self._scan(self._held + text)
        if settled or scan.stopped:
            self._accept(scan)
        return scan.stopped

    def _end(self, reason: FinishReason | None) -> None:
        """Release all, as nothing that is held back can still become something else."""
        self._accept(self._scan(self._held + self._detokenizer.flush()))
        self._release(self._held, self._kind)
        self._held, self._ended, self.finish_reason = "", True, reason

    def _scan(self, text: str) -> "_Scan":
        """Take text of unknown fate apart; changes nothing, as the text may not be settled yet."""
        kind, after_tag = self._kind, self._after_tag
        pieces: list[Piece] = []
        while True:
            if after_tag:
                text = text.lstrip("\n")
                after_tag = not text
            needles = [*self._tags, *(self._stop_strings if kind == "answer" else ())]
            match = _first_match(text, needles)
            if match is None:
                break
            pieces.append(Piece(text[: match.start], kind))
            if match.needle not in self._tags:
                return _Scan(pieces, "", kind, after_tag, stopped=True)
            kind, text, after_tag = self._tags[match.needle], text[match.end :], True
        held = _unfinished(text, needles)
        pieces.append(Piece(text[: len(text) - held], kind))
        return _Scan(pieces, text[len(text) - held :], kind, after_tag, stopped=False)

    def _accept(self, scan: "_Scan") -> None:
        for piece in scan.pieces:
            self._release(*piece)
        self._held, self._kind, self._after_tag = scan.held, scan.kind, scan.after_tag

    def _release(self, text: str, kind: ChunkKind) -> None:
        text = text.translate(self._lone_marks)
        if not text:
            return
        self._final[kind].append(text)
        if self._fresh and self._fresh[-1].kind == kind:
            text = self._fresh.pop().text + text
        self._fresh.append(Piece(text, kind))


class _Scan(NamedTuple):
    """Text taken apart, and the state after it."""

    pieces: list[Piece]  # final if the text was
    held: str  # the end of the text that may begin a stop string or a tag
    kind: ChunkKind
    after_tag: bool
    stopped: bool


class _Match(NamedTuple):
    end: int
    start: int
    needle: str


def _first_match(text: str, needles: Sequence[str]) -> _Match | None:
    """The match with the earliest end, of those the longest."""
    found = (_Match(at + len(n), at, n) for n in needles if (at := text.find(n)) >= 0)
    return min(found, default=None)


def _unfinished(text: str, needles: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a needle without being it."""
    longest = max((len(needle) for needle in needles), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(needle.startswith(text[-length:]) for needle in needles):
            return length
    return 0


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset([*tokenizer.all_special_ids, *added])


def _mark_tags(
    tokenizer: Tokenizer, tags: tuple[str, str] | None
) -> tuple[dict[int, str], dict[str, ChunkKind]]:
    """A mark for each token that must be known by its id, and the tags written with marks, by what follows.

    That is a tag of one token, and special ones within a longer tag (as in "<|channel>thought"), which are
    no text otherwise. Marks are lone surrogates, which no decoder makes.
    """
    marks: dict[int, str] = {}
    marked: dict[str, ChunkKind] = {}
    kinds: tuple[ChunkKind, ChunkKind] = ("thought", "answer")
    for tag, kind in zip(tags or (), kinds, strict=False):
        whole = tokenizer.convert_tokens_to_ids(tag)
        if whole is not None and tokenizer.convert_ids_to_tokens(whole) == tag:
            names = {whole: tag}
        else:
            names = {i: tokenizer.convert_ids_to_tokens(i) or "" for i in _special_ids(tokenizer)}
        for token, name in sorted(names.items(), key=lambda item: -len(item[1])):
            if name and name in tag:
                tag = tag.replace(name, marks.setdefault(token, chr(FIRST_SURROGATE + len(marks))))
        marked[tag] = kind
    return marks, marked
