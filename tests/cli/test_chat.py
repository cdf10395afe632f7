import json
import signal
from types import SimpleNamespace

import pytest

from dflash_mlx.cli.app import app
from dflash_mlx.cli.chat import Chat
from dflash_mlx.cli.options import ChatOptions
from tests.cli.fake import FakeGenerator


def messages(result):
    return json.loads(result.stdout.splitlines()[-1])


def test_a_piped_chat_answers_each_line_and_leaves(console):
    result = console.chat(stdin=b"hi\n/exit\nnever read\n")
    assert (result.exit_code, result.stdout) == (0, "hi\n")
    assert len(console.generator.calls) == 1 and console.generator.closed


def test_the_end_of_input_leaves_after_answering(console):
    result = console.chat(stdin=b"one\n\n  \ntwo")
    assert (result.exit_code, result.stdout) == (0, "hi\nhi\n")


def test_an_empty_input_leaves(console):
    assert console.chat().exit_code == 0


def test_the_conversation_is_kept_without_its_thoughts(console):
    result = console.chat("--system", "S", stdin=b"think\necho\n")
    assert messages(result) == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "think"},
        {"role": "assistant", "content": "yes, it is"},
        {"role": "user", "content": "echo"},
    ]
    assert "hmm" in result.stderr and "hmm" not in result.stdout
    assert "system" not in console.generator.calls[0][1]


def test_reset_forgets_all_but_the_system_message(console):
    assert messages(console.chat("--system", "S", stdin=b"hi\n/reset\necho\n")) == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "echo"},
    ]


def test_help_and_unknown_commands_are_explained_on_stderr(console):
    result = console.chat(stdin=b"/help\n/quit\n/exit now\n")
    assert result.stdout == "" and console.generator.calls == []
    for text in ("/reset", "Ctrl-D", "/quit is not a command", "/exit now is not a command"):
        assert text in result.stderr


def test_a_space_before_a_slash_sends_the_line(console):
    assert messages(console.chat(stdin=b" /x echo\n")) == [{"role": "user", "content": " /x echo"}]


def test_a_failed_turn_is_forgotten_and_told_by_the_exit_code(console):
    result = console.chat(stdin=b"fail-at-once\necho\n")
    assert result.exit_code == 1
    assert "error: The connection went away" in result.stderr
    assert messages(result) == [{"role": "user", "content": "echo"}]


def test_an_interrupted_pipe_exits_130(console):
    result = console.chat(stdin=b"interrupt\nhi\n")
    assert (result.exit_code, result.stdout) == (130, "half\n")


def test_unset_draws_are_the_models_own(console):
    console.chat(stdin=b"hi\n")
    assert console.generator.calls[0][1] == {"temperature": 0.6, "top_p": 0.95}


def test_set_draws_come_before_the_models_own(console):
    console.chat("--temperature", "0.3", "--top-k", "5", stdin=b"hi\n")
    assert console.generator.calls[0][1] == {"temperature": 0.3, "top_p": 0.95, "top_k": 5}


def test_a_config_that_does_not_sample_gives_no_draws(console, monkeypatch):
    monkeypatch.setitem(FakeGenerator.generation_defaults, "do_sample", False)
    console.chat(stdin=b"hi\n")
    assert console.generator.calls[0][1] == {}


def test_temperature_0_takes_no_cuts(console):
    console.chat("--temperature", "0", stdin=b"hi\n")
    assert console.generator.calls[0][1] == {"temperature": 0.0}


def test_options_before_the_subcommand_are_inherited(console):
    console(
        "--target-model", "T", "--seed", "0", "--no-think", "chat", "--top-k", "5", stdin=b"hi\n", command=app
    )
    assert console.generator.target_model == "T"
    options = console.generator.calls[0][1]
    assert options == {"temperature": 0.6, "top_p": 0.95, "top_k": 5, "seed": 0, "think": False}


def test_figures_before_the_subcommand_are_inherited(console):
    assert "tokens/s" in console("--stats", "chat", stdin=b"hi\n").stderr
    assert "tokens/s" not in console("chat", stdin=b"hi\n").stderr


def test_a_second_ctrl_c_does_not_end_the_chat_with_the_answer():
    """An impatient hand: the second arrives while the first is being answered."""
    names = ("piece", "wait", "end_answer", "figures", "note")
    view = SimpleNamespace(**{name: lambda *_: None for name in names})
    said = []

    def say(text):
        said.append(text)
        signal.raise_signal(signal.SIGINT)

    view.say = say
    generator, before = FakeGenerator(), signal.getsignal(signal.SIGINT)
    pair = SimpleNamespace(open=lambda: generator, is_loaded=True)
    chat = Chat(pair, view, ChatOptions(), stays=True, edit=str)
    try:
        chat.run(iter(["signal", "hi", None]).__next__)
    except KeyboardInterrupt:
        pytest.fail("the chat ended")
    assert said == ["stopped"] and signal.getsignal(signal.SIGINT) is before
    assert [message["content"] for message in chat.talk.history] == ["signal", "half", "hi", "hi"]


def test_bytes_that_are_no_text_end_a_piped_chat_in_a_sentence(console):
    result = console.chat(stdin=b"hi\n\xff\n")
    assert result.exit_code == 2 and "not UTF-8" in result.stderr and "Traceback" not in result.stderr
