"""Who runs when: interleaving, rotation, warm-up, rest, and what is left when somebody stops it."""

from collections import Counter

import pytest

from dflash_mlx.bench.arms import FixedLength, Task, arms, rotated, trials
from dflash_mlx.bench.lineup import Lineup, Setting, default_blocks, lineup
from dflash_mlx.bench.prompts import Question
from dflash_mlx.bench.race import race
from dflash_mlx.errors import UsageError
from tests.bench.made import TimedPair

OPTIONS = {"seed": 7}
ASKED = {"seed": 7, "max_new_tokens": 20}
QUESTIONS = [Question("code", "a"), Question("code", "b"), Question("prose", "c")]


def setting(**changes):
    made = {
        "questions": QUESTIONS,
        "contexts": [0],
        "blocks": [2, 4],
        "few_blocks": False,
        "long_questions": 9,
        "repeats": 2,
        "cooldown": 0.0,
        "new_tokens": 20,
        "options": OPTIONS,
    }
    return Setting(**{**made, **changes})


def line_up(limit=8192, **changes):
    return lineup(
        setting(**changes), own="auto", block_size=8, limit=limit, count_tokens=len, name="some target"
    )


def test_every_arm_comes_once_at_each_place():
    places = Counter()
    competing = arms("auto", [2, 4])
    for turn in range(8):
        for place, arm in enumerate(rotated(competing, turn)):
            places[place, arm.name] += 1
    assert len(places) == 16 and set(places.values()) == {2}


def test_arms_answer_one_prompt_after_the_other_in_turns():
    pair = TimedPair()
    tasks = [(Task("code", n, f"q{n}", 0, 20), arms("auto", [4])) for n in (1, 2)]
    found = list(trials(pair, tasks, options=OPTIONS, repeats=2))
    assert [(t.task.number, t.repeat) for t in found] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    measured = [(rows, prompt) for rows, prompt, options in pair.asked if options == ASKED]
    assert measured == [
        (0, "q1"), (None, "q1"), (4, "q1"),
        (None, "q2"), (4, "q2"), (0, "q2"),
        (None, "q1"), (4, "q1"), (0, "q1"),
        (4, "q2"), (0, "q2"), (None, "q2"),
    ]  # fmt: skip
    assert list(found[0].results) == ["plain", "auto", "block 4"], "the order in which they ran is kept"


def test_every_arm_runs_once_unmeasured_first():
    pair = TimedPair()
    tasks = [(Task("code", n, f"q{n}", 0, 20), arms("auto", [4])) for n in (1, 2)]
    list(trials(pair, tasks, options=OPTIONS, repeats=1))
    warm = [(rows, options["max_new_tokens"]) for rows, _, options in pair.asked[:3]]
    assert warm == [(0, 12), (None, 12), (4, 12)] and len(pair.asked) == 3 + 6


def test_the_rest_comes_before_every_measured_answer():
    pair, rests = TimedPair(), []
    tasks = [(Task("code", 1, "q", 0, 20), arms("auto", []))]
    list(
        trials(
            pair,
            tasks,
            options=OPTIONS,
            repeats=2,
            cooldown=1.5,
            sleep=lambda s: rests.append((s, len(pair.asked))),
        )
    )
    assert rests == [(1.5, 2), (1.5, 3), (1.5, 4), (1.5, 5)]


def test_texts_are_held_against_the_plain_one():
    pair = TimedPair(differs=["b"])
    found = list(trials(pair, line_up().tasks, options=OPTIONS, repeats=1))
    assert [set(t.differences) for t in found] == [{"auto", "block 2", "block 4"}] * 3
    assert [t.differences["auto"] is not None for t in found] == [False, True, False]


