"""Conversations kept between requests: a prompt's token ids in, the state that already holds most of them out.

A state is a target's cache and a drafter's context with exactly the token ids they hold. A new prompt takes the
one with which it shares most, what differs is undone, and only the rest is read again. Ids alone decide; this
file knows no text, no template and no sampling.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from dflash_mlx.core import Drafter, Target
from dflash_mlx.target import kept

_MARKS = 2  # places of earlier turns that a cache which cannot be cut is brought back to


class Mark(NamedTuple):
    """A place that a state can be brought back to."""

    length: int
    cache: kept.Snapshot
    context: Any  # the drafter's snapshot; None without a drafter


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What a generation left behind, evaluated."""

    ids: tuple[int, ...]  # exactly the tokens that cache and context hold
    cache: Any
    context: Any  # the drafter's snapshot; None without a drafter
    marks: tuple[Mark, ...]  # in the order of their lengths
    nbytes: int

    @property
    def turn(self) -> int:
        """Tokens that the next prompt of the same conversation will share for certain."""
        return self.marks[-1].length if self.marks else len(self.ids)


class Start(NamedTuple):
    """Where a generation begins."""

    cache: Any
    reused: int  # tokens of the prompt that cache and drafter hold already
    marks: tuple[Mark, ...]


class Conversations:
    """States of several conversations, the least recently used leaving first; safe for threads.

    A state belongs to one generation at a time: `resume` takes it out, `keep` puts it back.

    Args:
        limit: bytes that all states may hold together.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._states: list[State] = []  # the most recently used last
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._states)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(state.nbytes for state in self._states)

    def resume(self, prompt: Sequence[int], target: Target, drafter: Drafter | None) -> Start:
        """Find the state that shares most with the prompt and bring it, and the new `drafter`, to what is shared.

        At least the last token of the prompt is left to be read. A state of another conversation, with which the
        prompt shares only its beginning, is copied and stays.
        """
        with self._lock:
            state, shared = self._closest(prompt)
            if state is None:
                return Start(target.make_cache(), 0, ())
            moves = shared >= state.turn
            self._states.remove(state)
            if not moves:  # a used one is not the next to leave
                self._states.append(state)
            start = _begun(state, shared, target, drafter, moves)
        return start or Start(target.make_cache(), 0, ())

    @contextmanager
    def lent(self, prompt: Sequence[int]) -> Iterator[tuple[State, int] | None]:
        """Take out the state that shares most with a prompt, and how many tokens that is; it goes back afterwards."""
        with self._lock:
            state, shared = self._closest(prompt)
            rank = self._states.index(state) if state else 0
            if state:
                self._states.remove(state)
        try:
            yield (state, shared) if state else None
        finally:
            if state:
                with self._lock:
                    self._states.insert(rank, state)
                    self._evict()

    def keep(self, state: State) -> None:
        """Put a state in as the most recently used; the oldest leave until all fit, in the end this one too."""
        with self._lock:
            self._states.append(state)
            self._evict()

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._states.clear()

    def _closest(self, prompt: Sequence[int]) -> tuple[State | None, int]:
        state = max(self._states, key=lambda s: _reach(s, prompt), default=None)
        shared = _reach(state, prompt) if state else 0
        return (state, shared) if shared else (None, 0)

    def _evict(self) -> None:
        while self._states and self.nbytes > self.limit:
            self._states.pop(0)


def mark(cache: Any, drafter: Drafter | None, length: int) -> Mark:
    """Remember this place, for caches and contexts that a length does not bring back."""
    kept.compact(cache)
    return Mark(length, kept.snapshot(cache), drafter.snapshot() if drafter else None)


def state_of(
    target: Target, cache: Any, drafter: Drafter | None, ids: Sequence[int], marks: Sequence[Mark]
) -> State | None:
    """What a generation leaves behind, however it ended; None where cache and context part and cannot meet.

    Args:
        target: evaluates the cache.
        cache: holds a beginning of `ids`.
        drafter: holds as much of them.
        ids: every token so far.
        marks: places on the way, as `mark` made them.
    """
    target.settle(cache)
    length = kept.length(cache)
    if length is None and drafter is not None:
        length = drafter.context_length
    if length is None or length > len(ids):
        return None
    if drafter is not None:
        drafter.settle()
        if drafter.context_length != length:  # interrupted between the two
            both = min(length, drafter.context_length)
            parted = State(tuple(ids[:length]), cache, drafter.snapshot(), tuple(marks), 0)
            place = place_in(parted, both, drafter)
            if place is None:
                return None
            length = place.length
            kept.rewind(cache, length, place.cache)
    marks = tuple(m for m in marks if m.length <= length)[-_MARKS:]
    kept.compact(cache)
    nbytes = kept.nbytes(cache, [m.cache for m in marks])
    context = drafter.snapshot() if drafter else None
    if drafter is not None:
        nbytes += drafter.nbytes_of([context, *(m.context for m in marks if m.context is not None)])
    return State(tuple(ids[:length]), cache, context, marks, nbytes)


def place_in(state: State, shared: int, drafter: Drafter | None) -> Mark | None:
    """The furthest place within the first `shared` tokens that cache and drafter can both be brought to.

    The drafter is there then; the cache is left as it is. None, and no change, where there is no such place.
    """
    empty = drafter.snapshot() if drafter else None
    if shared == len(state.ids) or kept.goes_back(state.cache):
        if _drawn_back(drafter, state.context, shared):
            return Mark(shared, kept.snapshot(state.cache), drafter.snapshot() if drafter else None)
    for place in reversed(marks_within(state, shared)):
        context = state.context if place.context is None else place.context
        if _drawn_back(drafter, context, place.length):
            return place
    if drafter:
        drafter.restore(empty)
    return None


def marks_within(state: State, length: int) -> tuple[Mark, ...]:
    """The state's marks up to a length."""
    return tuple(m for m in state.marks if m.length <= length)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _reach(state: State, prompt: Sequence[int]) -> int:
    """How much of the prompt this state can be brought to hold, judged by the cache alone."""
    shared = min(common_prefix(state.ids, prompt), len(prompt) - 1)
    if shared == len(state.ids) or kept.goes_back(state.cache):
        return shared
    return max((m.length for m in marks_within(state, shared)), default=0)


def _drawn_back(drafter: Drafter | None, context: Any, length: int) -> bool:
    if drafter is None:
        return True
    if context is None:
        return False  # kept while nothing was drafted
    drafter.restore(context)
    return drafter.context_length == length or drafter.rewind(length)


def _begun(state: State, shared: int, target: Target, drafter: Drafter | None, moves: bool) -> Start | None:
    """Cache and drafter at `shared` tokens, or at the last mark before; None where neither can be had."""
    place = place_in(state, shared, drafter)
    if place is None:
        return None
    if moves:
        cache = state.cache
        kept.rewind(cache, place.length, place.cache)
    else:
        cache = target.make_cache()
        kept.fork(state.cache, cache, place.length, place.cache)
        if drafter:
            drafter.part()
    return Start(cache, place.length, marks_within(state, place.length))
