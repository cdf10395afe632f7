"""`dflash-mlx train`: what it refuses before anything is loaded, and its stages over a tiny target."""

import json
from pathlib import Path

import pytest

from dflash_mlx.cli import train as command
from tests.training.kit import target_folder

SMALL = ["--tokens", "40", "--max-answer-tokens", "6", "--batch-size", "4", "--own-share", "0"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target-model", "x"], "--out is missing"),
        (["--out", "o", "--stage", "both"], "--stage is both; expected one of data, train, eval"),
        (["--out", "o", "--stage", "data", "--epochs", "3"], "--epochs belongs to the train stage"),
        (["--out", "o", "--stage", "train", "--tokens", "3"], "--tokens belongs to the data stage"),
        (["--out", "o", "--stage", "data", "--limit", "3"], "--limit belongs to the eval stage"),
        (["--out", "o", "--stage", "train", "--think"], "--think belongs to the data stage"),
        (["--out", "o", "--stage", "eval", "--seed", "1"], "--seed says nothing to the eval stage"),
        (["--out", "o", "--init", "o/drafter"], "--init is o/drafter, the drafter that this run writes"),
        (["--out", "o", "--surprising", "1"], "surprising is 1"),
        (["--out", "o", "--tokens", "0"], "--tokens is 0; expected 1 or more"),
        (["--out", "o", "--block-size", "1"], "--block-size is 1; expected 2 or more"),
        (["--out", "o", "--steps", "5", "--epochs", "1"], "--steps and --epochs both"),
        (["--out", "o", "--steps", "0"], "steps is 0"),
        (["--out", "o", "--learning-rate", "-1"], "learning_rate is -1"),
        (["--out", "o", "--sampled-share", "2"], "sampled_share is 2"),
        (["--out", "o", "--dataset-rows", "5"], "--dataset-rows without --dataset"),
        (["--out", "o", "--init", "some/drafter", "--layers", "2"], "--layers is fixed by the drafter"),
        (["--out", "o", "--taps", "1,b"], "--taps is '1,b'; expected layer numbers"),
        (["--out", "o", "--seed", "-1"], "--seed is -1; expected 0 or more"),
        (["--out", "o", "--prompts", "nowhere.txt"], "There is no file nowhere.txt"),
        (["--out", "o", "--dataset", "nonsense"], "expected owner/name"),
        (["--out", __file__], "is a file; give a folder"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_a_model_is_loaded(
    console, tmp_path, monkeypatch, arguments, says
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_loaded", lambda view, options: pytest.fail("a model was loaded"))
    result = console("train", *arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.stderr
    assert says in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--taps", "1,40"], "taps holds 40"),
        (["--init", "no/where"], "no/where"),
        (["--compare-with", "no/where"], "no/where"),
    ],
)
def test_what_a_later_stage_would_refuse_is_refused_before_the_first(
    console, tmp_path, monkeypatch, arguments, says
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    out = tmp_path / "o"
    result = console("train", "--target-model", str(target_folder()), "--out", str(out), *SMALL, *arguments)
    assert result.exit_code != 0 and says in result.stderr and "Traceback" not in result.stderr
    assert not (out / "data").exists()


def test_answers_without_a_held_out_one_end_a_run_that_is_to_measure(console, tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_text("One?\nTwo?\nThree?\n")
    arguments = ["train", "--target-model", str(target_folder()), "--out", str(tmp_path / "o")]
    result = console(*arguments, "--prompts", str(prompts), *SMALL)
    assert result.exit_code == 2 and "is held out" in result.stderr and "--stage train" in result.stderr
    assert not (tmp_path / "o/train").exists()


def test_options_of_an_answer_are_refused_before_it(console, tmp_path):
    result = console("--seed", "1", "train", "--out", str(tmp_path / "o"))
    assert (result.exit_code, result.stdout) == (2, "") and "has no meaning for train" in result.stderr


def test_the_data_stage_says_what_it_takes_and_gathers(console, tmp_path):
    prompts = tmp_path / "p.txt"
    prompts.write_text("".join(f"Question {i}?\n" for i in range(30)))
    arguments = [
        "train",
        "--target-model",
        str(target_folder()),
        "--out",
        str(tmp_path / "o"),
        "--stage",
        "data",
    ]
    result = console(*arguments, "--prompts", str(prompts), *SMALL, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["data"]
    assert found["answer_tokens"] >= 40 and found["classes"][0]["class"] == "given"
    assert "will take about" in result.stderr and "MB of disk" in result.stderr
    shown = console(*arguments, "--prompts", str(prompts), *SMALL)
    assert "new answers    0" in shown.stdout and "will take" not in shown.stderr


def test_a_broken_line_is_named(console, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "x"}\n{"prompt": \n')
    result = console(
        "train", "--target-model", str(target_folder()), "--out", str(tmp_path / "o"), "--prompts", str(path)
    )
    assert result.exit_code == 2 and "p.jsonl, line 2: this is no JSON" in result.stderr


def test_ctrl_c_keeps_what_is_whole_and_says_how_to_go_on(console, tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(command._STAGES, "data", stopped)
    out = str(tmp_path / "my run")
    result = console("train", "--target-model", str(target_folder()), "--out", out, "--stage", "data")
    assert (result.exit_code, result.stdout) == (130, "")
    assert "Stopped" in result.stderr and "To go on" in result.stderr


def test_eval_without_a_drafter_is_one_sentence(console, tmp_path):
    out = tmp_path / "o"
    result = console("train", "--target-model", str(target_folder()), "--out", str(out), "--stage", "eval")
    assert result.exit_code == 2 and "run the train stage first" in result.stderr


def test_a_drafter_as_target_is_refused(console, tmp_path):
    from tests.loading.checkpoints import write_draft

    draft = write_draft(Path(tmp_path / "d"))
    result = console("train", "--target-model", str(draft), "--out", str(tmp_path / "o"), "--stage", "data")
    assert result.exit_code == 1 and "is a drafter, not a target" in result.stderr
