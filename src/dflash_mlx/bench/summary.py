"""What trials say: trials in, figures by class and context out. Pure arithmetic; looks at no clock and no model.

Speed-ups are ratios of answers to the same question in the same trial, so that a slow minute of the machine falls
on both; of several ratios the median and the quartiles are told.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from dflash_mlx.bench.arms import PLAIN, Trial
from dflash_mlx.core import Difference, Result, Stats

ALL = "all"
"""The row of all classes together."""

_CLEARLY = 0.03  # a speed-up within this of 1 is none
_DISTURBED = 0.6  # of the usual plain speed; slower than that, something else was running


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of one thing."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    count: int


@dataclass(frozen=True, slots=True)
class Position:
    """One place in a block: how often it was verified with all before it right, and how often it was right too."""

    reached: int
    accepted: int

    @property
    def rate(self) -> float:
        """Accepted of those reached."""
        return self.accepted / self.reached if self.reached else 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm over the answers of one row."""

    arm: str
    answers: int
    new_tokens: int
    tokens_per_second: float  # of decoding, all answers together
    end_to_end_per_second: float  # the same with reading the prompt
    first_token: float  # seconds, median
    peak_memory_gb: float
    tokens_per_round: float
    acceptance_rate: float
    plain_share: float  # of the tokens, decoded without drafting
    speedup: Spread | None  # decoding against plain; None for plain itself
    end_to_end: Spread | None  # whole answers against plain
    positions: tuple[Position, ...]
    differences: tuple[Difference, ...]  # from the plain text, one for each answer that differs


@dataclass(frozen=True, slots=True)
class BestFixed:
    """The generator's own policy against the fixed block that was best on other questions."""

    chosen: tuple[str, ...]  # arms, one for each half of the questions that was chosen on
    ratio: Spread  # speed of the own policy over theirs, on the half that was not chosen on


@dataclass(frozen=True, slots=True)
class Row:
    """Everything of one class at one context."""

    kind: str
    context: int  # tokens that prompts were to have; 0: the question alone
    prompt_tokens: int  # median
    arms: tuple[Figures, ...]  # plain first, then the own policy, then fixed blocks
    best_fixed: BestFixed | None  # None: no fixed block ran, or too few questions
    verdict: str

    def figures(self, arm: str) -> Figures:
        """Those of one arm.

        Raises:
            KeyError: it did not run.
        """
        for figures in self.arms:
            if figures.arm == arm:
                return figures
        raise KeyError(arm)


def rows(trials: Sequence[Trial], own: str) -> list[Row]:
    """A row for each class of questions alone, one for all of them, and one for each longer context.

    Args:
        trials: at least one.
        own: the arm of the generator's own policy.
    """
    short = [trial for trial in trials if trial.task.context == 0]
    kinds = list(dict.fromkeys(trial.task.kind for trial in short))
    found = [_row(kind, [t for t in short if t.task.kind == kind], own) for kind in kinds]
    if len(kinds) > 1:
        found.append(_row(ALL, short, own))
    for context in sorted({trial.task.context for trial in trials} - {0}):
        found.append(_row(ALL, [t for t in trials if t.task.context == context], own))
    return found


def disturbed(trials: Sequence[Trial]) -> int:
    """How many trials ran while the machine was busy with something else, by the speed of plain decoding."""
    count = 0
    for context in {trial.task.context for trial in trials}:
        alike = [t for t in trials if t.task.context == context and t.results[PLAIN].stats.new_tokens > 1]
        speeds = [_speed([trial.results[PLAIN]]) for trial in alike]
        count += sum(speed < _DISTURBED * median(speeds) for speed in speeds)
    return count


def spread(values: Iterable[float]) -> Spread | None:
    """Median and quartiles; None of nothing."""
    known = sorted(values)
    if not known:
        return None
    if len(known) == 1:
        return Spread(known[0], known[0], known[0], 1)
    low, middle, high = quantiles(known, n=4, method="inclusive")
    return Spread(middle, low, high, len(known))


def positions(stats: Iterable[Stats]) -> tuple[Position, ...]:
    """Acceptance by place in the block, over all rounds; a place that was not verified says nothing."""
    reached: list[int] = []
    accepted: list[int] = []
    for answer in stats:
        lengths = list(zip(answer.verify_lengths, answer.accept_lengths, strict=True))
        if answer.finish_reason == "stop":
            lengths = lengths[:-1]  # what came after the end of the answer was cut, not rejected
        for verified, right in lengths:
            for place in range(min(right + 1, verified)):
                if place == len(reached):
                    reached.append(0)
                    accepted.append(0)
                reached[place] += 1
                accepted[place] += place < right
    return tuple(Position(*counts) for counts in zip(reached, accepted, strict=True))


