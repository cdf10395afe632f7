"""Fewer words to propose from: a head's table and a list of words in, the same rows of it out, text by text.

A drafter that borrows a head of 150,000 words reads all of them for every block and proposes the same few thousand.
A shortlist holds the rows of those; the words of the prompt and of the answer so far are added as they come (FR-Spec,
arXiv 2502.14856). The target verifies, so nothing but the acceptance depends on it. A draft over a shortlist is the
draft that all words would give if every other logit were minus infinity: so are its confidences. Knows no tokenizer.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import copy

import mlx.core as mx

from dflash_mlx.errors import UnsupportedError
from dflash_mlx.kernels.table import Table

_STEP = 256  # rows by which the room for added words grows
_FORGET = 0.98  # share of the evidence that is left after a token: the last fifty count
_PRIOR = 16.0  # tokens, all listed, that a text begins with


Product = Callable[[mx.array], mx.array]
Head = Callable[[mx.array, Product], mx.array]
"""Normed rows and what multiplies them in; logits out, whatever else the head does included."""


class Shortlist:
    """The words that a pair always proposes from; shared by its drafters.

    Args:
        head: the whole table.
        ids: words, the most frequent first, none twice.
        through: the head that the table is of, run with another product; None: the product alone are the logits.
        bearable: share of words outside the list above which the whole head pays; 1: it never does.
        saved: seconds by which a draft over all words is longer; 0: not measured.
    """

    def __init__(
        self,
        head: Table,
        ids: Sequence[int],
        *,
        through: Head | None = None,
        bearable: float = 1.0,
        saved: float = 0.0,
    ) -> None:
        assert ids and max(ids) < head.rows, (len(ids), head.rows)
        self.head = head
        self.through = through
        self.words = tuple(ids)
        self.bearable = bearable
        self.saved = saved
        self.ids = mx.array(self.words, mx.int32)
        self.rows = head.take(self.ids)
        listed = bytearray(head.rows)
        for word in self.words:
            listed[word] = 1
        self.listed = bytes(listed)  # by word
        mx.eval(self.ids, *self.rows.arrays.values())

    def first(self, count: int) -> "Shortlist":
        """A shorter one, without a copy of its rows."""
        short = copy(self)
        short.words, short.ids, short.rows = self.words[:count], self.ids[:count], self.rows.first(count)
        listed = bytearray(self.listed)
        for word in self.words[count:]:
            listed[word] = 0
        short.listed = bytes(listed)
        mx.eval(short.ids, *short.rows.arrays.values())
        return short

    def bearing(self, missed: float) -> "Shortlist":
        """The same with another share of words that may be missed."""
        other = copy(self)
        other.bearable = missed
        return other

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of the copied rows."""
        return self.rows.nbytes + self.ids.nbytes


class Words:
    """A shortlist and the words of one text so far."""

    def __init__(self, shortlist: Shortlist) -> None:
        self._shortlist = shortlist
        self._known = bytearray(shortlist.listed)
        self._added = _Added(shortlist.head)
        self._new: list[int] = []
        self._seen = 0
        self._missed, self._weight = 0.0, _PRIOR
        self._covers = True

    @property
    def covers(self) -> bool:
        """Whether the last words of the text were known often enough for the list to pay."""
        return self._covers

    @property
    def ids(self) -> mx.array:
        """The words [N] whose logits `logits` gives, in its order."""
        self._add()
        if self._added.ids is None:
            return self._shortlist.ids
        return mx.concatenate([self._shortlist.ids, self._added.ids])

    def see(self, text: Sequence[int]) -> None:
        """Learn the words of a text that goes on where it ended at the last call."""
        assert len(text) >= self._seen, (len(text), self._seen)
        for word in text[self._seen :]:
            known = self._known[word]
            self._missed = _FORGET * self._missed + (not known)
            self._weight = _FORGET * self._weight + 1.0
            if not known:
                self._known[word] = 1
                self._new.append(word)
        self._seen = len(text)
        # Back to the list only where it is clearly good enough again.
        bearable = self._shortlist.bearable * (1.0 if self._covers else 0.7)
        self._covers = self._missed <= bearable * self._weight

    def logits(self, hidden: mx.array) -> mx.array:
        """Normed rows [S, D] to logits [S, N]; the rows of new words are copied here."""
        self._add()
        through = self._shortlist.through
        return through(hidden, self._product) if through else self._product(hidden)

    def _product(self, hidden: mx.array) -> mx.array:
        common = self._shortlist.rows.product(hidden)
        if self._added.rows is None:
            return common
        return mx.concatenate([common, self._added.rows.product(hidden)], axis=-1)

    def _add(self) -> None:
        if self._new:
            self._added.append(self._new)
            self._new = []


class _Added:
    """Rows of words in the order in which they came, in buffers that are written in place and grow in steps."""

    def __init__(self, head: Table) -> None:
        self._head = head
        self._room: dict[str, mx.array] = {}
        self._filled = 0
        self._words: list[int] = []
        self.ids: mx.array | None = None  # [M]; None: no word was added
        self.rows: Table | None = None

    def append(self, words: Iterable[int]) -> None:
        self._words.extend(words)
        end = len(self._words)
        self.rows = None  # a second name for the buffers would have them copied
        fresh = self._head.take(mx.array(self._words[self._filled :], mx.int32))
        if not self._room or end > len(self._room["weight"]):
            self._grow(-(-end // _STEP) * _STEP)
        for name, rows in fresh.arrays.items():
            self._room[name][self._filled : end] = rows
        self._filled = end
        self.ids = mx.array(self._words, mx.int32)
        self.rows = self._head.holding(self._room).first(end)

    def _grow(self, rows: int) -> None:
        for name, like in self._head.arrays.items():
            room = mx.zeros((rows - self._filled, *like.shape[1:]), like.dtype)
            held = self._room.get(name)
            self._room[name] = room if held is None else mx.concatenate([held[: self._filled], room])


def why_whole(*, own_words: int | None, markov: bool, table: Table | None, target: str) -> str | None:
    """Why a drafter proposes from the whole head: half a sentence, None where it need not.

    Args:
        own_words: rows of a head with a vocabulary of its own.
        markov: whether a bias on every word follows the head.
        table: of the head that is used; None where logits cannot be had word by word.
        target: its name.
    """
    if own_words is not None:
        return f"drafts with a vocabulary of its own ({own_words:,} words)"
    if markov:
        return "has a Markov head, which biases every word"
    if table is None:
        return f"uses the head of {target}, whose logits cannot be had word by word"
    return None


def refuse(name: str, words: int, why: str) -> UnsupportedError:
    """The error for a shortlist that was asked for and cannot be."""
    return UnsupportedError(f"draft_vocab {words}: {name} {why}; leave draft_vocab out or give 'full'.")
