"""Why a pair accepts what it does: questions in, acceptance by class and place and ranked causes out.

The same questions are answered again with one thing changed at a time, and what changed is told with its spread:
evidence instead of a threshold. Counts accepted tokens and times nothing, so a busy machine does no harm.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

from dflash_mlx.bench.arms import FixedLength
from dflash_mlx.bench.conditions import LONG_PROMPT, Condition, Untried, conditions
from dflash_mlx.bench.filler import filled
from dflash_mlx.bench.prompts import Question
from dflash_mlx.bench.subject import Pair
from dflash_mlx.bench.summary import Position, Spread, all_the_way, positions, spread
from dflash_mlx.core import Stats
from dflash_mlx.engine import Engine
from dflash_mlx.errors import DFlashError

Evidence = Literal["clear", "thin", "none"]
Again = Callable[[Mapping[str, Any], bool], AbstractContextManager[Engine]]
"""Loads the pair again with changed arguments, the target too where the second argument says so."""

_ENOUGH_ANSWERS, _ENOUGH_ROUNDS = 4, 40
_WORTH, _SURE = 1.05, 1.02  # median and lower quartile of a gain that counts


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How far blocks are right."""

    kind: str
    answers: int
    rounds: int
    tokens_per_round: float  # where every place is verified
    places: tuple[Position, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one change did, over the same questions and the same places of the block."""

    what: str
    now: str
    instead: str
    tokens_per_round: float  # as it is now
    tokens_per_round_instead: float
    gain: Spread  # instead over now, one ratio for each question
    evidence: Evidence
    cause: str
    advice: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was found; findings by gain, the clear ones first."""

    by_class: tuple[Acceptance, ...]  # the last is all of them where there are several
    shape: str
    findings: tuple[Finding, ...]
    untried: tuple[Untried, ...]
    conclusion: str


def diagnose(
    pair: Pair,
    questions: Sequence[Question],
    *,
    options: Mapping[str, Any],
    loading: Mapping[str, Any],
    again: Again,
    tell: Callable[[str], None],
) -> Diagnosis:
    """Answer the questions as they are, then under every condition that can be varied here.

    Args:
        pair: as it runs now.
        questions: at least one.
        options: of every answer; `max_new_tokens` and `seed` among them.
        loading: arguments that the pair was loaded with.
        again: loads it with others.
        tell: told what is being tried.

    Raises:
        DFlashError: the questions cannot be answered as they are.
    """
    tell(f"Answering {len(questions)} questions as the pair runs now ...")
    now = _answers(pair, questions, options)
    tried, untried = conditions(pair.engine, options, loading)
    findings = []
    for condition in tried:
        tell(f"Trying {condition.what}: {condition.instead} instead of {condition.now} ...")
        try:
            with _changed(pair.engine, condition, again) as engine:
                instead = _answers(
                    Pair(engine), _asked(pair, questions, condition), _options(options, condition)
                )
        except DFlashError as error:
            untried.append(Untried(condition.what, str(error)))
            continue
        findings.append(finding(condition, now, instead))
    findings.sort(key=lambda found: (found.evidence != "clear", -found.gain.median))
    classes = _by_class(questions, now)
    return Diagnosis(
        by_class=classes,
        shape=shape(classes[-1]),
        findings=tuple(findings),
        untried=tuple(untried),
        conclusion=_conclusion(classes[-1], findings) + _on_long_prompts(findings),
    )


def finding(condition: Condition, now: Sequence[Stats], instead: Sequence[Stats]) -> Finding:
    """Hold answers against those to the same questions under a condition."""
    places = min(len(positions(now)), len(positions(instead)))
    if condition.block is not None:
        places = min(places, condition.block - 1)
    pairs = list(zip(now, instead, strict=True))
    gain = spread(tokens(positions([b]), places) / tokens(positions([a]), places) for a, b in pairs)
    assert gain is not None, "there is a question"
    rounds = min(sum(stats.rounds for stats in answers) for answers in (now, instead))
    return Finding(
        what=condition.what,
        now=condition.now,
        instead=condition.instead,
        tokens_per_round=tokens(positions(now), places),
        tokens_per_round_instead=tokens(positions(instead), places),
        gain=gain,
        evidence=_evidence(gain, rounds),
        cause=condition.cause,
        advice=condition.advice,
    )


def tokens(places: Sequence[Position], most: int) -> float:
    """Tokens that a round emits on average when `most` places are verified, its own token included."""
    return 1.0 + sum(all_the_way(places)[:most])


def shape(found: Acceptance) -> str:
    """What the rates from place to place look like, in a sentence."""
    rates = [place.rate for place in found.places if place.reached >= 8]
    if found.rounds < _ENOUGH_ROUNDS or not rates:
        return f"{found.rounds} rounds are too few to say how acceptance falls; ask more, or allow longer answers."
    if rates[0] < 0.15:
        return (
            "Hardly anything is right, even at the first place: drafter and target do not understand each other "
            "(another target, revision or tokenizer), or the drafter computes nonsense."
        )
    if len(rates) > 1 and rates[0] < 0.6 * max(rates[1:3]):
        return "The first place is worse than those after it: proposals look shifted by one place."
    if len(rates) > 2 and rates[-1] < 0.6 * rates[0]:
        return "Later places are much worse than the first: shorter blocks lose little."
    return "Acceptance falls evenly from place to place, as that of a sound pair does."


def _answers(pair: Pair, questions: Sequence[Question], options: Mapping[str, Any]) -> list[Stats]:
    policy = FixedLength((pair.engine.block_size or 1) - 1)
    return [pair.trial(question.text, policy=policy, **options).stats for question in questions]


def _options(options: Mapping[str, Any], condition: Condition) -> dict[str, Any]:
    return {**options, **condition.options}


def _asked(pair: Pair, questions: Sequence[Question], condition: Condition) -> Sequence[Question]:
    if not condition.context:
        return questions
    return [q._replace(text=filled(q.text, condition.context, pair.count)) for q in questions]


def _changed(engine: Engine, condition: Condition, again: Again) -> AbstractContextManager[Engine]:
    """The pair under a condition; what is loaded for it goes with the block."""
    if condition.loading:
        return again(condition.loading, condition.whole)
    if condition.every_word:
        engine = replace(engine, shortlist=None)
    if condition.block is not None:
        engine = replace(engine, block_size=condition.block)
    if condition.shift:
        network = copy.copy(engine.pair.draft)
        assert network is not None
        ids = tuple(tap + condition.shift for tap in network.config.target_layer_ids)
        network.config = replace(network.config, target_layer_ids=ids)
        engine = replace(engine, pair=replace(engine.pair, draft=network))
    return nullcontext(engine)


def _evidence(gain: Spread, rounds: int) -> Evidence:
    if gain.median < _WORTH:
        return "none"
    enough = gain.count >= _ENOUGH_ANSWERS and rounds >= _ENOUGH_ROUNDS
    return "clear" if enough and gain.low >= _SURE else "thin"


def _by_class(questions: Sequence[Question], answers: Sequence[Stats]) -> tuple[Acceptance, ...]:
    kinds = list(dict.fromkeys(question.kind for question in questions))
    groups = {kind: [a for q, a in zip(questions, answers, strict=True) if q.kind == kind] for kind in kinds}
    if len(kinds) > 1:
        groups["all"] = list(answers)
    return tuple(
        Acceptance(kind, len(stats), sum(s.rounds for s in stats), tokens(places, len(places)), places)
        for kind, stats in groups.items()
        for places in [positions(stats)]
    )


def _conclusion(everything: Acceptance, findings: Sequence[Finding]) -> str:
    clear = [found for found in findings if found.evidence == "clear"]
    thin = [found for found in findings if found.evidence == "thin"]
    if clear:
        best = clear[0]
        return (
            f"Likeliest: {best.cause} ({best.what}: {best.gain.median:.2f} times the tokens a round). "
            f"Try: {best.advice}."
        )
    if everything.rounds < _ENOUGH_ROUNDS or everything.answers < _ENOUGH_ANSWERS:
        return (
            f"The evidence is too thin: {everything.answers} answers with {everything.rounds} rounds. "
            "Ask more questions, or allow longer answers."
        )
    if thin:
        names = ", ".join(found.what for found in thin)
        return (
            f"Nothing is clear; {names} may help, but not for every question. Ask more questions to be sure."
        )
    if everything.tokens_per_round < 1.3:
        return (
            "Nothing that was tried helps, and hardly anything is accepted: see whether the drafter was made for this "
            "very target (a fine-tuned one answers differently) and whether both are of the revision that was meant."
        )
    return "Nothing that was tried would raise acceptance clearly: this is what the pair does on such text."


def _on_long_prompts(findings: Sequence[Finding]) -> str:
    """The one change whose loss is news."""
    for found in findings:
        if found.what == LONG_PROMPT and found.gain.median < 1 / _WORTH and found.gain.high < 1:
            return f" Longer prompts cost acceptance: {found.gain.median:.2f} times the tokens a round {found.instead}."
    return ""
