"""Times rounds of the real loop: a pair in, seconds at two depths out. Says nothing and keeps nothing.

Every figure is one that a generation would see: whole rounds of the decoder, on tokens that mean nothing.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median, quantiles
from typing import NamedTuple

import mlx.core as mx

from dflash_mlx.core import Cut, Drafter, SamplingParams, Target
from dflash_mlx.decoding import Decoder, Meter
from dflash_mlx.kernels.choice import NO_KERNELS, Choices
from dflash_mlx.policy import Depth, Plan
from dflash_mlx.policy.costs import interpolated
from dflash_mlx.sampling import Sampler

_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
_DEEP_ROWS = (2, 4, 8, 16)  # with many tokens; the others grow with the depth as their neighbours do
_SHALLOW, _DEEP = 64, 4096  # tokens in the cache
_READING = 1.2  # seconds in which the deep cache is filled, or as far as it goes
_LEAST, _LEAST_DEEP, _MOST = 3, 2, 6  # times that everything is measured
_MEASURING = 0.5  # seconds at each depth, at least, where _MOST is not reached
_TIGHT = 1.06  # second smallest time over smallest, of nine figures in ten, after which no more are taken
_PATIENCE = 8.0  # seconds after which what there is must do
_SLOW = 12.0  # seconds for few tokens, after which many are not measured
_STEADY = 1.5  # largest time over smallest, of half of the figures at least, where nothing else ran
_HOPELESS = 0.85  # speed of a drafter that is always right, against plain decoding: no second look is taken
_PLAIN = 5  # steps of a run of plain decoding; the first fills the pipeline, the last empties it: not counted

Clock = Callable[[], float]


class Bench(NamedTuple):
    """A pair ready to be measured."""

    target: Target
    make_drafter: Callable[[], Drafter]
    prefill_chunk: int
    choices: Choices = NO_KERNELS
    clock: Clock = time.perf_counter


class Measured(NamedTuple):
    """The costs at one depth, and whether the machine was quiet enough to believe them for long."""

    depth: Depth
    steady: bool


def measure(bench: Bench, *, block_size: int) -> list[Measured]:
    """Seconds of plain steps, drafts and verify passes with few and with many tokens in the cache."""
    room = bench.target.max_positions or _DEEP + 1000
    # A round here emits one token; all of them together must fit behind the deep context.
    deepest = min(_DEEP, room - (_MOST + 1) * (len(_ROWS) + _PLAIN + 2) - 2 * block_size)
    since = bench.clock()
    depths = [_measured(_Runs(bench, block_size, min(_SHALLOW, max(deepest, 1)), _ROWS), _LEAST)]
    plain, verify, draft = depths[0].depth.plain, depths[0].depth.verify, depths[0].depth.draft
    pays = any(rows * plain > _HOPELESS * (draft + seconds) for rows, seconds in verify.items() if rows > 1)
    if pays and deepest >= 4 * _SHALLOW and bench.clock() - since < _SLOW:
        runs = _Runs(bench, block_size, deepest, _DEEP_ROWS)
        if runs.tokens >= 2 * _SHALLOW:  # less was read only where the machine is very slow
            depths.append(_filled_in(_measured(runs, _LEAST_DEEP), depths[0].depth))
    mx.clear_cache()
    return depths


class _Told:
    """A policy that does what it is told."""

    def __init__(self) -> None:
        self.next = Plan(0)
        self.length = 0

    def plan(self, *, depth: int, most: int) -> Plan:
        return self.next

    def choose(self, confidences: Sequence[float]) -> int:
        return self.length

    def observe(self, verified: int, accepted: int) -> None:
        pass


class _Runs:
    """A generation that goes on as told, each round timed."""

    def __init__(self, bench: Bench, block_size: int, tokens: int, rows: Sequence[int]) -> None:
        self._clock = bench.clock
        self._block_size = block_size
        self._told = _Told()
        self._drafter = bench.make_drafter()
        self.rows = [few for few in rows if 1 < few < block_size] + [block_size]
        self._decoder = Decoder(
            target=bench.target,
            cache=bench.target.make_cache(),
            drafter=self._drafter,
            sampler=Sampler(SamplingParams(), (), choices=bench.choices),
            cut=lambda emitted: Cut(1, None),
            policy=self._told,
            max_new_tokens=1 << 30,
            block_size=block_size,
            prefill_chunk=bench.prefill_chunk,
            meter=Meter(),
            ids=[],
        )
        since = self._clock()
        vocabulary = bench.target.vocab_size
        for _ in self._decoder.read([(7919 * i + 11) % vocabulary for i in range(tokens)]):
            if self._clock() - since > _READING:
                break
        self.tokens = len(self._decoder.ids)
        self._decoder.ids.append(1)
        self._rounds = self._decoder.rounds()
        next(self._rounds)

    @property
    def clock(self) -> float:
        return self._clock()

    def plain(self) -> list[float]:
        """Steps in a run of plain decoding."""
        self._told.next = Plan(0, steps=_PLAIN)
        return [self._timed() for _ in range(_PLAIN)][1:-1]

    def draft(self) -> float:
        """A block drafted and waited for."""
        since = self._clock()
        mx.eval(self._drafter.propose(self._decoder.ids[-1], self._block_size).tokens)
        return self._clock() - since

    def round(self, rows: int) -> float:
        """A round that verifies rows - 1 proposals, at least one."""
        self._told.next = Plan(rows - 1)
        return self._timed()

    def looked(self, rows: int) -> float:
        """The same with the confidences read first; one row means that none of the block is verified."""
        self._told.next, self._told.length = Plan(max(rows - 1, 1), look=True), rows - 1
        return self._timed()

    def _timed(self) -> float:
        since = self._clock()
        next(self._rounds)
        return self._clock() - since


class _Turn(NamedTuple):
    """Everything measured once, one after the other, so that a busy moment falls on all alike."""

    plain: list[float]
    draft: float
    looked: float  # a round over the whole block whose confidences were read
    alone: float  # the same that then verified nothing
    round: dict[int, float]  # by rows, 2 at least


def _turn(runs: _Runs) -> _Turn:
    rounds = {rows: runs.round(rows) for rows in runs.rows}
    return _Turn(runs.plain(), runs.draft(), runs.looked(runs.rows[-1]), runs.looked(1), rounds)


def _measured(runs: _Runs, least: int) -> Measured:
    """The first and largest round, in which buffers are made, does not count; one that is slow once is outvoted."""
    runs.round(runs.rows[-1])
    since = runs.clock
    turns: list[_Turn] = []
    while len(turns) < _MOST:
        turns.append(_turn(runs))
        spent = runs.clock - since
        enough = len(turns) >= least and spent > _MEASURING and _is_tight(turns)
        if enough or spent > _PATIENCE or _best(turns) < _HOPELESS:
            break
    rounds = {rows: [turn.round[rows] for turn in turns] for rows in runs.rows}
    costs = {rows: _usual(seconds) for rows, seconds in rounds.items()}
    draft, plain = (
        _usual([turn.draft for turn in turns]),
        _usual([step for turn in turns for step in turn.plain]),
    )
    look = max(_usual([turn.looked for turn in turns]) - costs[runs.rows[-1]], 0.0)
    costs = {1: _usual([turn.alone for turn in turns]) - look, **costs}
    # A pass that is waited for takes at least as long as one in a pipeline; less is noise.
    verify = {rows: max(seconds - draft, plain) for rows, seconds in costs.items()}
    steady = _best(turns) < _HOPELESS or (len(turns) > 1 and _spread(rounds.values()) <= _STEADY)
    return Measured(Depth(runs.tokens, plain, draft, look, verify), steady)


def _best(turns: Sequence[_Turn]) -> float:
    """The most that drafting could gain by these figures: speed against plain decoding, every proposal accepted."""
    return max(rows * min(turn.plain) / seconds for turn in turns for rows, seconds in turn.round.items())


def _is_tight(turns: Sequence[_Turn]) -> bool:
    """Whether another turn would hardly change the figures: most were met twice."""
    figures = [[min(turn.plain) for turn in turns], [turn.alone for turn in turns]]
    figures += [[turn.round[rows] for turn in turns] for rows in turns[0].round]
    gaps = sorted(second / max(first, 1e-9) for first, second, *_ in map(sorted, figures))
    return gaps[9 * len(gaps) // 10 - 1] <= _TIGHT


def _filled_in(deep: Measured, shallow: Depth) -> Measured:
    """Costs with many tokens for every row count that was measured with few.

    A pass of many rows need not cost more than one of fewer (BLAS and kernels have their favourite shapes), and
    these steps are the same at every depth; what the context adds grows smoothly with the rows.
    """
    measured, floor = deep.depth.verify, deep.depth.plain
    known = sorted(measured)
    added = [measured[rows] - shallow.verify[rows] for rows in known]
    verify = {
        rows: max(seconds + interpolated(known, added, rows), floor)
        for rows, seconds in shallow.verify.items()
    }
    return Measured(deep.depth._replace(verify=verify), deep.steady)


def _usual(seconds: Sequence[float]) -> float:
    """The lower quartile: whatever else the machine does only adds to a time."""
    return seconds[0] if len(seconds) == 1 else max(quantiles(seconds, n=4, method="inclusive")[0], 0.0)


def _spread(figures: Iterable[Sequence[float]]) -> float:
    """Largest over smallest, of half of the figures at least; one that came out below nothing is no figure."""
    return median(max(seconds) / max(min(seconds), 1e-9) for seconds in figures)
