"""`dflash-mlx bench`: options in, a race, a table on stdout and files in a folder out. MLX is loaded late."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_mlx.cli.bench_options import SEED, BenchOptions
from dflash_mlx.cli.options import check_values, flag
from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dflash_mlx.bench import Setting
    from dflash_mlx.bench.prompts import Question
    from dflash_mlx.cli.view import View
    from dflash_mlx.generator import DFlashGenerator

_BUSY = 0.5  # load for each core above which figures are not to be trusted


def bench(view: View, options: BenchOptions, load: Callable[..., DFlashGenerator]) -> int:
    """Measure; gives the exit code.

    Raises:
        UsageError: an option that cannot be honoured, before any model work.
        DFlashError: a pair or a data set that cannot be had.
    """
    check_values(options)
    if options.mode == "off":
        raise UsageError(
            "--mode off decodes without a drafter, which leaves nothing to measure; leave it out."
        )
    from dflash_mlx.bench.report import load_per_core, prepare

    folder = Path(options.out or f"dflash-bench/{datetime.now():%Y-%m-%d-%H%M%S}")
    setting = _setting(options, view.note)
    prepare(folder)
    if (busy := load_per_core()) is not None and busy > _BUSY:
        view.note(
            f"The machine is busy ({busy:.0%} of its cores): speeds and ratios measured now will mislead."
        )
    return _measure(view, options, load, setting, folder)


def _measure(
    view: View, options: BenchOptions, load: Callable[..., DFlashGenerator], setting: Setting, folder: Path
) -> int:
    from dflash_mlx.bench import Pair, lineup, pictures, race
    from dflash_mlx.bench.report import RESULT, as_text, record, write
    from dflash_mlx.cli.bench_tables import tables

    own = options.mode or "auto"
    with load(**options.model(), on_note=view.note) as generator:
        pair = Pair(generator.engine)
        engine = pair.engine
        runs = lineup(
            setting,
            own=own,
            block_size=engine.block_size or 0,
            limit=engine.pair.target.model.max_positions,
            count_tokens=lambda text: pair.count(text, think=options.think),
            name=generator.target_name,
        )
        for note in runs.notes:
            view.note(note)
        view.say(f"{len(runs.tasks) * setting.repeats} trials; Ctrl-C ends them and keeps what was measured.")
        outcome = race(pair, runs, setting, own=own, tell=view.say)
        found = record(outcome, engine, command=["dflash-mlx", *sys.argv[1:]], options=_told(setting))
        # First what cannot be had again.
        files = [write(folder, RESULT, as_text(found))]
        files += [
            write(folder, name, text) for name, text in pictures(outcome.rows, own, engine.curve).items()
        ]
    if options.json:
        view.record(found)
    else:
        view.tables(tables(outcome))
    for note in outcome.notes:
        view.note(note)
    view.say(f"Written: {', '.join(shlex.quote(str(file)) for file in files)}")
    return 130 if outcome.interrupted else 0


def _setting(options: BenchOptions, note: Callable[[str], None]) -> Setting:
    from dflash_mlx.bench import Setting

    quick = options.quick
    given = options.max_new_tokens
    contexts = _numbers("context", options.context or ("0,2k" if quick else "0"))
    return Setting(
        questions=_questions(options, note),
        contexts=contexts,
        blocks=_numbers("blocks", options.blocks) if options.blocks else None,
        few_blocks=quick,
        long_questions=2 if quick else 100,
        repeats=_at_least(1, "repeats", options.repeats, 1 if quick else 3),
        cooldown=_at_least(0, "cooldown", options.cooldown, 0),
        new_tokens=given or (64 if quick else 128),
        options={"seed": SEED} | options.answer(),
    )


def _questions(options: BenchOptions, note: Callable[[str], None]) -> list[Question]:
    """Built-in ones unless only data sets are asked for."""
    from dflash_mlx.bench.prompts import CLASSES, MOST, Question, check_classes, questions

    each = _at_least(1, "limit", options.limit, 2 if options.quick else 4)
    kinds = _names("classes", options.classes) if options.classes is not None else []
    sets = _names("dataset", options.dataset) if options.dataset is not None else []
    check_classes(kinds)
    if not sets and not kinds:
        kinds = list(CLASSES)
    if kinds and each > MOST:
        note(f"A class has {MOST} built-in questions; all of them are asked.")
    found = questions(kinds, each)
    if sets:
        from dflash_mlx.loading.datasets import check_datasets, dataset_questions

        check_datasets(sets)
        found += [Question(name, text) for name in sets for text in dataset_questions(name, each)]
    return found


def _names(name: str, text: str) -> list[str]:
    """The parts of a list, none twice."""
    found = [part.strip() for part in text.split(",")]
    if not all(found) or len(set(found)) < len(found):
        raise UsageError(f"{flag(name)} is {text!r}; expected names with commas between them, none twice.")
    return found


def _numbers(name: str, text: str) -> list[int]:
    """The numbers of a list; k stands for 1024."""
    found = []
    for part in text.split(","):
        digits = part.strip().lower()
        number, factor = (digits[:-1], 1024) if digits.endswith("k") else (digits, 1)
        if not (number.isascii() and number.isdigit()) or len(number) > 9:
            raise UsageError(
                f"{flag(name)} is {text!r}; expected whole numbers with commas between them, such as 0,4k."
            )
        found.append(int(number) * factor)
    return found


def _at_least(least: int, name: str, value: Any, unset: Any) -> Any:
    if value is None:
        return unset
    if not least <= value < 1e6:
        raise UsageError(f"{flag(name)} is {value}; expected {least} or more.")
    return value


def _told(setting: Setting) -> dict[str, Any]:
    """The setting as it stands in the record."""
    classes = list(dict.fromkeys(question.kind for question in setting.questions))
    return {
        "classes": classes,
        "questions": len(setting.questions),
        "contexts": list(setting.contexts),
        "blocks": setting.blocks and list(setting.blocks),
        "repeats": setting.repeats,
        "cooldown": setting.cooldown,
        "max_new_tokens": setting.new_tokens,
        **setting.options,
    }
