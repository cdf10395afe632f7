"""A whole race: a lineup in, its trials and rows out, also when somebody stops it on the way."""

import time
from collections.abc import Callable

from dflash_mlx.bench.arms import Subject, Trial, trials
from dflash_mlx.bench.lineup import Lineup, Setting
from dflash_mlx.bench.report import Outcome
from dflash_mlx.bench.summary import disturbed, in_order, rows


def race(
    subject: Subject,
    lineup: Lineup,
    setting: Setting,
    *,
    own: str,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome:
    """Run everything; Ctrl-C ends it with what was measured so far.

    Args:
        subject: the pair.
        lineup: what to run.
        setting: how often, with what rest and with which options.
        own: the arm of the generator's own policy.
        tell: told after each trial how far this is.
        clock: seconds.

    Raises:
        KeyboardInterrupt: before anything was measured.
    """
    total, done, interrupted = len(lineup.tasks) * setting.repeats, list[Trial](), False
    since = clock()
    try:
        for trial in trials(
            subject,
            lineup.tasks,
            options=setting.options,
            repeats=setting.repeats,
            cooldown=setting.cooldown,
        ):
            done.append(trial)
            tell(_progress(trial, own, len(done), total, (clock() - since) / len(done)))
    except KeyboardInterrupt:
        if not done:
            raise
        interrupted = True
    notes = list(lineup.notes)
    if slow := disturbed(done):
        notes.append(
            f"In {slow} of {len(done)} trials plain decoding ran far below its usual speed: something else kept the "
            "machine busy. Measure again."
        )
    return Outcome(
        own=own,
        trials=done,
        rows=rows(done, own),
        notes=notes,
        interrupted=interrupted,
        seconds=clock() - since,
    )


def _progress(trial: Trial, own: str, done: int, total: int, each: float) -> str:
    task = trial.task
    name = f"{task.kind} {task.number}" + (f" after {task.context:,} tokens" if task.context else "")
    speeds = ", ".join(
        f"{arm} {trial.results[arm].stats.tokens_per_second:.1f}" for arm in in_order(trial.results, own)
    )
    left = each * (total - done)
    time_left = f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s"
    return f"{done} of {total}, {name}: {speeds} tok/s" + (f"; about {time_left} left" if left else "")
