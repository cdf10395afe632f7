"""The train stage: a run's folder with answers in, checkpoints, a log and the drafter's folder out.

Puts the trainer, its features and its files together; the training itself is the trainer's.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

import mlx.core as mx

from dflash_mlx.drafter import DraftNetwork, count_words, save_draft, write_frequent
from dflash_mlx.errors import UsageError, WriteError
from dflash_mlx.loading import LoadedTarget
from dflash_mlx.runtime import GB, Machine
from dflash_mlx.target import MLXTarget
from dflash_mlx.training.identity import Identity, fingerprint, identity
from dflash_mlx.training.loop import train
from dflash_mlx.training.manifest import MANIFEST, read_manifest
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.progress import Progress, TrainResult
from dflash_mlx.training.records import Answer, read_answers
from dflash_mlx.training.store import FeatureStore, bytes_per_answer
from dflash_mlx.training.workers import Workers
from dflash_mlx.training.workspace import Log, Workspace, write_file

_MEMORY_SHARE = 0.25  # of the machine's, for features
_DISK_SHARE = 0.5  # of what is free, likewise
_LOG_EVERY = 10  # steps


def run_training(
    target: LoadedTarget,
    network: DraftNetwork,
    workspace: Workspace,
    options: TrainOptions,
    *,
    machine: Machine,
    begun_from: str,
    report: Callable[[Progress], None] = lambda progress: None,
    tell: Callable[[str], None] = lambda text: None,
) -> TrainResult:
    """Train on the run's answers and write the drafter, once it is trained to the end.

    Args:
        target: loaded; the one that gave the answers.
        network: to begin from, in float32; is changed, and in bfloat16 after the end.
        workspace: of the run.
        options: how to train.
        machine: bounds what is kept of features.
        begun_from: "target", "random" or a drafter, for the card.
        report: called after each step.
        tell: told what is kept where, and what the run will take.

    Raises:
        UsageError: no answers, or answers or a checkpoint of another target.
        WriteError: a full disk; checkpoints stay.
    """
    workers = Workers()
    answers = list(read_answers([workspace.data]))
    check_answers(target, workspace)
    store = _store(target.model, network, workspace, answers, options, machine, tell, workers)
    log = Log(workspace.log)

    def told(progress: Progress) -> None:
        if progress.step % _LOG_EVERY == 0 or progress.step == 1 or progress.measured:
            log.add(_line(progress))
        report(progress)

    try:
        result = train(
            target.model,
            network,
            answers,
            options,
            checkpoints=workspace.checkpoints,
            store=store,
            begun_from=begun_from,
            foresee=lambda estimate: tell(str(estimate)),
            report=told,
        )
    finally:
        if store is not None:
            store.close()
    whole = (workspace.drafter / "config.json").exists() and workspace.run.exists() and not result.new_steps
    if result.finished and workers.leads and not whole:
        about = {name: value for name, value in asdict(options).items() if value is not None}
        about |= {"init": begun_from, "steps": result.steps}
        about |= {"epochs": round(result.epochs, 2), "seconds": round(result.seconds)}
        if begun_from not in ("target", "random"):
            about["init_drafter"] = begun_from
        if result.measured:
            about["simulated_tokens_per_round"] = result.measured.tokens_per_round
            log.add(
                {"step": result.steps + 1, "loss": None, "tokens_per_round": result.measured.tokens_per_round}
            )
        write_file(workspace.run, json.dumps(about, indent=1) + "\n")
        write_drafter(network, workspace, answers, target.model.vocab_size)
    return result


def check_answers(target: LoadedTarget, workspace: Workspace) -> None:
    """Refuse answers of another target; answers without a manifest are taken as they are.

    Raises:
        UsageError: saying what differs.
    """
    if not (workspace.data / MANIFEST).exists():
        return
    theirs = Identity(**read_manifest(workspace.data)["target"])
    if wrong := identity(target, think=theirs.thinking).differences(theirs):
        raise UsageError(
            f"{workspace.data} holds answers of {theirs.name}, and this run is for {target.name}: "
            f"{' and '.join(wrong)} differ. Gather answers of this target in another folder."
        )


def write_drafter(
    network: DraftNetwork, workspace: Workspace, answers: Sequence[Answer], vocab_size: int
) -> None:
    """Write the drafter's folder in one step, in bfloat16, with the words that its target says most.

    Raises:
        WriteError: it cannot be written; a drafter that was there stays.
    """
    partial = workspace.root / ".drafter.partial"
    network.set_dtype(mx.bfloat16)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        save_draft(network, partial)
        with suppress(ValueError):  # hardly any answers
            words = count_words((answer.answer_ids for answer in answers), vocab_size=vocab_size)
            write_frequent(partial, words)
        if workspace.drafter.exists():
            shutil.rmtree(workspace.drafter)
        os.replace(partial, workspace.drafter)
    except (OSError, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise WriteError(
            f"{workspace.drafter} cannot be written: {error}. The last checkpoint is kept; make room and run the same "
            "command again."
        ) from None


def _store(
    target: MLXTarget,
    network: DraftNetwork,
    workspace: Workspace,
    answers: Sequence[Answer],
    options: TrainOptions,
    machine: Machine,
    tell: Callable[[str], None],
    workers: Workers,
) -> FeatureStore | None:
    """Where this process keeps features: in memory where they fit, else on the disk, else nowhere."""
    taps = network.config.target_layer_ids
    width, top = len(taps) * target.hidden_size, options.kept_top
    size = sum(
        bytes_per_answer(len(answer.ids) - 1, len(answer.answer_ids) - 1, width=width, top_k=top)
        for answer in answers
    )
    about = {"target": fingerprint(target), "taps": list(taps)}
    if workers.size * size <= _MEMORY_SHARE * machine.memory_gb * GB:
        tell(f"The target's hidden states are kept in memory ({size / GB:.1f} GB).")
        return FeatureStore(None, width=width, top_k=top, about=about)
    folder = workspace.train / ("features" if workers.size == 1 else f"features-{workers.rank + 1}")
    folder.mkdir(parents=True, exist_ok=True)
    kept = sum(file.stat().st_size for file in folder.iterdir())  # of an earlier run of the same
    if workers.size * (size - kept) <= _DISK_SHARE * shutil.disk_usage(folder).free:
        tell(f"The target's hidden states are kept in {folder} ({size / GB:.1f} GB).")
        return FeatureStore(folder, width=width, top_k=top, about=about)
    tell(f"The target's hidden states ({size / GB:.1f} GB) fit nowhere: they are computed anew each time.")
    return None


def _line(progress: Progress) -> dict[str, object]:
    line: dict[str, object] = {
        "step": progress.step,
        "epoch": progress.epoch,
        "loss": progress.loss,
        "agreeing": list(progress.agreeing),
        "learning_rate": progress.learning_rate,
        "seconds": round(progress.seconds, 1),
    }
    if progress.measured:
        line["tokens_per_round"] = progress.measured.tokens_per_round
        line["accepted"] = list(progress.measured.accepted)
    return line
