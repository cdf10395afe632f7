"""`dflash-mlx bench`: what it refuses before anything is loaded, and a whole race of a tiny random pair."""

import io
import json
import xml.etree.ElementTree as ET

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dflash_mlx.bench import Outcome, arms
from dflash_mlx.bench.summary import rows
from dflash_mlx.cli.app import app
from dflash_mlx.cli.bench_tables import tables
from dflash_mlx.core import Difference
from tests.bench.made import answer, trial
from tests.loading.checkpoints import write_draft, write_target

SMALL = [
    "--classes", "code,prose", "--limit", "2", "--blocks", "2,8", "--repeats", "1", "--max-new-tokens", "6",
]  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target, draft = write_target(root / "target", eos_token_id=None), write_draft(root / "draft")
    return ["--target-model", str(target), "--draft-model", str(draft)]


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], input=b"")


@pytest.fixture(scope="module")
def raced(pair, tmp_path_factory):
    """The record of one race, and its folder."""
    out = tmp_path_factory.mktemp("out") / "new" / "folder"
    result = bench(*pair, *SMALL, "--context", "0,400", "--out", out, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout), out, result


def test_the_record_holds_what_two_reports_need_to_be_compared(raced):
    record, _, _ = raced
    assert record["schema"] == 1 and record["command"][0] == "dflash-mlx" and record["interrupted"] is False
    assert record["machine"].keys() >= {"chip", "os", "device", "blas", "memory_gb", "cores", "threads"}
    assert {"python", "mlx", "mlx-lm", "dflash-mlx"} <= record["versions"].keys()
    assert (record["pair"]["dtype"], record["pair"]["block_size"]) == ("float32", 8)
    assert {"target", "draft", "draft_bits", "draft_vocab", "kv_bits", "kernels"} <= record["pair"].keys()
    options = record["options"]
    assert (options["classes"], options["contexts"], options["max_new_tokens"]) == (
        ["code", "prose"],
        [0, 400],
        6,
    )
    assert options["seed"] == 7 and "git" not in json.dumps(record).lower()


def test_every_class_has_a_row_with_all_its_figures(raced):
    record, _, _ = raced
    found = [(row["kind"], row["context"]) for row in record["rows"]]
    assert found == [("code", 0), ("prose", 0), ("all", 0), ("all", 400)]
    for row in record["rows"]:
        names = [figures["arm"] for figures in row["arms"]]
        assert names == (["plain", "auto"] if row["context"] else ["plain", "auto", "block 2", "block 8"])
        assert row["arms"][0]["speedup"] is None and row["verdict"]
        for figures in row["arms"]:
            assert figures["tokens_per_second"] > 0 and figures["end_to_end_per_second"] > 0
            assert figures["first_token"] > 0 and figures["peak_memory_gb"] > 0
            assert figures["differences"] == []
        for figures in row["arms"][1:]:
            speedup = figures["speedup"]
            assert 0 < speedup["low"] <= speedup["median"] <= speedup["high"]
            assert figures["tokens_per_round"] >= 1 and len(figures["positions"]) >= 1
    assert 300 < record["rows"][-1]["prompt_tokens"] <= 400
    assert record["rows"][0]["best_fixed"]["ratio"]["count"] == 2


def test_every_answer_is_kept_with_its_rounds(raced):
    record, _, _ = raced
    assert len(record["trials"]) == 4 + 2
    for kept in record["trials"]:
        for name, one in kept["answers"].items():
            assert one["new_tokens"] == 6 and sum(one["accept_lengths"]) + one["rounds"] >= 5
            assert name != "block 2" or max(one["verify_lengths"]) == 1
            assert name != "plain" or one["plain_rounds"] == 5


def test_the_object_and_the_pictures_are_written(raced):
    record, out, result = raced
    assert json.loads((out / "result.json").read_text()) == record
    written = {path.name for path in out.iterdir()}
    assert written == {"result.json", "speedup.svg", "acceptance.svg", "context.svg"}
    for name in written - {"result.json"}:
        ET.parse(out / name)
        assert str(out / name) in result.stderr


