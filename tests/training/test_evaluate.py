"""The eval stage: the real engine's figures, a card that says them, and files that the run's folder keeps."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dflash_mlx import DFlashGenerator
from dflash_mlx.bench.summary import Position
from dflash_mlx.drafter import load_draft
from dflash_mlx.errors import UsageError, WriteError
from dflash_mlx.loading.licence import base_and_licence
from dflash_mlx.runtime import Machine
from dflash_mlx.training.card import Made, model_card
from dflash_mlx.training.evaluate import NEW, OLD, Evaluation, evaluate, held_out_prompts
from dflash_mlx.training.pictures import training_pictures
from dflash_mlx.training.records import Answer, is_held_out
from dflash_mlx.training.report import measure_and_write
from dflash_mlx.training.workspace import Log, Workspace, write_file
from tests.loading.checkpoints import write_draft
from tests.training.kit import target_folder, tiny_loaded


def held_out(count: int, kind: str, length: int = 4) -> list[Answer]:
    found, number = [], 0
    while len(found) < count:
        number += 1
        answer = Answer((5, number % 200, number // 200, len(kind)), tuple(range(length)), 0.0, kind)
        if is_held_out(answer):
            found.append(answer)
    return found


def bare(draft: Path) -> Made:
    config = load_draft(draft, name="drafter").config
    return Made(base="x", licence=None, config=config, parameters=1, data=None, training=None)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Evaluation, Path]:
    draft = write_draft(tmp_path_factory.mktemp("drafts") / "new")
    prompts = held_out(2, "code") + held_out(1, "maths")
    return evaluate(tiny_loaded(), draft, prompts, old_draft=draft, max_new_tokens=10), draft


def test_figures_are_those_of_the_engine(measured: tuple[Evaluation, Path]) -> None:
    found, draft = measured
    assert [row.prompt_class for row in found.rows] == ["code", "maths", "all"]
    assert [row.prompts for row in found.rows] == [2, 1, 3]
    rounds = tokens = 0
    with DFlashGenerator(tiny_loaded(), draft, mode="on", kept_gb=0) as runner:
        for prompt in held_out(2, "code"):
            stats = runner.generate(list(prompt.prompt_ids), max_new_tokens=10, temperature=0.0).stats
            rounds, tokens = rounds + stats.rounds, tokens + stats.new_tokens - 1
    code = found.rows[0].figures[NEW]
    assert code.tokens_per_round == pytest.approx(tokens / rounds)
    assert code.identical == 2 and found.all.figures[NEW].identical == 3
    assert code.speedup > 0 and found.all.plain_tokens_per_second > 0
    assert (
        found.all.figures[OLD].tokens_per_round == found.all.figures[NEW].tokens_per_round
    )  # the same drafter
    assert found.positions[NEW][0].reached >= 3
    json.dumps(found.record())


def test_a_folder_of_another_target_is_not_measured(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    write_draft(workspace.drafter)
    workspace.data.mkdir()
    about = {"name": "Other", "weights": "0", "template": "0", "thinking": None}
    manifest = {"format": "dflash-mlx answers 1", "target": about, "recipe": {}, "counts": {}}
    (workspace.data / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="holds answers of Other"):
        measure_and_write(tiny_loaded(), None, workspace)
    assert not workspace.evaluation.exists()


def test_prompts_are_held_out_ones_of_every_class() -> None:
    given = held_out(3, "code") + held_out(1, "chat") + held_out(1, "code", length=9)
    others = [Answer((1, 2, n), (3, 4)) for n in range(40)]
    others = [answer for answer in others if not is_held_out(answer)]
    chosen = held_out_prompts(given + others, 2)
    assert [answer.prompt_class for answer in chosen] == ["chat", "code", "code"]
    assert len(chosen[1].answer_ids) == 9 and all(map(is_held_out, chosen))
    with pytest.raises(UsageError, match="None of the .* answers is held out"):
        held_out_prompts(others, 2)


def test_the_card_says_how_it_was_made_and_what_was_measured(measured: tuple[Evaluation, Path]) -> None:
    found, draft = measured
    network = load_draft(draft, name="drafter")
    manifest = {
        "target": {"name": "tiny", "weights": "w0", "template": "t0", "thinking": None},
        "recipe": {"temperature": 0.7, "prompts": 0, "seed": 3},
        "counts": {
            "answers": 1200,
            "answer_tokens": 34567,
            "held_out": 20,
            "sampled": 300,
            "by_class": {"code": {"answers": 1200, "answer_tokens": 34567}},
        },
    }
    made = Made(
        base="some/Target",
        licence="apache-2.0",
        config=network.config,
        parameters=12345,
        data=manifest,
        training={"steps": 400, "learning_rate": 6e-4},
    )
    card = model_card(made, found)
    assert card.startswith("---\nlicense: apache-2.0\nbase_model: some/Target\n")
    for said in (
        "1,200 by the target itself",
        "34,567 tokens",
        "25% at temperature 0.7",
        "weights w0",
        "| 0.0006 |",
    ):
        assert said in card, said
    assert f"| {found.all.figures[NEW].tokens_per_round:.2f} |" in card and "before: speed-up" in card
    without = model_card(
        Made(base="x", licence=None, config=network.config, parameters=1, data=None, training=None), None
    )
    assert "license:" not in without and "state none" in without and "Measured" not in without


def test_the_runs_folder_gets_measurement_card_and_pictures(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    with pytest.raises(UsageError, match="holds no drafter yet"):
        measure_and_write(tiny_loaded(), target_folder(), workspace)
    write_draft(workspace.drafter)
    workspace.data.mkdir()
    lines = [answer.line() for answer in held_out(2, "code")]
    (workspace.data / "answers-00000.jsonl").write_text("\n".join(lines) + "\n")
    log = Log(workspace.log)
    for step in range(1, 200):
        log.add({"step": step, "loss": 5.0 - step / 50, "agreeing": [step / 200] * 7})
    log.add({"step": 200, "loss": 1.0, "agreeing": [1.0] * 7, "tokens_per_round": 3.0})
    measure_and_write(tiny_loaded(), target_folder(), workspace, each=1, max_new_tokens=6)
    workspace.check()
    assert json.loads(workspace.evaluation.read_text())["rows"][-1]["prompts"] == 1
    assert "# DFlash drafter for target" in (workspace.drafter / "README.md").read_text()
    names = sorted(path.name for path in workspace.figures.iterdir())
    assert names == ["classes.svg", "loss.svg", "rounds.svg", "slots.svg"]
    for name in names:
        ElementTree.parse(workspace.figures / name)


def test_the_log_of_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.jsonl")
    assert log.read() == [] and training_pictures([]) == {}
    for step, loss in ((1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5), (3, 3.5)):
        log.add({"step": step, "loss": loss})
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')  # killed while it wrote
    assert [(row["step"], row["loss"]) for row in log.read()] == [(1, 5.0), (2, 4.5), (3, 3.5)]


def test_a_folder_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_text("x")
    with pytest.raises(UsageError, match=r"holds holiday\.jpg, which is no part of a training run"):
        Workspace(tmp_path).check()
    with pytest.raises(UsageError, match="is a file"):
        Workspace(tmp_path / "holiday.jpg").check()
    with pytest.raises(WriteError, match="cannot be written"):
        write_file(tmp_path / "holiday.jpg" / "x", "text")


def test_the_licence_is_the_targets_own(tmp_path: Path, cpu: Machine) -> None:
    folder = tmp_path / "My-Fine-Tune"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert base_and_licence(folder, cpu) == ("My-Fine-Tune", None)
    (folder / "README.md").write_text('---\ntags: [x]\nlicense: "llama3.1"\n---\nlicense: not-this\n')
    assert base_and_licence(folder, cpu) == ("My-Fine-Tune", "llama3.1")
    assert base_and_licence(None, cpu) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")


@pytest.fixture
def cpu() -> Machine:
    import mlx.core as mx

    return Machine("cpu", "test", 16.0, "test", "test", mx.float32)


def test_places_are_told_with_the_chance_of_getting_so_far(measured: tuple[Evaluation, Path]) -> None:
    found, draft = measured
    places = {NEW: (Position(10, 5), Position(5, 4))}
    shown = Evaluation(found.rows, places, found.drafts, found.options, found.machine, found.dtype)
    made = Made(
        base="x",
        licence=None,
        config=load_draft(draft, name="d").config,
        parameters=1,
        data=None,
        training=None,
    )
    assert "50%, 80%" in model_card(made, shown) and "50%, 40%" in model_card(made, shown)
