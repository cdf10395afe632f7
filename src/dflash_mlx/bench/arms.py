"""The race: questions and arms in, one trial after the other out. Every arm answers every question, in turns.

In one process with one pair of weights, so that nothing but the way of decoding differs. Knows no statistics.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dflash_mlx.core import Difference, Result
from dflash_mlx.decoding import Policy
from dflash_mlx.policy import Plan

PLAIN = "plain"
_WARM_TOKENS = 12


class Subject(Protocol):
    """What is measured: a pair that can answer in several ways."""

    def yardstick(self, prompt: str, **options: Any) -> Result:
        """By mlx-lm's own plain loop."""

    def trial(self, prompt: str, *, policy: Policy | None = None, **options: Any) -> Result:
        """Drafted, from empty caches, under a policy (None: its own)."""

    def parting(self, prompt: str, plain: Result, drafted: Result, **options: Any) -> Difference | None:
        """Where the two texts part."""


class Task(NamedTuple):
    """One prompt to answer."""

    kind: str
    number: int  # within its class and context
    prompt: str
    context: int  # tokens that the prompt was to have; 0: the question alone
    new_tokens: int  # most of an answer


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of decoding."""

    name: str
    rows: int | None = None  # of every verify pass, the anchor included; None: not fixed

    @property
    def plain(self) -> bool:
        """Whether this is mlx-lm's own loop."""
        return self.name == PLAIN


class FixedLength:
    """Verify the first `n` proposals of every block."""

    def __init__(self, n: int) -> None:
        self._n = n

    def plan(self, *, depth: int, most: int) -> Plan:
        """What to do after `depth` tokens, when at most `most` proposals can be verified."""
        return Plan(min(self._n, most))

    def choose(self, confidences: Sequence[float]) -> int:
        """No plan looks."""
        return self._n

    def observe(self, verified: int, accepted: int) -> None:
        """Nothing is learnt."""


class Trial(NamedTuple):
    """One question answered by every arm."""

    task: Task
    repeat: int
    results: Mapping[str, Result]  # by arm, in the order in which they ran
    differences: Mapping[str, Difference | None]  # of each drafted text from the plain one


def arms(own: str, blocks: Sequence[int]) -> list[Arm]:
    """Plain decoding, the generator's own policy under the name of its mode, and fixed blocks."""
    return [Arm(PLAIN), Arm(own), *(Arm(f"block {rows}", rows) for rows in blocks)]


def trials(
    subject: Subject,
    tasks: Sequence[tuple[Task, Sequence[Arm]]],
    *,
    options: Mapping[str, Any],
    repeats: int,
    cooldown: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Trial]:
    """Run everything once unmeasured, then `repeats` rounds over all tasks.

    Within a task the arms follow each other at once; who begins changes from task to task and from repeat to repeat.

    Args:
        subject: the pair.
        tasks: each with the arms that answer it.
        options: of every answer but `max_new_tokens`; the seed must be among them, so that all arms draw alike.
        repeats: trials of each task.
        cooldown: seconds of rest before every answer.
        sleep: how to rest.
    """
    assert "seed" in options, "arms that draw differently cannot be compared"
    _warm_up(subject, tasks, options)
    for repeat in range(repeats):
        for at, (task, competing) in enumerate(tasks):
            asked, results = {**options, "max_new_tokens": task.new_tokens}, {}
            for arm in rotated(competing, at + repeat):
                if cooldown:
                    sleep(cooldown)
                results[arm.name] = _answer(subject, arm, task.prompt, asked)
            yield Trial(task, repeat, results, _differences(subject, task.prompt, results, asked))


def rotated(arms: Sequence[Arm], by: int) -> list[Arm]:
    """The arms from another one on; over as many turns as there are arms each comes once at each place."""
    start = by % len(arms)
    return [*arms[start:], *arms[:start]]


def _warm_up(
    subject: Subject, tasks: Sequence[tuple[Task, Sequence[Arm]]], options: Mapping[str, Any]
) -> None:
    warm: set[Arm] = set()
    for task, competing in tasks:
        few = {**options, "max_new_tokens": min(_WARM_TOKENS, task.new_tokens)}
        for arm in competing:
            if arm not in warm:
                warm.add(arm)
                _answer(subject, arm, task.prompt, few)


def _answer(subject: Subject, arm: Arm, prompt: str, options: Mapping[str, Any]) -> Result:
    if arm.plain:
        return subject.yardstick(prompt, **options)
    policy = None if arm.rows is None else FixedLength(arm.rows - 1)
    return subject.trial(prompt, policy=policy, **options)


def _differences(
    subject: Subject, prompt: str, results: Mapping[str, Result], options: Mapping[str, Any]
) -> dict[str, Difference | None]:
    plain = results[PLAIN]
    return {
        name: subject.parting(prompt, plain, result, **options)
        for name, result in results.items()
        if name != PLAIN
    }
