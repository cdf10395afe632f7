"""`dflash-mlx train`: options in, up to three stages, one record out. MLX is loaded late.

Each stage goes on where an earlier run of it was stopped, so Ctrl-C and the same command again lose little.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_mlx.cli.progress import duration, far_line
from dflash_mlx.cli.record import Record
from dflash_mlx.cli.train_options import RECIPE, TRAINING, TrainOptions, check, taps_of
from dflash_mlx.cli.view import mute, stderr_console
from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dflash_mlx.cli.view import View
    from dflash_mlx.drafter import DraftNetwork
    from dflash_mlx.loading import LoadedTarget
    from dflash_mlx.training.gather import Recipe
    from dflash_mlx.training.options import TrainOptions as Training
    from dflash_mlx.training.prompts import Prompt
    from dflash_mlx.training.workspace import Workspace

_TOKENS, _ROWS = 1_000_000, 2000
_EVALUATE = 250  # steps between measurements on held-out answers


def train(view: View, options: TrainOptions) -> int:
    """Run the stages; gives the exit code.

    Raises:
        UsageError: an option or a file that cannot be honoured, before any model work.
        DFlashError: a target, a folder or a disk that is not as it should be.
    """
    check(options)
    # Hours may lie between the first stage and the last: what only a later one would refuse is refused here.
    _recipe(options).check()
    _training(options)
    from dflash_mlx.training.workers import Workers
    from dflash_mlx.training.workspace import Workspace

    workers = Workers()
    if workers.size > 1 and options.stages != ("train",):
        raise UsageError(
            f"{workers.size} processes were launched, and only the train stage is for several; give --stage train."
        )
    if not workers.leads:
        view = mute()
    workspace = Workspace(Path(str(options.out)))
    workspace.check()
    prompts = _prompts(options) if "data" in options.stages else []
    taps_of(options.taps)
    if options.init is not None and Path(options.init).absolute() == workspace.drafter.absolute():
        raise UsageError(
            f"--init is {options.init}, the drafter that this run writes; copy it elsewhere, or give another --out."
        )
    target = _loaded(view, options)
    _foretried(options, target)
    found: Record = {}
    try:
        for stage in options.stages:
            found[stage] = _STAGES[stage](view, options, target, workspace, prompts)
            if stage == "data" and "eval" in options.stages and not found[stage]["held_out"]:
                raise UsageError(
                    f"None of the {found[stage]['answers']} answers is held out, so a drafter could not be measured; "
                    "gather more (one prompt in fifty is held out), or give --stage train to go on without."
                )
            if found[stage].get("finished") is False:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        again = shlex.join(["dflash-mlx", *sys.argv[1:]])
        view.say(f"Stopped; whole shards and checkpoints are kept. To go on, the same again: {again}")
        return 130
    if options.json:
        view.record(found)
    else:
        view.report(found)
    return 0


def _prompts(options: TrainOptions) -> list[Prompt]:
    from dflash_mlx.training.prompts import prompts_of_rows, read_prompts

    found = read_prompts(options.prompts or [])
    if options.dataset is not None:
        from dflash_mlx.loading.dataset_rows import dataset_rows

        found += prompts_of_rows(
            dataset_rows(options.dataset, options.dataset_rows or _ROWS), options.dataset
        )
    return found


def _loaded(view: View, options: TrainOptions) -> LoadedTarget:
    from dflash_mlx import runtime
    from dflash_mlx.loading import load_pair
    from dflash_mlx.loading.turns import check_template

    with view.loaded():
        pair = load_pair(
            options.target_model,
            mode="off",
            dtype=options.dtype,
            machine=runtime.machine(),
            on_load=view.loading,
        )
    for note in pair.notes:
        view.note(note)
    check_template(pair.target.tokenizer, pair.target.name)
    return pair.target


def _foretried(options: TrainOptions, target: LoadedTarget) -> None:
    """Let a later stage refuse now what it would refuse after hours."""
    from dflash_mlx import runtime
    from dflash_mlx.loading import load_pair

    if options.stages[0] == "data" and "train" in options.stages:
        _begun(options, target)
    if options.compare_with is not None and options.stages[0] != "eval":
        load_pair(target, options.compare_with, mode="on", machine=runtime.machine())


def _begun(
    options: TrainOptions, target: LoadedTarget, tell: Callable[[str], None] = lambda text: None
) -> DraftNetwork:
    from dflash_mlx import runtime
    from dflash_mlx.training.begin import begin

    return begin(
        target,
        options.init or "target",
        machine=runtime.machine(),
        tell=tell,
        layers=options.layers,
        block_size=options.block_size,
        taps=taps_of(options.taps),
        seed=_training(options).seed,
    )


def _recipe(options: TrainOptions) -> Recipe:
    from dflash_mlx.training.gather import Recipe

    return Recipe(**options.of(*RECIPE))


def _training(options: TrainOptions) -> Training:
    from dflash_mlx.training.options import TrainOptions as Training

    return Training(**{"evaluate_steps": _EVALUATE, **options.of(*TRAINING)})


def _data(
    view: View, options: TrainOptions, target: LoadedTarget, workspace: Workspace, prompts: list[Prompt]
) -> Record:
    from dflash_mlx.training.gather import Progress, gather

    goal = options.tokens or _TOKENS
    with far_line(stderr_console(), "data") as line:

        def show(at: Progress) -> None:
            line.at(
                at.tokens / at.goal,
                f"{at.tokens:,} of {at.goal:,} tokens, {at.tokens_per_second:.0f}/s, {duration(at.seconds_left)} left",
            )

        done = gather(
            target,
            workspace.data,
            tokens=goal,
            prompts=prompts,
            think=options.think,
            recipe=_recipe(options),
            on_progress=show,
            tell=view.note,
        )
    for note in done.notes:
        view.note(note)
    counts = done.counts
    return {
        "folder": str(done.folder),
        "answers": counts.answers,
        "new_answers": done.new_answers,
        "answer_tokens": counts.answer_tokens,
        "held_out": counts.held_out,
        "seconds": round(done.seconds, 1),
        "classes": [{"class": kind, **row} for kind, row in sorted(counts.by_class.items())],
    }


def _train(
    view: View, options: TrainOptions, target: LoadedTarget, workspace: Workspace, prompts: list[Prompt]
) -> Record:
    from dflash_mlx import runtime
    from dflash_mlx.training.progress import Progress
    from dflash_mlx.training.stage import run_training

    training = _training(options)
    begun_from = options.init or "target"
    network = _begun(options, target, view.note)
    with far_line(stderr_console(), "train") as line:

        def show(at: Progress) -> None:
            slots = ", ".join(f"{share:.0%}" for share in at.agreeing[:3])
            line.at(
                at.step / max(1, at.steps),
                f"step {at.step:,} of {at.steps:,}, loss {at.loss:.3f}, slots {slots}, "
                f"{duration(at.seconds_left)} left",
            )

        done = run_training(
            target,
            network,
            workspace,
            training,
            machine=runtime.machine(),
            begun_from=begun_from,
            report=show,
            tell=view.note,
        )
    measured = done.measured
    return {
        "drafter": str(workspace.drafter) if done.finished else None,
        "steps": done.steps,
        "finished": done.finished,
        "simulated_tokens_per_round": measured.tokens_per_round if measured else None,
        "peak_memory_gb": round(runtime.peak_memory_gb(), 2),
    }


def _eval(
    view: View, options: TrainOptions, target: LoadedTarget, workspace: Workspace, prompts: list[Prompt]
) -> Record:
    from dflash_mlx.training.report import measure_and_write

    with far_line(stderr_console(), "eval") as line:
        measured = measure_and_write(
            target,
            options.target_model,
            workspace,
            compare_with=options.compare_with,
            each=options.limit or 4,
            max_new_tokens=options.max_new_tokens or 128,
            tell=line.at,
        )
    rows = []
    for row in measured.rows:
        shown: Record = {
            "class": row.prompt_class,
            "prompts": row.prompts,
        }
        for arm, figures in row.figures.items():
            shown |= {f"{arm}_tokens_per_round": figures.tokens_per_round, f"{arm}_speedup": figures.speedup}
        rows.append(shown)
    return {"drafter": str(workspace.drafter), "card": str(workspace.drafter / "README.md"), "classes": rows}


_STAGES: dict[str, Callable[..., Record]] = {"data": _data, "train": _train, "eval": _eval}