def all_the_way(places: Sequence[Position]) -> list[float]:
    """The chance that a block is right up to and with each place: the product of the rates so far."""
    chances, chance = [], 1.0
    for place in places:
        chance *= place.rate
        chances.append(chance)
    return chances


def best_fixed(trials: Sequence[Trial], own: str) -> BestFixed | None:
    """Choose the fastest fixed block on every other question, race it on the rest, then the other way round.

    Chosen on the questions that it is then judged by, a fixed block would profit from their luck.
    """
    fixed = [name for name in trials[0].results if name not in (PLAIN, own)] if trials else []
    questions = list(dict.fromkeys(trial.task for trial in trials))
    if not fixed or len(questions) < 2:
        return None
    halves = [
        [trial for trial in trials if questions.index(trial.task) % 2 == half and _measured(trial, own)]
        for half in (0, 1)
    ]
    if not all(halves):
        return None
    chosen, ratios = [], []
    for choosing, judging in (halves, halves[::-1]):
        best = max(sorted(fixed), key=lambda name: _speed(t.results[name] for t in choosing))
        chosen.append(best)
        ratios += [_speed([t.results[own]]) / _speed([t.results[best]]) for t in judging]
    found = spread(ratios)
    return BestFixed(tuple(chosen), found) if found else None


def in_order(names: Iterable[str], own: str) -> list[str]:
    """Arms as they are told: plain, the generator's own policy, fixed blocks by their length."""
    return sorted(names, key=lambda name: (name != PLAIN, name != own, _rows_of(name)))


def _row(kind: str, trials: Sequence[Trial], own: str) -> Row:
    arms = tuple(_figures(name, trials) for name in in_order(trials[0].results, own))
    prompt = int(median(t.results[PLAIN].stats.prompt_tokens for t in trials))
    return Row(
        kind, trials[0].task.context, prompt, arms, best_fixed(trials, own), _verdict(arms[1], arms[2:])
    )


def _rows_of(name: str) -> int:
    number = name.rpartition(" ")[2]
    return int(number) if number.isdigit() else 0


def _figures(name: str, trials: Sequence[Trial]) -> Figures:
    results = [trial.results[name] for trial in trials]
    stats = [result.stats for result in results]
    rounds, verified = sum(s.rounds for s in stats), sum(s.verified for s in stats)
    tokens = sum(s.new_tokens for s in stats)
    is_plain = name == PLAIN
    compared = [trial for trial in trials if not is_plain and _measured(trial, name)]
    return Figures(
        arm=name,
        answers=len(results),
        new_tokens=tokens,
        tokens_per_second=_speed(results),
        end_to_end_per_second=tokens / sum(map(_whole, stats)),
        first_token=median(s.seconds.first_token for s in stats),
        peak_memory_gb=max(s.peak_memory_gb for s in stats),
        tokens_per_round=sum(s.new_tokens - 1 for s in stats) / rounds if rounds else 0.0,
        acceptance_rate=sum(s.accepted for s in stats) / verified if verified else 0.0,
        plain_share=sum(s.plain_rounds for s in stats) / max(tokens - len(stats), 1),
        speedup=spread(_speed([t.results[name]]) / _speed([t.results[PLAIN]]) for t in compared),
        end_to_end=spread(
            (t.results[name].stats.new_tokens / _whole(t.results[name].stats))
            / (t.results[PLAIN].stats.new_tokens / _whole(t.results[PLAIN].stats))
            for t in compared
        ),
        positions=() if is_plain else positions(stats),
        differences=tuple(found for trial in trials if (found := trial.differences.get(name)) is not None),
    )


def _measured(trial: Trial, name: str) -> bool:
    """Whether both answers have a token that was decoded after the first."""
    return all(trial.results[arm].stats.new_tokens > 1 for arm in (name, PLAIN))


def _speed(results: Iterable[Result]) -> float:
    """Tokens a second of decoding, over all of them."""
    tokens = seconds = 0.0
    for result in results:
        tokens += result.stats.new_tokens - 1
        seconds += result.stats.seconds.decode
    return tokens / seconds if seconds else 0.0


def _whole(stats: Stats) -> float:
    return stats.seconds.prefill + stats.seconds.decode


def _verdict(own: Figures, fixed: Sequence[Figures]) -> str:
    """What a person should take from a row."""
    if own.speedup is None:
        return "answers too short to say"
    drafted = [figures.speedup for figures in (own, *fixed) if figures.speedup]
    if max(speedup.median for speedup in drafted) < 1:
        return "plain is faster here"
    median_, low, high = own.speedup.median, own.speedup.low, own.speedup.high
    if median_ < 1 - _CLEARLY and high < 1:
        return "plain is faster here"
    if median_ > 1 + _CLEARLY and low > 1:
        return f"{own.arm} is faster"
    return "no clear difference"
