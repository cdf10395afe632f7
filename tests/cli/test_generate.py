import inspect
import json
from dataclasses import fields

import pytest

from dflash_mlx.cli.options import ChatOptions, Options

ALL_OPTIONS = {
    "target_model": "T",
    "draft_model": "D",
    "mode": "on",
    "block_size": 4,
    "draft_bits": 8,
    "draft_vocab": 4096,
    "dtype": "float32",
    "kv_bits": 4,
    "draft_window": 64,
    "max_new_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
    "seed": 5,
    "system": "Be brief.",
}


def typed(options):
    return [text for name, value in options.items() for text in ("--" + name.replace("_", "-"), str(value))]


def test_stdout_holds_the_answer_and_nothing_else(console):
    result = console("-p", "think", "--stats")
    assert (result.exit_code, result.stdout) == (0, "yes, it is\n")
    assert result.stderr.startswith("made of the default pair\nhmm [b]so\n")
    assert "8 tokens" in result.stderr and "seed 11" in result.stderr
    assert console.generator.closed


def test_figures_are_for_terminals_unless_asked_for(console):
    assert "tokens/s" not in console("-p", "hi").stderr
    assert "tokens/s" not in console("-p", "hi", "--no-stats").stderr
    assert "draft 0.50 s · verify 1.40 s · other 0.10 s" in console("-p", "hi", "--profile").stderr


def test_model_text_is_never_read_as_markup(console):
    result = console("-p", "markup")
    assert result.stdout == "[bold]a[/bold] :smile: [/nothing] \\[x] é 漢 \U0001f600\n"
    assert "[b]so" in console("-p", "think").stderr


def test_piped_text_is_passed_on_byte_for_byte(console):
    assert console("-p", "escape").stdout == "a\x1b[31mred\x07\rb\n"


def test_an_answer_cut_at_the_limit_says_so(console):
    assert "stopped at the limit of 2 tokens" in console("-p", "long").stderr
    assert "limit" not in console("-p", "hi").stderr


def test_every_option_reaches_the_generator_under_its_own_name(console):
    result = console(
        *typed(ALL_OPTIONS), "--stop", "a\\n", "--stop", "b", "--no-think", "--profile", "-p", "x"
    )
    assert result.exit_code == 0, result.stderr
    made, (_, options) = console.generator, console.generator.calls[0]
    sent = {name: getattr(made, name, None) for name in ALL_OPTIONS if name not in options} | options
    assert sent == ALL_OPTIONS | {"stop": ["a\\n", "b"], "think": False, "profile": True}


def test_an_option_that_is_not_given_is_not_sent(console):
    console("-p", "x")
    assert console.generator.calls == [("x", {})]


def test_zero_is_given(console):
    console("-p", "x", "--temperature", "0", "--seed", "0", "--raw")
    assert console.generator.calls == [("x", {"temperature": 0.0, "seed": 0, "raw": True})]


def test_long_names_are_the_names_of_the_python_parameters():
    from dflash_mlx.generator import DFlashGenerator
    from dflash_mlx.request import Options as RequestOptions

    python = {*inspect.signature(DFlashGenerator).parameters, *(f.name for f in fields(RequestOptions))}
    console_only = {"stats", "debug", "show_version", "prompt", "prompt_file", "json", "compare"}
    console_only |= {"plain", "history", "interactive"}
    assert {option.name for option in fields(Options)} - python == console_only
    assert python - {option.name for option in fields(Options)} <= {"logits_processors", "on_note", "on_load"}
    assert {option.name for option in fields(ChatOptions)} < {option.name for option in fields(Options)}


@pytest.mark.parametrize(
    ("arguments", "stdin", "prompt"),
    [
        (["-p", r"a\nb"], b"", r"a\nb"),
        (["-p", "-"], b"one\ntwo\n", "one\ntwo"),
        ([], b"one\r\n", "one"),
        (["-p", "sum up"], b"a document\n", "sum up\n\na document"),
        (["-p", "sum up"], b" \n", "sum up"),
        (["--prompt-file", "-"], b"\xef\xbb\xbfone", "one"),
        (["-p", "é漢"], "ü\n\n".encode(), "é漢\n\nü\n"),
    ],
)
def test_the_prompt_comes_from_the_line_a_pipe_or_both(console, arguments, stdin, prompt):
    assert console(*arguments, stdin=stdin).exit_code == 0
    assert console.generator.calls[0][0] == prompt


