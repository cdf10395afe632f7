"""The end of a run: its folder in, an evaluation, a model card and pictures in the same folder out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash_mlx import runtime
from dflash_mlx.drafter import DraftConfig, load_draft
from dflash_mlx.errors import UsageError
from dflash_mlx.loading import LoadedTarget
from dflash_mlx.loading.licence import base_and_licence
from dflash_mlx.training.card import Made, model_card
from dflash_mlx.training.evaluate import Evaluation, evaluate, held_out_prompts
from dflash_mlx.training.manifest import MANIFEST, read_manifest
from dflash_mlx.training.pictures import evaluation_pictures, training_pictures
from dflash_mlx.training.records import read_answers
from dflash_mlx.training.stage import check_answers
from dflash_mlx.training.workspace import Log, Workspace, read_json, write_file

_SHOWN = (
    "init",
    "steps",
    "epochs",
    "learning_rate",
    "anchors",
    "surprising",
    "candidates",
    "soft",
    "gamma",
    "dpace",
    "seed",
    "seconds",
)


def measure_and_write(
    target: LoadedTarget,
    given: str | Path | None,
    workspace: Workspace,
    *,
    compare_with: str | Path | None = None,
    each: int = 4,
    max_new_tokens: int = 128,
    repeats: int = 1,
    tell: Callable[[float, str], None] = lambda share, text: None,
) -> Evaluation:
    """Measure the run's drafter on its held-out prompts, and write eval.json, README.md and figures.

    Args:
        target: loaded.
        given: how the target was named, to find its licence.
        workspace: with answers and a drafter.
        compare_with: a drafter to measure beside; None takes the one that the training began from, if it was one.
        each: prompts of each class.
        max_new_tokens: of each answer.
        repeats: times that each prompt is answered.
        tell: told after each prompt: the share that is done, and figures.

    Raises:
        UsageError: a folder without a drafter, without held-out answers, or of another target.
        LoadError: a drafter that cannot be had, or does not fit.
        WriteError: a file that cannot be written.
    """
    if not (workspace.drafter / "config.json").exists():
        raise UsageError(f"{workspace.drafter} holds no drafter yet; run the train stage first.")
    check_answers(target, workspace)
    run = read_json(workspace.run) or {}
    begun_from = run.get("init_drafter")
    prompts = held_out_prompts(list(read_answers([workspace.data])), each)
    done = 0

    def told(text: str) -> None:
        nonlocal done
        done += 1
        tell(done / (len(prompts) * repeats), text)

    measured = evaluate(
        target,
        workspace.drafter,
        prompts,
        old_draft=compare_with if compare_with is not None else begun_from,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        tell=told,
    )
    write_file(workspace.evaluation, json.dumps(measured.record(), indent=1) + "\n")
    write_card(given, workspace, measured, run)
    log = Log(workspace.log).read()
    for name, picture in (training_pictures(log) | evaluation_pictures(measured)).items():
        write_file(workspace.figures / name, picture)
    return measured


def write_card(
    given: str | Path | None, workspace: Workspace, measured: Evaluation | None, run: dict[str, Any]
) -> None:
    """Write the drafter's README.md.

    Raises:
        WriteError: it cannot be written.
    """
    network = load_draft(workspace.drafter, name="drafter")
    arrays: dict[str, mx.array] = dict(tree_flatten(network.parameters()))
    config: DraftConfig = network.config
    base, licence = base_and_licence(given, runtime.machine())
    made = Made(
        base=base,
        licence=licence,
        config=config,
        parameters=sum(array.size for array in arrays.values()),
        data=read_manifest(workspace.data) if (workspace.data / MANIFEST).exists() else None,
        training={name: run[name] for name in _SHOWN if run.get(name) is not None},
    )
    write_file(workspace.drafter / "README.md", model_card(made, measured))
