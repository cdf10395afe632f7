"""What is run: a setting and a pair in, prompts with the arms that answer them out. Runs nothing.

A context is the length of the whole prompt in tokens, filled with notes before the question; where the pair takes
less, it is shortened and that is said.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dflash_mlx.bench.arms import Arm, Task, arms
from dflash_mlx.bench.filler import filled
from dflash_mlx.bench.prompts import Question
from dflash_mlx.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a person asked for, with every default filled in."""

    questions: Sequence[Question]
    contexts: Sequence[int]  # tokens; 0: the question alone
    blocks: Sequence[int] | None  # rows of the fixed blocks; None: a choice that suits the pair
    few_blocks: bool  # that choice is to be short
    long_questions: int  # so many questions are asked at each longer context
    repeats: int
    cooldown: float  # seconds before each answer
    new_tokens: int  # most of an answer
    options: Mapping[str, Any]  # of every answer: seed, temperature and so on


class Lineup(NamedTuple):
    """Ready to run, and what was chosen on the way."""

    tasks: list[tuple[Task, list[Arm]]]
    notes: list[str]


def lineup(
    setting: Setting,
    *,
    own: str,
    block_size: int,
    limit: int | None,
    count_tokens: Callable[[str], int],
    name: str,
) -> Lineup:
    """Prompts of all classes for every arm, and at longer contexts a question of each class for two of them.

    Args:
        setting: what to run.
        own: name of the generator's own policy.
        block_size: rows of the pair's whole block.
        limit: tokens that the target takes, prompt and answer together; None: no limit is known.
        count_tokens: of a prompt, with everything that a template adds.
        name: of the target, for sentences.

    Raises:
        UsageError: a block longer than the pair's.
    """
    blocks = setting.blocks
    if blocks is None:
        blocks = default_blocks(block_size, few=setting.few_blocks)
    for rows in blocks:
        if not 2 <= rows <= block_size:
            raise UsageError(f"A block of {rows} is asked for; this pair has blocks of 2 to {block_size}.")
    notes: list[str] = []
    everyone, two = arms(own, blocks), arms(own, ())
    tasks: list[tuple[Task, list[Arm]]] = []
    for context in _within(setting, limit, name, notes):
        if context == 0:
            short = _numbered(setting.questions, 0, setting.new_tokens, lambda text: text)
            tasks += [(task, everyone) for task in short]
            continue
        asked = one_of_each(setting.questions)[: setting.long_questions]

        def fill(text: str, tokens: int = context) -> str:
            return filled(text, tokens, count_tokens)

        tasks += [(task, two) for task in _numbered(asked, context, setting.new_tokens, fill)]
    return Lineup(tasks, notes)


def default_blocks(block_size: int, *, few: bool) -> list[int]:
    """A few lengths and the whole block; half of it and the whole where there is little time."""
    shorter = (block_size // 2,) if few else (2, 4, 8)
    return [rows for rows in shorter if 2 <= rows < block_size] + [block_size]


def one_of_each(questions: Sequence[Question]) -> list[Question]:
    """The first question of each class."""
    return list({question.kind: question for question in reversed(questions)}.values())[::-1]


def _within(setting: Setting, limit: int | None, name: str, notes: list[str]) -> list[int]:
    """The contexts in order, none twice, none longer than the target takes."""
    room = None if limit is None else limit - setting.new_tokens
    found: list[int] = []
    for asked in sorted(set(setting.contexts)):
        context = asked if room is None else min(asked, max(room, 0))
        if context != asked:
            notes.append(
                f"{name} takes {limit} tokens, the answer included: prompts of {asked} are shortened to {context}."
            )
        if context not in found:
            found.append(context)
    return found


def _numbered(
    questions: Sequence[Question], context: int, new_tokens: int, fill: Callable[[str], str]
) -> list[Task]:
    seen: dict[str, int] = {}
    tasks = []
    for kind, text in questions:
        seen[kind] = seen.get(kind, 0) + 1
        tasks.append(Task(kind, seen[kind], fill(text), context, new_tokens))
    return tasks