def test_the_tables_stand_on_stdout_and_progress_on_stderr(pair, tmp_path):
    one = ["--classes", "code", "--limit", "1", "--blocks", "8", "--repeats", "1", "--max-new-tokens", "3"]
    result = bench(*pair, *one, "--temperature", "0.8", "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert len([line for line in result.stdout.splitlines() if line.split()[:1] == ["code"]]) == 3
    assert "auto / best" in result.stdout and "same text" in result.stdout
    assert "1 of 1, code 1: plain " in result.stderr and "tok/s" in result.stderr
    assert json.loads((tmp_path / "result.json").read_text())["options"]["temperature"] == 0.8


def test_a_table_is_folded_and_never_cut():
    """On a narrow terminal a figure goes on below; an ellipsis in its place would hide it."""
    drafted = answer(13.0, accepted=[7, 3, 0], verified=[7, 7, 7])
    differs = {"auto": Difference(3, 1, 2, 1e-4)}
    trials = [trial(number=n, plain=10.0, auto=12.5, block_8=drafted, differences=differs) for n in (1, 2)]
    outcome = Outcome(
        own="auto", trials=trials, rows=rows(trials, "auto"), notes=(), interrupted=True, seconds=1.0
    )
    for width in (60, 180):
        console = Console(width=width, file=io.StringIO())
        for part in tables(outcome):
            console.print(part)
        text = console.file.getvalue()
        assert "…" not in text and "Stopped after 2 trials" in text
        assert width == 60 or "1.25 [1.25-1.25]" in text and "auto is faster" in text and "67% 67%" in text
        assert "0.0001" in text, "the gap of a text that differs"


def test_ctrl_c_writes_what_was_measured(pair, tmp_path, monkeypatch):
    real, asked = arms._answer, []

    def stopped(*arguments):
        asked.append(arguments)
        if len(asked) == 3 + 3 + 2:  # warming up, the first question, half of the second
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(arms, "_answer", stopped)
    few = ["--classes", "code", "--limit", "2", "--blocks", "8", "--repeats", "1", "--max-new-tokens", "3"]
    result = bench(*pair, *few, "--out", tmp_path)
    assert result.exit_code == 130 and "Stopped after 1 trials" in result.stdout
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["interrupted"] is True and [row["kind"] for row in record["rows"]] == ["code"]
    assert (tmp_path / "speedup.svg").exists()


def test_a_context_beyond_the_target_is_shortened_with_a_sentence(pair, tmp_path):
    one = ["--classes", "code", "--blocks", "8", "--repeats", "1", "--max-new-tokens", "4"]
    result = bench(*pair, *one, "--context", "8k", "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "takes 512 tokens, the answer included: prompts of 8192 are shortened to 508" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--classes", "poetry"], "'poetry' is no class of prompts; they are code, maths"),
        (["--classes", "code,,maths"], "--classes is 'code,,maths'; expected names with commas"),
        (["--classes", "code,code"], "none twice"),
        (["--dataset", "imagenet"], "'imagenet' is no data set known here; they are humaneval, gsm8k"),
        (["--context", "0,long"], "--context is '0,long'; expected whole numbers"),
        (["--context", "-1"], "--context is '-1'"),
        (["--blocks", "2,x"], "--blocks is '2,x'"),
        (["--repeats", "0"], "--repeats is 0; expected 1 or more"),
        (["--limit", "0"], "--limit is 0; expected 1 or more"),
        (["--cooldown", "-1"], "--cooldown is -1.0; expected 0 or more"),
        (["--temperature", "-1"], "--temperature is -1.0; expected 0 or more"),
        (["--mode", "off"], "leaves nothing to measure"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
    ],
)
def test_bad_input_is_said_before_anything_is_loaded(console, tmp_path, arguments, sentence):
    result = console("bench", *arguments, "--out", str(tmp_path / "out"))
    assert (result.exit_code, result.stdout, console.made) == (2, "", [])
    assert sentence in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_loaded(console, tmp_path):
    (tmp_path / "file").write_text("")
    result = console("bench", "--out", str(tmp_path / "file" / "out"))
    assert (result.exit_code, console.made) == (
        2,
        [],
    ) and "cannot be written: Not a directory" in result.stderr


def test_an_earlier_result_is_not_written_over(console, tmp_path):
    (tmp_path / "result.json").write_text("{}")
    result = console("bench", "--out", str(tmp_path))
    assert (result.exit_code, console.made) == (2, []) and "already holds a result.json" in result.stderr


def test_a_data_set_out_of_reach_is_one_sentence_before_anything_is_loaded(console, tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("dflash_mlx.loading.dataset_rows.SERVICE", "http://127.0.0.1:9")
    result = console("bench", "--dataset", "gsm8k", "--out", str(tmp_path / "out"))
    assert (result.exit_code, console.made) == (1, [])
    assert "The data set openai/gsm8k could not be fetched: there is no connection to" in result.stderr
    assert "built-in questions need no network" in result.stderr


def test_options_before_its_name_are_refused(console):
    result = console("--seed", "1", "bench")
    assert (result.exit_code, console.made) == (2, []) and "has no meaning for bench" in result.stderr
