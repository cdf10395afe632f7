"""`dflash-mlx doctor --diagnose`: what it refuses before anything is loaded, and a tiny random pair diagnosed."""

import json

import pytest
from typer.testing import CliRunner

from dflash_mlx.bench.prompts import CLASSES
from dflash_mlx.cli.app import app
from tests.loading.checkpoints import write_draft, write_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target, draft = write_target(root / "target", eos_token_id=None), write_draft(root / "draft")
    return ["--target-model", str(target), "--draft-model", str(draft)]


def diagnose(*arguments):
    return CliRunner().invoke(app, ["doctor", "--diagnose", *map(str, arguments)], input=b"")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "mine.txt"
    path.write_text("One prompt\nof two lines.\n---\nAnother.\n")
    return path


@pytest.fixture(scope="module")
def diagnosed(pair, prompts):
    result = diagnose(*pair, "--prompt-file", prompts, "--max-new-tokens", 4, "--draft-bits", 8, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout), result


def test_the_record_tells_acceptance_findings_and_what_was_not_tried(diagnosed):
    found, _ = diagnosed
    [row] = found["acceptance"]
    assert (row["class"], row["answers"]) == ("prompts", 2) and row["tokens_per_round"] >= 1
    assert len(row["right_up_to"]) == len(row["places"]) >= 1
    tried = {finding["what"] for finding in found["findings"]}
    assert tried == {"thinking", "template", "layers -1", "layers +1", "draft bits", "block size"}
    for finding in found["findings"]:
        assert finding["evidence"] in ("clear", "thin", "none") and finding["cause"] and finding["advice"]
        assert finding["gain"]["count"] == 2
    untried = {row["what"]: row["why"] for row in found["untried"]}
    assert (
        untried["dtype"] == "it is float32 already"
        and untried["long prompt"] == "the target takes 512 tokens"
    )
    assert found["conclusion"].startswith("The evidence is too thin: 2 answers")


def test_progress_goes_to_stderr(diagnosed):
    _, result = diagnosed
    assert "Trying draft bits: not given instead of 8 ..." in result.stderr
    assert "Measuring what drafting costs" not in result.stderr, "nothing is timed"


def test_for_reading_it_is_sections_with_the_conclusion_last(pair, prompts):
    result = diagnose(*pair, "--prompt-file", prompts, "--max-new-tokens", 3)
    assert result.exit_code == 0, result.stderr
    titles = [line for line in result.stdout.splitlines() if line and not line.startswith(" ")]
    assert titles == [
        "pair",
        "acceptance (whole blocks)",
        "shape",
        "one thing changed",
        "not changed",
        "conclusion",
    ]
    assert "  The evidence is too thin" in result.stdout.split("conclusion\n")[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--mode", "off"], "--mode off changes no acceptance"),
        (["--limit", "0"], "--limit is 0; expected 1 or more"),
        (["--prompt-file", "nowhere.txt"], "--prompt-file nowhere.txt cannot be read"),
        (["--prompt-file", __file__, "--limit", "2"], "--limit is for built-in questions"),
        (["--raw", "--system", "x"], "--raw uses no chat template"),
        (["--temperature", "-1"], "--temperature is -1.0"),
        (["--block-size", "1"], "--block-size is 1"),
    ],
)
def test_bad_input_is_said_before_anything_is_loaded(console, arguments, sentence):
    result = console("doctor", "--diagnose", *arguments)
    assert (result.exit_code, result.stdout, console.made) == (2, "", [])
    assert sentence in result.stderr and "Traceback" not in result.stderr


def test_an_empty_prompt_in_the_file_is_refused(console, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("One.\n---\n---\nTwo.\n")
    result = console("doctor", "--diagnose", "--prompt-file", str(path))
    assert (result.exit_code, console.made) == (2, []) and "holds an empty prompt" in result.stderr


@pytest.mark.parametrize(
    "option", [["--target-model", "T"], ["--prompt-file", "f"], ["--think"], ["--limit", "2"]]
)
def test_options_of_a_diagnosis_need_it(console, option):
    result = console("doctor", *option)
    assert (result.exit_code, result.stdout, console.made) == (2, "", [])
    assert f"{option[0]} goes with --diagnose" in result.stderr


@pytest.mark.slow
def test_what_a_high_temperature_costs_the_bundled_pair_is_found(tmp_path):
    from dflash_mlx.loading.places import places

    if places().bundled_target is None:
        pytest.skip("the bundled target is not installed")
    path = tmp_path / "prompts.txt"
    path.write_text("\n---\n".join(text for kind in ("code", "maths") for text in CLASSES[kind][:2]))
    arguments = ["--target-model", "smollm2-135m", "--prompt-file", path, "--max-new-tokens", 24, "--json"]
    result = diagnose(*arguments, "--temperature", 1.5)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    first = found["findings"][0]
    assert (first["what"], first["evidence"]) == ("temperature", "clear"), found
    assert found["conclusion"].startswith("Likeliest: draws at this temperature are hard to foresee")
