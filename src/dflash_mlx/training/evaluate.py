"""The eval stage: a drafter and held-out prompts in, real rounds and speeds by class of prompt out.

The engine itself runs, beside mlx-lm's plain loop and the drafter that the new one began as, all in turns. Trains
nothing and writes nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dflash_mlx.answering import answer, collected
from dflash_mlx.bench.summary import Position, positions
from dflash_mlx.conversation import Conversations
from dflash_mlx.core import Result, Stats
from dflash_mlx.engine import Engine
from dflash_mlx.errors import UsageError
from dflash_mlx.generator import DFlashGenerator
from dflash_mlx.loading import LoadedTarget
from dflash_mlx.policy import WholeBlock
from dflash_mlx.prompting import requested
from dflash_mlx.request import Options
from dflash_mlx.training.records import Answer, is_held_out
from dflash_mlx.yardstick import plain_answer

PLAIN, NEW, OLD = "plain", "new", "old"
ALL = "all"


@dataclass(frozen=True, slots=True)
class Figures:
    """One drafter on the prompts of one class; every block is verified whole."""

    tokens_per_round: float  # the target's own token included
    speedup: float  # decoding speed over that of mlx-lm's plain loop
    tokens_per_second: float
    identical: int  # texts that are those of plain decoding


@dataclass(frozen=True, slots=True)
class Row:
    """A class of prompts; `ALL` for all of them."""

    prompt_class: str
    prompts: int
    tokens: int  # of the plain answers
    plain_tokens_per_second: float
    figures: Mapping[str, Figures]  # by arm, `NEW` and perhaps `OLD`


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured."""

    rows: tuple[Row, ...]  # the last one is `ALL`
    positions: Mapping[str, tuple[Position, ...]]  # acceptance by place in the block, by arm
    drafts: Mapping[str, str]  # what the arms are
    options: Mapping[str, Any]
    machine: str
    dtype: str

    @property
    def all(self) -> Row:
        """The row of all prompts."""
        return self.rows[-1]

    def record(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


class _Trial(NamedTuple):
    prompt_class: str
    results: Mapping[str, Result]


def held_out_prompts(answers: Sequence[Answer], each: int) -> list[Answer]:
    """Held-out prompts, at most so many of every class, those with longer answers first.

    Raises:
        UsageError: there are none.
    """
    found: dict[str, list[Answer]] = {}
    for held in answers:
        if is_held_out(held):
            found.setdefault(held.prompt_class or "unknown", []).append(held)
    if not found:
        raise UsageError(
            f"None of the {len(answers)} answers is held out, so there is nothing to measure on; gather more "
            "(one prompt in fifty is held out)."
        )
    chosen: list[Answer] = []
    for kind in sorted(found):
        chosen += sorted(found[kind], key=lambda held: (-len(held.answer_ids), held.prompt_ids))[:each]
    return chosen


def evaluate(
    target: LoadedTarget,
    draft: str | Path,
    prompts: Sequence[Answer],
    *,
    old_draft: str | Path | None = None,
    max_new_tokens: int = 128,
    repeats: int = 1,
    tell: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Decode every prompt plainly and drafted, greedily, in turns.

    Args:
        target: loaded; both drafters share it.
        draft: folder of the new drafter.
        prompts: only their prompt and class are used, see `held_out_prompts`.
        old_draft: another drafter to measure beside it.
        max_new_tokens: of each answer.
        repeats: times that each prompt is answered.
        tell: told after each prompt.

    Raises:
        UsageError: nothing to measure on.
        LoadError: a drafter that cannot be had, or does not fit.
    """
    if not prompts:
        raise UsageError("There are no prompts to measure on.")
    options = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "seed": 0}
    drafts: dict[str, str | Path] = {NEW: draft} | ({OLD: old_draft} if old_draft is not None else {})
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                DFlashGenerator(target, where, mode="on", draft_vocab="full", kept_gb=0)
            ).engine
            for name, where in drafts.items()
        }
        arms: dict[str, Engine | None] = {PLAIN: None, **engines}
        few = {**options, "max_new_tokens": min(8, max_new_tokens)}
        for name in arms:
            _answered(engines[NEW], arms[name], prompts[0], few)  # warm-up, not counted
        trials = []
        for trial in _trials(engines[NEW], arms, prompts, options, repeats):
            trials.append(trial)
            tell(_told(trial, len(trials), len(prompts) * repeats))
        machine = engines[NEW].machine
        return Evaluation(
            rows=tuple(_rows(trials, list(engines))),
            positions={name: positions(trial.results[name].stats for trial in trials) for name in engines},
            drafts={name: str(where) for name, where in drafts.items()},
            options={**options, "repeats": repeats},
            machine=f"{machine.chip}, {machine.memory_gb:.0f} GB, {machine.os}, {machine.device}",
            dtype=str(target.model.dtype).removeprefix("mlx.core."),
        )


def _trials(
    any_engine: Engine,
    arms: Mapping[str, Engine | None],
    prompts: Sequence[Answer],
    options: Mapping[str, Any],
    repeats: int,
) -> Iterator[_Trial]:
    """Every arm answers every prompt; who begins changes from prompt to prompt."""
    names = list(arms)
    for repeat in range(repeats):
        for at, prompt in enumerate(prompts):
            start = (at + repeat) % len(names)
            order = [*names[start:], *names[:start]]
            results = {name: _answered(any_engine, arms[name], prompt, options) for name in order}
            yield _Trial(prompt.prompt_class or "unknown", results)


def _answered(
    any_engine: Engine, engine: Engine | None, prompt: Answer, options: Mapping[str, Any]
) -> Result:
    """One answer; without an engine of its own by mlx-lm's plain loop."""
    runs = engine or any_engine
    request = requested(runs.pair, list(prompt.prompt_ids), Options.checked(options))
    if engine is not None:
        return collected(answer(engine, request, Conversations(0), policy=WholeBlock()))
    return plain_answer(
        runs.pair.target.model,
        request,
        runs.stats(request),
        runs.transcript(request),
        prefill_chunk=runs.prefill_chunk,
    )


def _rows(trials: Sequence[_Trial], drafted: Sequence[str]) -> Iterator[Row]:
    for kind in sorted({trial.prompt_class for trial in trials}):
        yield _row(kind, [trial for trial in trials if trial.prompt_class == kind], drafted)
    yield _row(ALL, trials, drafted)


def _row(kind: str, trials: Sequence[_Trial], drafted: Sequence[str]) -> Row:
    plain = [trial.results[PLAIN] for trial in trials]
    speed = _speed(result.stats for result in plain)
    figures = {}
    for name in drafted:
        results = [trial.results[name] for trial in trials]
        rounds = sum(result.stats.rounds for result in results)
        emitted = sum(result.stats.new_tokens - 1 for result in results)
        own = _speed(result.stats for result in results)
        same = sum(a.token_ids == b.token_ids for a, b in zip(plain, results, strict=True))
        figures[name] = Figures(emitted / rounds if rounds else 0.0, own / speed if speed else 0.0, own, same)
    return Row(kind, len(trials), sum(len(result.token_ids) for result in plain), speed, figures)


def _speed(stats: Iterator[Stats]) -> float:
    """Tokens per second of decoding, over all answers."""
    known = list(stats)
    seconds = sum(one.seconds.decode for one in known)
    return sum(one.new_tokens - 1 for one in known) / seconds if seconds > 0 else 0.0


def _told(trial: _Trial, done: int, total: int) -> str:
    rounds = ", ".join(
        f"{name} {result.stats.tokens_per_round:.2f}"
        for name, result in sorted(trial.results.items())
        if name != PLAIN
    )
    return f"{done} of {total}, {trial.prompt_class}: {rounds} tokens per round"
