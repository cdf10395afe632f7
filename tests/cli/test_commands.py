"""What is typed after a slash, in piped chats."""

import json
import stat

import pytest

from dflash_mlx.cli import commands
from dflash_mlx.errors import UsageError


def asked(result):
    return [message["content"] for message in json.loads(result.stdout.splitlines()[-1])]


def test_undo_forgets_the_last_turn(console):
    assert asked(console.chat(stdin=b"one\ntwo\n/undo\necho\n")) == ["one", "hi", "echo"]
    assert "nothing to undo" in console.chat(stdin=b"/undo\n").stderr


def test_retry_asks_again_with_another_seed(console):
    result = console.chat("--temperature", "0.5", "--seed", "4", stdin=b"one\n/retry\n/retry\necho\n")
    assert asked(result) == ["one", "hi", "echo"]
    seeds = [options["seed"] for _, options in console.generator.calls]
    assert seeds[0] == seeds[3] == 4 and len(set(seeds)) == 3


@pytest.mark.parametrize(
    ("lines", "words"),
    [(b"/retry\n", "nothing to answer"), (b"/set temperature 0\none\n/retry\n", "At temperature 0")],
)
def test_a_retry_without_use_is_explained(console, lines, words):
    assert words in console.chat(stdin=lines).stderr


def test_a_retry_that_fails_leaves_the_answer_it_had(console, monkeypatch):
    from tests.cli.fake import FakeGenerator, HubError

    honest = FakeGenerator._pieces

    def pieces(self, asked, prompt):
        if len(self.calls) == 2:
            raise HubError("The connection went away; try again.")
        return honest(self, asked, prompt)

    monkeypatch.setattr(FakeGenerator, "_pieces", pieces)
    assert asked(console.chat(stdin=b"one\n/retry\necho\n")) == ["one", "hi", "echo"]


def test_the_system_message_can_be_changed(console):
    result = console.chat("--system", "S", stdin=b"/system\n/system Be brief.\necho\n")
    assert "system: S" in result.stderr and asked(result) == ["Be brief.", "echo"]


def test_settings_are_changed_shown_and_unset(console):
    lines = b"/set temperature 0.25\n/set max-new-tokens 9\none\n/set\n/set temperature none\ntwo\n"
    result = console.chat(stdin=lines)
    first, second = (options for _, options in console.generator.calls)
    assert (first["temperature"], first["max_new_tokens"]) == (0.25, 9)
    assert "temperature" not in second and "temperature 0.25" in result.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set heat 3", "heat is not a setting; they are temperature"),
        ("/set top_k many", "top_k is many; expected a whole number"),
        ("/set temperature", "temperature is empty; expected a number"),
        ("/set top_p 7", "top_p is 7"),
        ("/set stop", "stop string is empty"),
        ("/think maybe", "expected on, off or hide"),
        ("/think", "/think needs more"),
        ("/save", "/save needs more"),
        ("/save nowhere/x", "No such file"),
        ("/load nowhere", "No such file"),
        ("/undo it", "/undo it is not a command"),
        ("/und", "/undo is one"),
        ("/xyz", "/help lists them"),
        ("/", "/help lists them"),
        ("/stats", "no answer yet"),
        ("/copy", "no answer yet"),
        ("/edit", "needs a terminal"),
    ],
)
def test_what_cannot_be_done_is_explained_and_changes_nothing(console, line, words):
    result = console.chat(stdin=f"{line}\necho\n".encode())
    assert words in result.stderr and result.exit_code == 0 and "Traceback" not in result.stderr
    assert asked(result) == ["echo"] and console.generator.calls[0][1] == {"temperature": 0.6, "top_p": 0.95}


def test_thoughts_can_be_switched_and_hidden(console):
    """For each message, and nothing is said to the template before anyone chose."""
    console.chat(stdin=b"x\n")
    assert "think" not in console.generator.calls[0][1]
    console.made.clear()
    result = console.chat(stdin=b"/think on\nthink\n/think off\nx\n/think hide\nthink\n")
    assert [options.get("think") for _, options in console.generator.calls] == [True, False, False]
    assert result.stderr.count("hmm") == 1 and result.stderr.count("thinking\n") == 1
    assert result.stdout.count("yes, it is") == 2


def test_a_conversation_is_saved_and_taken_up(console, tmp_path):
    path = tmp_path / "talk"
    console.chat("--system", "S", stdin=f"one\n/save {path}\n".encode())
    result = console.chat(stdin=f"/load {path}\necho\n".encode())
    assert "1 turns taken up" in result.stderr
    assert asked(result) == ["S", "one", "hi", "echo"]


def test_stats_say_what_the_last_answer_took(console):
    result = console.chat("--no-stats", stdin=b"one\n/stats\n")
    assert "2 tokens\n" in result.stderr and "50% of 30 proposals accepted" in result.stderr


def test_a_block_in_quotes_is_one_message(console):
    result = console.chat(stdin=b'"""\none\n/help\n\ntwo echo\n"""\n')
    assert asked(result) == ["one\n/help\n\ntwo echo"]
    assert asked(console.chat(stdin=b'"""one echo"""\n')) == ["one echo"]
    assert asked(console.chat(stdin=b'"""one\necho')) == ["one\necho"], "the end of input ends it too"


def test_an_answer_cut_off_at_the_limit_comes_with_a_hint(console):
    result = console.chat(stdin=b"long\n")
    assert "stopped at the limit of 2 tokens" in result.stderr and "/set max_new_tokens" in result.stderr


def test_an_editor_begins_with_a_text_and_gives_another(tmp_path, monkeypatch):
    from dflash_mlx.cli.lines import edit

    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nprintf ' and more\n' >> \"$1\"\n")
    editor.chmod(0o755)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", str(editor))
    assert edit("begun") == "begun\n and more"
    monkeypatch.setenv("EDITOR", "/nowhere/editor")
    with pytest.raises(UsageError, match="Set EDITOR to one that works"):
        edit("begun")


def test_what_only_a_chat_does_is_refused_beside_a_prompt(console):
    for option in ("--plain", "--no-history", "--history"):
        result = console("-p", "hi", option)
        assert result.exit_code == 2 and "is for a chat" in result.stderr


def test_the_history_file_is_its_writers_alone(tmp_path):
    """Also one that was there before, with another mode."""
    from dflash_mlx.cli.lines import _history

    path = tmp_path / "new" / "history"
    for _ in range(2):
        _history(path).store_string("a secret")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o644)
    (tmp_path / "file").write_text("")
    _history(tmp_path / "file" / "history").store_string("kept for this run alone")


def test_completions():
    assert commands.completions("/s") == ["/system", "/set", "/stats", "/save"]
    assert commands.completions("/set top") == ["top_p", "top_k"]
    assert commands.completions("/think h") == ["hide"] and commands.completions("/undo x") == []


def test_every_command_is_listed_and_carried_out():
    from dflash_mlx.cli.chat import Chat

    assert set(Chat._actions) == set(commands.COMMANDS) - {"/exit"}
    assert all(name in commands.HELP for name in commands.COMMANDS)
    with pytest.raises(UsageError):
        commands.parse("/exit now")
