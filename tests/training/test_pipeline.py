"""All three stages over a tiny target: what comes out is a drafter that the generator loads, with its card."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from typer.testing import CliRunner

from dflash_mlx import DFlashGenerator
from dflash_mlx.cli.app import app
from dflash_mlx.drafter import load_draft, read_frequent
from dflash_mlx.errors import UsageError
from dflash_mlx.runtime import Machine
from dflash_mlx.training.begin import begin
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.records import Answer
from dflash_mlx.training.stage import check_answers, run_training
from dflash_mlx.training.workspace import Log, Workspace
from tests.training.kit import target_folder, tiny_loaded

CPU = Machine("cpu", "test", 16.0, "test", "test", mx.float32)
SMALL = [
    "--max-answer-tokens", "10", "--batch-size", "8", "--own-share", "0",
    "--layers", "1", "--block-size", "4", "--taps", "1,2", "--anchors", "4",
    "--limit", "1", "--max-new-tokens", "8",
]  # fmt: skip


def trained(out: Path, *arguments: str) -> dict[str, dict[str, object]]:
    command = [
        "train",
        "--target-model",
        str(target_folder()),
        "--out",
        str(out),
        *SMALL,
        *arguments,
        "--json",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_the_train_stage_writes_a_drafter_that_is_read_again(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    workspace.data.mkdir()
    lines = [Answer((5, 6, n), tuple(range(7 + n, 20 + n)), 0.0, "code").line() for n in range(4)]
    (workspace.data / "answers-00000.jsonl").write_text("\n".join(lines) + "\n")
    network = begin(tiny_loaded(), "target", machine=CPU, layers=1, block_size=4, taps=(1, 2))
    options = TrainOptions(steps=2, anchors=4, compiled=False, candidates=0, soft=0.0)
    said: list[str] = []
    done = run_training(
        tiny_loaded(), network, workspace, options, machine=CPU, begun_from="target", tell=said.append
    )
    assert done.finished and done.steps == 2
    stored = mx.load(str(workspace.drafter / "model.safetensors"))
    assert {array.dtype for array in stored.values()} == {mx.bfloat16}
    again = load_draft(workspace.drafter, dtype=mx.bfloat16, name="drafter")
    assert again.config.block_size == 4
    trained_weights = dict(tree_flatten(network.parameters()))
    for name, array in tree_flatten(again.parameters()):
        assert mx.array_equal(array, trained_weights[name]), name
    assert read_frequent(workspace.drafter, name="drafter") is not None
    assert "kept in memory" in said[0] and "of memory" in said[1] and "of disk" in said[1]
    assert json.loads(workspace.run.read_text())["init"] == "target"
    assert Log(workspace.log).read()[0]["step"] == 1


@pytest.mark.slow
def test_a_run_ends_in_a_drafter_that_is_loaded_and_measured(tmp_path: Path) -> None:
    out = tmp_path / "run"
    found = trained(out, "--tokens", "900", "--steps", "3")
    assert found["train"]["steps"] == 3 and found["train"]["finished"] is True
    assert found["data"]["held_out"] >= 1
    with DFlashGenerator(target_folder(), out / "drafter", mode="on") as runner:
        stats = runner.generate("Say it.", max_new_tokens=6, temperature=0.0).stats
        assert stats.block_size == 4 and stats.new_tokens == 6
    card = (out / "drafter/README.md").read_text()
    assert "## Training" in card and "## Answers" in card and "## Measured" in card
    assert read_frequent(out / "drafter", name="drafter") is not None
    assert Log(Workspace(out).log).read()[0]["step"] == 1
    Workspace(out).check()


def test_answers_of_another_target_are_refused(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    about = {"name": "Other", "weights": "0", "template": "0", "thinking": None}
    workspace.data.mkdir()
    manifest = {"format": "dflash-mlx answers 1", "target": about, "recipe": {}, "counts": {}}
    (workspace.data / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        UsageError, match="holds answers of Other, and this run is for target: the weights and the chat"
    ):
        check_answers(tiny_loaded(), workspace)


@pytest.mark.slow
def test_a_longer_run_learns_and_goes_on_from_its_drafter(tmp_path: Path) -> None:
    first = trained(tmp_path / "a", "--tokens", "3000", "--steps", "60")
    log = Log(Workspace(tmp_path / "a").log).read()
    losses = [row["loss"] for row in log if row["loss"] is not None]
    assert losses[-1] < losses[0]
    assert sorted(path.name for path in (tmp_path / "a/figures").iterdir()) == [
        "classes.svg", "loss.svg", "rounds.svg", "slots.svg",
    ]  # fmt: skip
    again = trained(tmp_path / "a", "--tokens", "3000", "--steps", "60")
    assert again["data"]["new_answers"] == 0
    assert again["train"]["simulated_tokens_per_round"] == first["train"]["simulated_tokens_per_round"]
    drafter = str(tmp_path / "a/drafter")
    arguments = [*SMALL[:6], *SMALL[12:]]  # its shape is the drafter's
    command = [
        "train",
        "--target-model",
        str(target_folder()),
        "--out",
        str(tmp_path / "b"),
        "--init",
        drafter,
    ]
    result = CliRunner().invoke(app, [*command, *arguments, "--tokens", "900", "--steps", "3", "--json"])
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["eval"]["classes"]
    assert {"new_tokens_per_round", "old_tokens_per_round"} <= set(rows[-1])