def test_the_prompt_comes_from_a_file(console, tmp_path):
    (tmp_path / "p.txt").write_bytes(b"from\na file\n")
    console("--prompt-file", str(tmp_path / "p.txt"), stdin=b"doc")
    assert console.generator.calls[0][0] == "from\na file\n\ndoc"


def test_options_that_change_nothing_at_temperature_0_are_named(console):
    assert (
        "Nothing is drawn at temperature 0, whatever the value of --top-p and --seed."
        in console("-p", "x", "--top-p", "0.5", "--seed", "1").stderr
    )
    assert "Nothing is drawn" not in console("-p", "x", "--top-p", "0.5", "--temperature", "1").stderr


RECORD_KEYS = set(
    "text thinking token_ids finish_reason prompt_tokens reused_tokens read_tokens new_tokens rounds verified accepted "
    "tokens_per_round acceptance_rate accept_lengths verify_lengths plain_rounds block_size "
    "draft_bits draft_vocab kv_bits draft_window seed seconds "
    "tokens_per_second plain_tokens_per_second_estimate peak_memory_gb "
    "load_peak_memory_gb weights_gb target draft dtype device blas kernels notes".split()
)


def test_json_is_one_object_with_these_keys(console):
    result = console("-p", "think", "--json")
    record = json.loads(result.stdout)
    assert set(record) == RECORD_KEYS
    assert set(record["seconds"]) == {"load", "prefill", "first_token", "decode"}
    assert (record["text"], record["thinking"], record["finish_reason"]) == (
        "yes, it is",
        "hmm [b]so",
        "stop",
    )
    assert (record["token_ids"], record["acceptance_rate"]) == ([1, 2] * 4, 0.5)
    assert result.stdout.count("\n") == 1 and "hmm" not in result.stderr


def test_json_with_profile_splits_the_decode(console):
    seconds = json.loads(console("-p", "x", "--json", "--profile").stdout)["seconds"]
    profiled = {"draft": 0.5, "verify": 1.4, "other": 0.1}
    assert seconds == {"load": 0.1, "prefill": 0.2, "first_token": 0.2, "decode": 2.0, **profiled}


def test_json_with_stats_shows_both(console):
    assert "tokens/s" in console("-p", "x", "--json", "--stats").stderr
    assert "tokens/s" not in console("-p", "x", "--json").stderr


def test_json_of_a_comparison_adds_the_plain_decoding(console):
    record = json.loads(console("-p", "differ", "--json", "--compare").stdout)
    assert set(record) == RECORD_KEYS | {"plain", "identical", "first_difference", "speedup"}
    assert set(record["plain"]) == RECORD_KEYS
    assert record["first_difference"] == {"index": 3, "plain": 17, "drafted": 19, "logit_gap": 2e-4}
    assert record["identical"] is False and record["speedup"] == pytest.approx(1.5)
    assert json.loads(console("-p", "x", "--json", "--compare").stdout)["first_difference"] is None


def test_a_comparison_prints_the_drafted_answer_and_a_verdict(console):
    result = console("-p", "think", "--compare")
    assert result.stdout == "yes, it is\n"
    verdict = result.stderr.splitlines()[-2:]
    assert verdict[0] == "identical: 8 tokens, plain and drafted"
    assert verdict[1].endswith("1.50 times")
    assert "token 3 is 17 plain and 19 drafted" in console("-p", "differ", "--compare").stderr


def test_an_error_during_an_answer_keeps_what_was_said(console):
    result = console("-p", "fail")
    assert (result.exit_code, result.stdout) == (1, "half\n")
    assert result.stderr.endswith("error: The connection went away; try again.\n")


def test_a_bug_is_one_line_unless_debugged(console):
    result = console("-p", "bug")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.endswith("error: RuntimeError: a bug (--debug shows where)\n")
    assert "Traceback" in console("-p", "bug", "--debug").stderr
    assert "Traceback" in console("-p", "fail", "--debug").stderr


def test_an_interrupted_answer_exits_130(console):
    result = console("-p", "interrupt")
    assert (result.exit_code, result.stdout) == (130, "half\n")
    assert "Traceback" not in result.stderr
    assert console.generator.closed


def test_versions(console):
    result = console("--version")
    assert result.exit_code == 0 and result.stdout.startswith("dflash-mlx 0.") and "mlx-lm" in result.stdout
    assert console.made == []
