"""The console over the real generator, with a tiny random pair from folders."""

import json
import subprocess
import sysconfig
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_mlx.cli.app import app, chat_app
from tests.loading.checkpoints import write_draft, write_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    target, draft = write_target(root / "target", eos_token_id=None), write_draft(root / "draft")
    return ["--target-model", str(target), "--draft-model", str(draft), "--max-new-tokens", "12"]


def run(*arguments, stdin=b"", command=app):
    return CliRunner().invoke(command, list(arguments), input=stdin)


def test_a_comparison_as_json(pair):
    sampled = ["--temperature", "0.8", "--top-p", "0.9", "--seed", "7"]
    result = run(*pair, *sampled, "-p", "Say it.", "--json", "--compare", "--profile")
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["identical"] is True and record["first_difference"] is None
    assert record["token_ids"] == record["plain"]["token_ids"] and len(record["token_ids"]) == 12
    assert (record["seed"], record["finish_reason"]) == (7, "length")
    assert {"draft", "verify", "other"} < set(record["seconds"])


def test_the_streamed_answer_is_the_text_of_the_json(pair):
    record = json.loads(run(*pair, "-p", "Say it.", "--json").stdout)
    streamed = run(*pair, "-p", "Say it.", "--stats")
    assert streamed.stdout == record["text"] + "\n"
    assert "stopped at the limit of 12 tokens" in streamed.stderr and "tokens/round" in streamed.stderr


def test_a_chat_of_two_turns(pair):
    result = run(*pair, stdin=b"one\ntwo\n/exit\n", command=chat_app)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") >= 2


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--block-size", "99", "-p", "x"], 2),
        (["--target-model", "./nowhere", "-p", "x"], 1),
        (["--draft-model", "./nowhere", "-p", "x"], 1),
        (["-p", "x " * 5000], 2),
    ],
)
def test_what_only_the_generator_can_refuse_is_one_sentence(pair, arguments, code):
    result = run(*pair, *arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in result.stderr


def test_swapped_folders_are_refused(pair):
    result = run("--target-model", pair[3], "--draft-model", pair[1], "-p", "x")
    assert (result.exit_code, result.stdout) == (1, "") and "error: " in result.stderr


def test_the_installed_command_answers(pair):
    command = Path(sysconfig.get_path("scripts")) / "dflash-mlx-chat"
    done = subprocess.run([command, *pair], input="hi\n/exit\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n") and len(done.stdout) > 1 and "> " not in done.stderr