def test_ctrl_c_keeps_what_was_measured():
    told = []
    pair = TimedPair({0: 10.0, None: 15.0}, stop_after=4 + 4 + 4 + 2)
    outcome = race(pair, line_up(), setting(), own="auto", tell=told.append)
    assert outcome.interrupted and len(outcome.trials) == 2 and len(told) == 2
    assert [row.kind for row in outcome.rows] == ["code"]
    assert outcome.rows[0].figures("auto").speedup.median == pytest.approx(1.5)


@pytest.mark.parametrize("after", [0, 5])
def test_ctrl_c_before_anything_was_measured_is_a_ctrl_c(after):
    with pytest.raises(KeyboardInterrupt):
        race(TimedPair(stop_after=after), line_up(), setting(), own="auto", tell=print)


def test_progress_says_how_far_and_how_long():
    told, now = [], iter(range(0, 1000, 30))
    race(TimedPair(), line_up(), setting(), own="auto", tell=told.append, clock=lambda: next(now))
    assert (
        told[0] == "1 of 6, code 1: plain 10.0, auto 10.0, block 2 10.0, block 4 10.0 tok/s; about 2 min left"
    )
    assert told[-1].startswith("6 of 6, prose 1: ") and "left" not in told[-1]


def test_a_fixed_block_verifies_so_many_rows_and_no_more():
    policy = FixedLength(3)
    assert [policy.plan(depth=9, most=most).verify for most in (7, 3, 1, 0)] == [3, 3, 1, 0]


def test_blocks_default_to_a_few_and_the_whole():
    sizes = (2, 3, 5, 8, 16)
    assert [default_blocks(size, few=False) for size in sizes] == [
        [2],
        [2, 3],
        [2, 4, 5],
        [2, 4, 8],
        [2, 4, 8, 16],
    ]
    assert [default_blocks(size, few=True) for size in sizes] == [[2], [3], [2, 5], [4, 8], [8, 16]]


@pytest.mark.parametrize("rows", [1, 9])
def test_a_block_that_the_pair_does_not_have_is_refused(rows):
    with pytest.raises(UsageError, match=f"A block of {rows} is asked for; this pair has blocks of 2 to 8"):
        line_up(blocks=[2, rows])


def test_longer_contexts_ask_one_question_of_each_class_by_two_arms():
    found = line_up(contexts=[0, 1000])
    assert found.notes == [] and isinstance(found, Lineup)
    names = [(task.kind, task.number, task.context, len(competing)) for task, competing in found.tasks]
    assert [task.new_tokens for task, _ in found.tasks] == [20, 20, 20, 20, 20]
    assert names == [
        ("code", 1, 0, 4), ("code", 2, 0, 4), ("prose", 1, 0, 4), ("code", 1, 1000, 2), ("prose", 1, 1000, 2),
    ]  # fmt: skip
    for task, competing in found.tasks[-2:]:
        assert 800 < len(task.prompt) <= 1000 and task.prompt.endswith(" c" if task.kind == "prose" else " a")
        assert [arm.name for arm in competing] == ["plain", "auto"]


def test_a_context_that_the_target_does_not_take_is_shortened_and_said():
    found = line_up(limit=1020, contexts=[4096, 8192])
    assert found.notes == [
        f"some target takes 1020 tokens, the answer included: prompts of {asked} are shortened to 1000."
        for asked in (4096, 8192)
    ]
    assert [task.context for task, _ in found.tasks] == [1000, 1000], "none twice"
    assert all(len(task.prompt) <= 1000 for task, _ in found.tasks)


def test_other_work_on_the_machine_is_told():
    class Disturbed(TimedPair):
        def yardstick(self, prompt, **options):
            self.speeds[0] = 2.0 if prompt == "b" else 10.0
            return super().yardstick(prompt, **options)

    quiet = race(TimedPair(), line_up(), setting(), own="auto", tell=lambda _: None)
    busy = race(Disturbed(), line_up(), setting(), own="auto", tell=lambda _: None)
    assert quiet.notes == []
    assert busy.notes[0].startswith("In 2 of 6 trials plain decoding ran far below its usual speed")
