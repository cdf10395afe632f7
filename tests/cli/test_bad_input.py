"""Everything the console refuses by itself: exit 2, one sentence on stderr, nothing on stdout, no model."""

import json
import subprocess
import sys

import pytest

BAD = {
    "no prompt": [],
    "empty prompt": ["-p", ""],
    "blank prompt": ["-p", " \n"],
    "prompt and file": ["-p", "x", "--prompt-file", "y"],
    "missing file": ["--prompt-file", "/nowhere/p.txt"],
    "folder for a file": ["--prompt-file", "/"],
    "name no file can have": ["--prompt-file", "a\0b"],
    "bytes that are no text": ["-p", "\udcff"],
    "stop that is no text": ["-p", "x", "--stop", "\udcff"],
    "no tokens": ["-p", "x", "--max-new-tokens", "0"],
    "fewer than no tokens": ["-p", "x", "--max-new-tokens", "-3"],
    "tokens not a number": ["-p", "x", "--max-new-tokens", "many"],
    "part of a token": ["-p", "x", "--max-new-tokens", "1.5"],
    "block of 0": ["-p", "x", "--block-size", "0"],
    "block of its anchor": ["-p", "x", "--block-size", "1"],
    "3 bits": ["-p", "x", "--draft-bits", "3"],
    "no words to draft over": ["-p", "x", "--draft-vocab", "0"],
    "words that are no number": ["-p", "x", "--draft-vocab", "some"],
    "unknown dtype": ["-p", "x", "--dtype", "int8"],
    "unknown mode": ["-p", "x", "--mode", "fast"],
    "temperature below 0": ["-p", "x", "--temperature", "-0.1"],
    "temperature nan": ["-p", "x", "--temperature", "nan"],
    "temperature inf": ["-p", "x", "--temperature", "inf"],
    "temperature not a number": ["-p", "x", "--temperature", "hot"],
    "top_p 0": ["-p", "x", "--top-p", "0"],
    "top_p above 1": ["-p", "x", "--top-p", "1.01"],
    "top_p nan": ["-p", "x", "--top-p", "nan"],
    "top_k below 0": ["-p", "x", "--top-k", "-1"],
    "min_p above 1": ["-p", "x", "--min-p", "1.5"],
    "repetition penalty 0": ["-p", "x", "--repetition-penalty", "0"],
    "presence penalty nan": ["-p", "x", "--presence-penalty", "nan"],
    "frequency penalty inf": ["-p", "x", "--frequency-penalty", "inf"],
    "seed below 0": ["-p", "x", "--seed", "-1"],
    "empty stop": ["-p", "x", "--stop", ""],
    "unknown option": ["-p", "x", "--temprature", "1"],
    "5 bits for keys": ["-p", "x", "--kv-bits", "5"],
    "half a bit for keys": ["-p", "x", "--kv-bits", "4.5"],
    "window of one token": ["-p", "x", "--draft-window", "1"],
    "window that is no number": ["-p", "x", "--draft-window", "all"],
    "an option of a later version": ["-p", "x", "--tree", "4"],
    "option without its value": ["-p"],
    "prompt without its option": ["Write a quicksort."],
    "comparison without a drafter": ["-p", "x", "--compare", "--mode", "off"],
    "drafter that is not used": ["-p", "x", "--mode", "off", "--draft-model", "D"],
    "block that is not used": ["-p", "x", "--mode", "off", "--block-size", "4"],
    "bits that are not used": ["-p", "x", "--mode", "off", "--draft-bits", "4"],
    "words that are not used": ["-p", "x", "--mode", "off", "--draft-vocab", "4096"],
    "window that is not used": ["-p", "x", "--mode", "off", "--draft-window", "64"],
    "system without a template": ["-p", "x", "--raw", "--system", "s"],
    "thinking without a template": ["-p", "x", "--raw", "--no-think"],
    "profile that is not shown": ["-p", "x", "--profile", "--no-stats"],
    "json in a chat": ["chat", "--json"],
    "comparison in a chat": ["chat", "--compare"],
    "a chat without a terminal": ["-p", "x", "-i"],
    "json before a chat": ["--json", "chat"],
    "prompt before a chat": ["-p", "x", "chat"],
    "profile before a chat": ["--profile", "chat"],
    "raw before a chat": ["--raw", "chat"],
    "option before and after": ["--seed", "1", "chat", "--seed", "1"],
    "bad value before a chat": ["--top-p", "2", "chat"],
    "bad value in a chat": ["chat", "--top-p", "2"],
    "unused drafter in a chat": ["--mode", "off", "chat", "--draft-model", "D"],
}


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD)
def test_it_is_refused_in_a_sentence_before_any_model_is_made(console, arguments):
    result = console(*arguments)
    assert (result.exit_code, result.stdout, console.made) == (2, "", [])
    last = result.stderr.splitlines()[-1]
    assert last.lower().startswith("error: ") and "Traceback" not in result.stderr
    assert "None" not in last and "lambda" not in last


def test_the_sentence_names_the_option_the_value_and_what_was_expected(console):
    result = console("-p", "x", "--top-p", "1.5")
    assert result.stderr == "error: --top-p is 1.5; expected above 0 and at most 1 (1: no cut).\n"
    assert "--prompt" in console("Write a quicksort.").stderr


def test_json_has_no_meaning_in_the_chat_that_a_terminal_opens(console, monkeypatch):
    monkeypatch.setattr("dflash_mlx.cli.prompt.stdin_is_terminal", lambda: True)
    result = console("--json")
    assert (result.exit_code, result.stdout, console.made) == (2, "", [])
    assert result.stderr == "error: --json has no meaning in a chat; it goes with a prompt.\n"


def test_a_pipe_that_is_no_text_is_refused(console):
    result = console(stdin=b"caf\xe9")
    assert (result.exit_code, result.stdout, console.made) == (2, "", [])
    assert "stdin is not UTF-8 text (byte 3)" in result.stderr


def test_a_model_that_is_missing_exits_1(console):
    result = console("--target-model", "missing", "-p", "x")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: The target missing could not be fetched; try another name.\n"


def test_all_this_happens_without_mlx():
    """An import of MLX costs seconds on some machines, and its BLAS may print; --help must not wait for it."""
    program = """
import json, sys
from dflash_mlx.cli.app import app
for arguments in [["--help"], ["chat", "--help"], ["--version"], *json.loads(sys.argv[1])]:
    try:
        app(arguments)
    except SystemExit:
        pass
    assert "mlx.core" not in sys.modules and "mlx_lm" not in sys.modules, arguments
print("not loaded")
"""
    bad = [arguments for arguments in BAD.values() if not any("\0" in a or "\udcff" in a for a in arguments)]
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(bad)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("not loaded\n")
