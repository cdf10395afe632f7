"""What one block costs to draft in several ways: named drafters in, seconds out, measured once and kept.

Knows nothing of what the ways differ in.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

import mlx.core as mx

from dflash_mlx import runtime
from dflash_mlx.calibration import stored
from dflash_mlx.core import Drafter, Target

_TOKENS = 64  # in the cache and in the drafter's context
_MEASURING = 1.0  # seconds, where that is enough for _LEAST
_LEAST, _MOST = 3, 9  # times that everything is measured, after a first time that does not count
_PATIENCE = 8.0  # seconds after which one time is enough
_VERSION = 1
_NOT_TELLING = (
    "kernels",
    "bytes",
    "draft_bits",
    "draft_vocab",
)  # of the pair that is decoded with in the end

Clock = Callable[[], float]
Ways = Mapping[str, Callable[[], Drafter]]


class Drafts(NamedTuple):
    """Seconds of a round's two halves."""

    verify: float  # a target pass over a whole block
    draft: Mapping[str, float]  # one block drafted, by the name of the way


def draft_costs(
    target: Target,
    names: Sequence[str],
    ways: Callable[[], Ways],
    key: Mapping[str, str],
    *,
    block_size: int,
    tell: Callable[[str], None],
) -> Drafts:
    """Seconds of each way, from the cache folder or else measured now.

    Args:
        target: verifies, and makes the features that are drafted from.
        names: of the ways.
        ways: gives how to make each drafter, by name; asked only where something is to be measured.
        key: what the figures hold for; the names of the ways are added to it.
        block_size: tokens in a drafted block, its anchor included.
        tell: told before anything is measured.
    """
    key = {**key, "ways": ", ".join(names)}
    try:
        path = runtime.cache_dir() / "costs" / stored.file_name(key)
    except RuntimeError:  # a user without a home
        path = None
    if path is not None and (found := _read(path, key, names)):
        return found
    tell("Measuring what a draft costs in several ways; this is done once for a pair ...")
    made = measure_drafts(target, ways(), block_size=block_size)
    if path is not None:
        _write(path, key, made)
        return _read(path, key, names) or made
    return made


def forget_drafts(key: Mapping[str, str]) -> int:
    """Let a pair's ways be measured again the next time they are asked for; how many files that were.

    Args:
        key: of the pair. Its kernels do not count, as a choice of bits is made before they are chosen.
    """
    telling = {name: value for name, value in key.items() if name not in _NOT_TELLING}
    try:
        files = list((runtime.cache_dir() / "costs").glob("*.json"))
    except RuntimeError:  # a user without a home
        return 0
    removed = 0
    for path in files:
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(path.read_text(encoding="utf-8"))["key"]
            if "ways" in found and telling.items() <= dict(found).items():
                path.unlink()
                removed += 1
    return removed


def measure_drafts(
    target: Target, ways: Ways, *, block_size: int, clock: Clock = time.perf_counter
) -> Drafts:
    """Time all ways in turns, so that a busy moment falls on all alike; lower quartiles."""
    drafters = {name: make() for name, make in ways.items()}
    taps = next(iter(drafters.values())).taps
    cache = target.make_cache()
    text = mx.array([(7919 * i + 11) % target.vocab_size for i in range(_TOKENS)])
    read = target.verify(text, cache, taps)
    mx.eval(read.features)
    target.settle(cache)
    for drafter in drafters.values():
        drafter.inject(read.features, _TOKENS)
        drafter.settle()
    block = mx.array([(13 * i + 1) % target.vocab_size for i in range(block_size)])

    def verified() -> float:
        since = clock()
        tried = target.verify(block, cache, taps)
        mx.eval(mx.argmax(tried.logits, axis=-1), tried.features)
        spent = clock() - since
        target.commit(cache, tried.tape, 0)
        return spent

    def drafted(drafter: Drafter) -> float:
        since = clock()
        mx.eval(drafter.propose(1, block_size).tokens)
        return clock() - since

    def turn() -> tuple[float, dict[str, float]]:
        return verified(), {name: drafted(drafter) for name, drafter in drafters.items()}

    turn()
    since = clock()
    turns = []
    while True:
        turns.append(turn())
        spent = clock() - since
        if len(turns) == _MOST or spent > _PATIENCE or (len(turns) >= _LEAST and spent > _MEASURING):
            break
    mx.clear_cache()
    seconds = {name: _usual([drafts[name] for _, drafts in turns]) for name in ways}
    return Drafts(_usual([verify for verify, _ in turns]), seconds)


def _usual(seconds: list[float]) -> float:
    """The lower quartile: whatever else the machine does only adds to a time."""
    return seconds[0] if len(seconds) == 1 else quantiles(seconds, n=4, method="inclusive")[0]


def _read(path: Path, key: Mapping[str, str], names: Iterable[str]) -> Drafts | None:
    """What a file holds; None where there is none, or one that is damaged or holds another key's."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["version"] != _VERSION or record["key"] != dict(key):
            return None
        found = Drafts(float(record["verify"]), {name: float(record["draft"][name]) for name in names})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if all(0 < figure < 1e6 for figure in (found.verify, *found.draft.values())) else None


def _write(path: Path, key: Mapping[str, str], made: Drafts) -> None:
    """Keep the figures, unless another process was first; where that cannot be, they are measured again next time."""
    record = {"version": _VERSION, "key": dict(key), "verify": made.verify, "draft": dict(made.draft)}
    with suppress(OSError):
        text = json.dumps(record, indent=1) + "\n"
        stored.keep(path, text, good=lambda: _read(path, key, made.draft) is not None)
