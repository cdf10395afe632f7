"""`dflash-mlx doctor --diagnose`: options in, what acceptance depends on out. MLX is loaded late; draws nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dflash_mlx.cli.doctor_options import DoctorOptions
from dflash_mlx.cli.options import check_values
from dflash_mlx.cli.prompt import read_file
from dflash_mlx.cli.record import Record
from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    from dflash_mlx.bench.diagnosis import Diagnosis
    from dflash_mlx.bench.prompts import Question
    from dflash_mlx.cli.view import View
    from dflash_mlx.engine import Engine
    from dflash_mlx.generator import DFlashGenerator

_BETWEEN = re.compile("^---$", re.MULTILINE)


def diagnose_pair(view: View, options: DoctorOptions, load: Callable[..., DFlashGenerator]) -> Record:
    """Load the pair, find out, and give everything as one record.

    Raises:
        UsageError: an option that cannot be honoured, before any model work.
        DFlashError: a pair that cannot be had.
    """
    check_values(options)
    if options.mode is not None:
        raise UsageError(
            f"--mode {options.mode} changes no acceptance: whole blocks are verified; leave it out."
        )
    if options.raw and (options.system is not None or options.think is not None):
        raise UsageError(
            "--raw uses no chat template, which --system, --think and --no-think need; leave one out."
        )
    questions = _questions(options)
    from dflash_mlx.bench import Pair
    from dflash_mlx.bench.diagnosis import diagnose

    loading = options.model()
    with load(**loading, mode="on", on_note=view.note) as generator:
        pair = Pair(generator.engine)

        @contextmanager
        def again(changes: Mapping[str, Any], whole: bool) -> Iterator[Engine]:
            arguments = {**loading, **changes, "mode": "on"}
            if not whole:
                arguments |= {"target_model": generator.target}
            given = {name: value for name, value in arguments.items() if value is not None}
            with load(**given) as other:
                yield other.engine

        found = diagnose(
            pair, questions, options=options.answer(), loading=loading, again=again, tell=view.say
        )
        names = {"target": generator.target_name, "drafter": generator.draft_name}
    return {"pair": names} | _record(found)


def for_reading(record: Record) -> Record:
    """The record as a person reads it: rates as text, the sentence that matters last."""
    return {
        "pair": record["pair"],
        "acceptance (whole blocks)": [
            {
                "prompts": row["class"],
                "answers": row["answers"],
                "rounds": row["rounds"],
                "tokens per round": f"{row['tokens_per_round']:.2f}",
                "right up to place 1, 2, 3 ...": " ".join(f"{rate:.0%}" for rate in row["right_up_to"])
                or "-",
            }
            for row in record["acceptance"]
        ],
        "shape": [record["shape"]],
        "one thing changed": [
            {
                "what": row["what"],
                "now": row["now"],
                "instead": row["instead"],
                "tokens per round": f"{row['tokens_per_round']:.2f} -> {row['tokens_per_round_instead']:.2f}",
                "ratio (quartiles)": "{median:.2f} ({low:.2f}-{high:.2f})".format(**row["gain"]),
                "evidence of a gain": row["evidence"],
            }
            for row in record["findings"]
        ],
        "not changed": [f"{row['what']}: {row['why']}" for row in record["untried"]],
        "conclusion": [record["conclusion"]],
    }


def _record(found: Diagnosis) -> Record:
    from dflash_mlx.bench.summary import all_the_way

    return {
        "acceptance": [
            {
                "class": row.kind,
                "answers": row.answers,
                "rounds": row.rounds,
                "tokens_per_round": row.tokens_per_round,
                "right_up_to": all_the_way(row.places),
                "places": [asdict(place) for place in row.places],
            }
            for row in found.by_class
        ],
        "shape": found.shape,
        "findings": [asdict(row) for row in found.findings],
        "untried": [asdict(row) for row in found.untried],
        "conclusion": found.conclusion,
    }


def _questions(options: DoctorOptions) -> list[Question]:
    from dflash_mlx.bench.prompts import CLASSES, Question, questions

    limit = 1 if options.limit is None else options.limit
    if limit < 1:
        raise UsageError(f"--limit is {limit}; expected 1 or more.")
    if options.prompt_file is None:
        return questions(list(CLASSES), limit)
    if options.limit is not None:
        raise UsageError("--limit is for built-in questions; leave it out beside --prompt-file.")
    text = read_file(options.prompt_file, f"--prompt-file {options.prompt_file}")
    parts = [part.strip() for part in _BETWEEN.split(text)]
    if not all(parts):
        raise UsageError(f"--prompt-file {options.prompt_file} holds an empty prompt.")
    return [Question("prompts", part) for part in parts]
