"""The target's caches: which kinds a rejected tail can be undone in, and how. A cache is mlx-lm's list of them.

Around a pass: `before`, the forward, `after`; then `commit` with any number of rows, as often as wanted until the
next pass. What a kind needs for that is in its own file; the table below says which file a class goes to.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as stock

from dflash_mlx.errors import UnsupportedError
from dflash_mlx.target.caches import recurrent, ring, rows
from dflash_mlx.target.recurrence import Intake, Recorder

Cache = list[Any]  # of mlx-lm's cache objects, which carry no types
_PARTS = 8  # of a pass, computed one after the other
CacheSnapshot = list[Any]  # one entry for each cache object; the kind that made it reads it


class Undo(Protocol):
    """What one cache object needs to give up rows of one pass."""

    def fits(self, layer: Any) -> bool:
        """Note the state after the pass; False where it is not laid out as this kind lays it out."""

    def keep(self, layer: Any, rows: int) -> None:
        """Let the cache hold what it held before the pass and the pass's first `rows` rows."""


class Kind(Protocol):
    """A module of this package."""

    def before(self, layer: Any, rows: int) -> Undo:
        """Note the state before a pass of `rows` rows."""

    def snapshot(self, layer: Any) -> Any:
        """The state now; valid whatever the cache does next."""

    def restore(self, layer: Any, saved: Any) -> None:
        """Bring back what `snapshot` saw."""


KINDS: dict[type, Kind] = {
    stock.KVCache: rows.PLAIN,
    stock.QuantizedKVCache: rows.PLAIN,
    stock.ChunkedKVCache: rows.CHUNKED,
    stock.RotatingKVCache: ring.RING,
    stock.ArraysCache: recurrent.RECURRENT,
}


class Tape(NamedTuple):
    """What undoing needs of one pass."""

    rows: int
    undos: list[Undo]  # one for each cache object, mixtures taken apart


def check_model(model: nn.Module, model_type: str) -> None:
    """Refuse a model with a cache in which a rejected tail cannot be undone; looks at no weight.

    Raises:
        UnsupportedError: naming the kinds found.
    """
    cache = stock.make_prompt_cache(model)
    check_kinds(cache, model_type)
    if not any(hasattr(layer, "offset") for layer in parts(cache)):
        raise UnsupportedError(
            f"A target of type '{model_type}' keeps its state in ArraysCache only, where nothing counts its tokens. "
            "Try a target with attention in some layers."
        )
    slots = sum(len(layer.cache) for layer in parts(cache) if isinstance(layer, stock.ArraysCache))
    heard = len(Recorder(model))
    if slots != heard:
        raise UnsupportedError(
            f"A target of type '{model_type}' keeps its state in {slots} arrays of ArraysCache; only the {heard} that "
            "short convolutions, gated_delta_update and ssm_update write can be undone. Try another target, or "
            "mlx-lm itself for plain decoding."
        )


def kinds(model: nn.Module) -> list[str]:
    """Names of the classes that a model's caches are made of, mixtures taken apart; looks at no weight."""
    return sorted({type(layer).__name__ for layer in parts(stock.make_prompt_cache(model))})


def check_kinds(cache: Cache, model_type: str) -> None:
    """Refuse a cache with objects of a class that is not in the table.

    Raises:
        UnsupportedError: naming the classes found.
    """
    found = sorted({type(layer).__name__ for layer in parts(cache) if type(layer) not in KINDS})
    if found or not cache:
        raise UnsupportedError(
            f"A target of type '{model_type}' keeps its state in {', '.join(found) or 'no cache'}; rejected tokens "
            f"can be undone in {', '.join(kind.__name__ for kind in KINDS)}. Try another target."
        )


def parts(cache: Sequence[Any]) -> Iterator[Any]:
    """The cache objects that hold something, those in a CacheList one by one."""
    for layer in cache:
        if type(layer) is stock.CacheList:
            yield from parts(layer.caches)
        else:
            yield layer


def before(cache: Cache, rows: int) -> Tape:
    """Note the state before a pass of `rows` rows."""
    return Tape(rows, [KINDS[type(layer)].before(layer, rows) for layer in parts(cache)])


def after(cache: Cache, tape: Tape, intakes: Sequence[Intake]) -> bool:
    """Note the state after the pass and what its recurrent layers took in; False where the layout is unknown."""
    fits = [undo.fits(layer) for layer, undo in zip(parts(cache), tape.undos, strict=True)]
    return recurrent.hand_out(tape.undos, intakes) and all(fits)


def is_faithful(tape: Tape) -> bool:
    """Whether running all rows of the pass again leaves the very arrays that the pass left; waits for the device."""
    return all(undo.is_faithful() for undo in tape.undos if isinstance(undo, recurrent.Replay))


def commit(cache: Cache, tape: Tape, keep: int) -> None:
    """Let the cache hold what it held before the pass and the pass's first `keep` rows."""
    assert 0 <= keep <= tape.rows, f"cannot keep {keep} of {tape.rows} rows"
    for layer, undo in zip(parts(cache), tape.undos, strict=True):
        undo.keep(layer, keep)


def length(cache: Cache) -> int:
    """Tokens that the cache holds."""
    return next(int(layer.offset) for layer in parts(cache) if hasattr(layer, "offset"))


def snapshot(cache: Cache) -> CacheSnapshot:
    """The state as it is now, sharing its arrays with the cache until the next pass writes to them."""
    return [KINDS[type(layer)].snapshot(layer) for layer in parts(cache)]


def restore(cache: Cache, saved: CacheSnapshot) -> None:
    """Bring back what `snapshot` saw."""
    for layer, state in zip(parts(cache), saved, strict=True):
        KINDS[type(layer)].restore(layer, state)


def settling(cache: Cache) -> Iterator[None]:
    """Evaluate everything the cache holds, layer after layer; yields after each part of what has to be computed."""
    layers = list(parts(cache))
    step = max(1, -(-len(layers) // _PARTS))
    for first in range(0, len(layers), step):
        mx.eval([layer.state for layer in layers[first : first + step]])
        yield


def settle(cache: Cache) -> None:
    """Evaluate everything the cache holds."""
    mx.eval([layer.state for layer in parts(cache)])
