"""The chat on a terminal of its own (a pty), driven as a hand would."""

import hashlib
import signal
import stat

import pytest

from dflash_mlx.cli.lines import _goes_on
from tests.cli.terminal import ALT_ENTER, BACKSPACE, CTRL_C, CTRL_D, ENTER, LEFT, TAB, UP, terminal


def test_ctrl_c_stops_the_answer_and_keeps_the_chat():
    with terminal("chat", "--plain") as screen:
        screen.line("slow")
        screen.wait_for("word2 ")
        screen.process.send_signal(signal.SIGINT)
        screen.process.send_signal(signal.SIGINT)  # an impatient hand
        screen.wait_for("stopped")
        screen.line("echo")
        screen.wait_for('"assistant", "content": "word0 word1 word2 ')
        screen.wait_for_prompt()
        screen.type(b"half a line")
        screen.wait_for("half a line")
        screen.type(CTRL_C)  # clears the line
        screen.line("hi")
        screen.wait_for("tokens/s")
        screen.wait_for_prompt()
        assert "once more" not in screen.seen
        screen.type(CTRL_C)
        screen.wait_for("once more")
        screen.wait_for_prompt()
        screen.type(CTRL_C)
        assert screen.leave() == 0
        assert "Traceback" not in screen.seen


def test_no_prompt_on_a_terminal_opens_a_chat_whose_lines_can_be_edited_recalled_and_pasted():
    with terminal("generate", "--temperature", "0.25", "--no-stats") as screen:
        screen.wait_for("fake-target with fake-draft")
        screen.wait_for("temperature 0.25")
        screen.wait_for_prompt()
        screen.type(b"echoo" + LEFT + BACKSPACE + ENTER)
        screen.wait_for('"content": "echo"')
        screen.wait_for_prompt()
        screen.type(UP + ENTER)
        screen.wait_for('"role": "assistant"')
        screen.wait_for('"content": "echo"')
        screen.wait_for_prompt()
        screen.type(b"\x1b[200~one\ntwo echo\x1b[201~")
        screen.wait_for("two echo")
        screen.type(ENTER)
        screen.wait_for('"content": "one\\ntwo echo"')
        screen.wait_for_prompt()
        screen.type(CTRL_D)
        assert screen.leave() == 0
        assert "\x01" not in screen.seen and "\x02" not in screen.seen


def test_a_prompt_can_begin_a_chat():
    with terminal("generate", "-i", "-p", "/exit\\n echo", "--plain", "--no-stats") as screen:
        screen.wait_for("/help lists the commands")
        screen.wait_for('"content": "/exit\\\\n echo"')  # a prompt is no command, and stays as it was typed
        screen.line("again echo")
        screen.wait_for('"content": "again echo"')
        screen.line("/exit")
        assert screen.leave() == 0


def test_thoughts_are_dim_and_a_model_cannot_steer_the_terminal():
    with terminal("generate", "-p", "steer") as screen:
        assert screen.leave() == 0
    assert "\x1b[2mhmm \x1b[0m" in screen.seen and "\x1b[2m[b][31mso\x1b[0m\r\na[31mredb\r\n" in screen.seen
    assert "6 tokens" in screen.seen


def test_output_is_plain_where_colour_is_not_wanted():
    with terminal("generate", "-p", "think", NO_COLOR="1") as screen:
        assert screen.leave() == 0
    assert "\x1b" not in screen.seen and "hmm" in screen.seen and "8 tokens" in screen.seen


def test_a_chat_on_a_dumb_terminal_has_no_control_bytes():
    with terminal("chat", TERM="dumb") as screen:
        screen.line("two\\\recho")
        screen.wait_for('"content": "two\\necho"')
        screen.line("think")
        screen.wait_for("yes, it is")
        screen.line("slow")
        screen.wait_for("word2 ")
        screen.type(CTRL_C)
        screen.wait_for("stopped")
        screen.wait_for_prompt()
        screen.type(CTRL_C)
        screen.wait_for("once more")
        screen.wait_for_prompt()
        screen.type(CTRL_D)
        assert screen.leave() == 0
        assert "\x1b" not in screen.seen


def test_answers_can_be_redirected_from_a_chat(tmp_path):
    with terminal("chat", stdout=tmp_path / "answers") as screen:
        screen.line("hi")
        screen.line("/exit")
        assert screen.leave() == 0
    assert (tmp_path / "answers").read_text() == "hi\n"


def test_interrupted_while_typing_a_prompt_exits_130():
    with terminal("generate", "-p", "-") as screen:
        screen.wait_for("Type the prompt")
        screen.type(CTRL_C)
        assert screen.leave() == 130
        assert "Traceback" not in screen.seen


def test_alt_enter_and_quotes_make_one_message_of_many_lines():
    with terminal("chat", "--plain", "--no-stats") as screen:
        screen.wait_for_prompt()
        screen.type(b"one" + ALT_ENTER + b"two echo" + ENTER)
        screen.wait_for('"content": "one\\ntwo echo"')
        screen.wait_for_prompt()
        screen.type(b'"""' + ENTER + b"three" + ENTER + b'echo"""' + ENTER)
        screen.wait_for('"content": "three\\necho"')
        screen.wait_for_prompt()
        screen.type(b"four\\" + ENTER + b"echo" + ENTER)
        screen.wait_for('"content": "four\\necho"')
        screen.line("/exit")
        assert screen.leave() == 0


@pytest.mark.parametrize(("line", "goes"), [("a\\", True), ("a\\\\", False), ("\\\\\\", True), ("", False)])
def test_a_backslash_of_its_own_asks_for_another_line(line, goes):
    assert _goes_on(line) is goes


def test_a_large_paste_arrives_byte_for_byte():
    paste = (
        "\n".join(f"line {i}:\tsome \\ text \u00e9\u6f22 [b] /x {'y' * 40}" for i in range(300)) + "\nlength"
    )
    assert len(paste.encode()) > 20_000
    with terminal("chat", "--plain", "--no-stats", "--no-history") as screen:
        screen.wait_for_prompt()
        screen.type_all(b"\x1b[200~" + paste.encode() + b"\x1b[201~")
        screen.type_all(ENTER)
        screen.wait_for(f"got {len(paste)} {hashlib.sha256(paste.encode()).hexdigest()}")


def test_commands_are_completed_by_tab():
    with terminal("chat", "--no-stats") as screen:
        screen.wait_for_prompt()
        screen.type(b"/und" + TAB)
        screen.wait_for("/undo")
        screen.type(ENTER)
        screen.wait_for("nothing to undo")
        screen.wait_for_prompt()
        screen.type(b"/set temp" + TAB)
        screen.wait_for("temperature")
        screen.type(b" 0.125" + ENTER)
        screen.wait_for("temperature 0.125")


def test_an_enter_right_behind_a_tab_sends_the_whole_command():
    """The completion is there before the Enter, though both arrive at once."""
    with terminal("chat", "--no-stats") as screen:
        screen.wait_for_prompt()
        screen.type(b"/und" + TAB + ENTER)
        screen.wait_for("nothing to undo")
        screen.wait_for_prompt()
        screen.type(b"hello echo" + TAB + ENTER)  # no command: nothing to complete, nothing lost
        screen.wait_for('"content": "hello echo"')


def test_an_enter_in_the_menu_sends_no_half_a_command():
    with terminal("chat", "--no-stats", "--no-history") as screen:
        screen.wait_for_prompt()
        screen.type(b"/s" + TAB + ENTER)  # /system, /set, /stats, /save: the first is taken, and not sent yet
        screen.wait_for("/system")
        screen.type(b" Be brief." + ENTER)
        screen.wait_for("system: Be brief.")
        screen.wait_for_prompt()
        screen.type(b"/s" + TAB + TAB + TAB)
        screen.wait_for("/set")
        screen.type(ENTER)
        screen.wait_for("temperature 0.6, top_p 0.95")
        assert "not a command" not in screen.seen


def test_lines_are_recalled_in_the_next_run_unless_that_is_unwanted(tmp_path):
    runs = [([], True), ([], False), (["--no-history"], False)]
    for options, types in runs:
        with terminal("chat", "--plain", *options, DFLASH_CACHE=str(tmp_path)) as screen:
            if types:
                screen.line("remember echo")
                screen.wait_for('"content": "remember echo"')
            else:
                screen.wait_for_prompt()
                screen.type(UP + UP + ENTER)  # the last line was /exit
                if options:
                    screen.type(b"nothing echo" + ENTER)
                screen.wait_for('"content": "nothing echo"' if options else '"content": "remember echo"')
            screen.line("/exit")
            assert screen.leave() == 0
    assert stat.S_IMODE((tmp_path / "history").stat().st_mode) == 0o600
    assert "nothing" not in (tmp_path / "history").read_text()


@pytest.mark.slow
def test_a_message_can_be_written_in_an_editor(tmp_path):
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nprintf 'written\\nthere echo\\n' > \"$1\"\n")
    editor.chmod(0o755)
    with terminal("chat", "--plain", EDITOR=str(editor), VISUAL="") as screen:
        screen.line("/edit")
        screen.wait_for('"content": "written\\nthere echo"')
        screen.wait_for_prompt()
    with terminal("chat", EDITOR="/nowhere/editor", VISUAL="") as screen:
        screen.line("/edit")
        screen.wait_for("Set EDITOR to one that works")
        screen.wait_for_prompt()
        assert "Traceback" not in screen.seen


def test_markdown_is_drawn_while_it_streams():
    with terminal("chat", "--no-stats", columns=40) as screen:
        screen.line("markdown")
        screen.wait_for("1 = one")
        screen.wait_for_prompt()
        assert "\x1b[1mbold\x1b[0m" in screen.seen and "**bold**" not in screen.seen
        screen.type(CTRL_D)
        assert screen.leave() == 0


@pytest.mark.slow
def test_a_stopped_markdown_answer_leaves_a_whole_screen():
    with terminal("chat", "--no-stats") as screen:
        screen.line("slow")
        screen.wait_for("word2 ")
        screen.type(CTRL_C)
        screen.wait_for("stopped")
        screen.wait_for_prompt()
        screen.type(b"hi" + ENTER)
        screen.wait_for("hi")


@pytest.mark.slow
def test_markdown_is_left_alone_where_plain_text_is_wanted():
    for options, variables in ((["--plain"], {}), ([], {"NO_COLOR": "1"}), ([], {"TERM": "dumb"})):
        with terminal("chat", *options, **variables) as screen:
            screen.line("markdown")
            screen.wait_for("**bold**")


def test_a_chat_says_what_it_loads_and_how_long_that_took():
    with terminal("chat") as screen:
        screen.wait_for("Loading the default pair of this machine")
        screen.wait_for("1.50 GB ready in 0.1 s")
        screen.wait_for_prompt()


@pytest.mark.slow
def test_ctrl_c_while_loading_and_before_the_first_token_is_quiet():
    with terminal("chat", "--target-model", "slow") as screen:
        screen.wait_for("Loading slow")
        screen.type(CTRL_C)
        assert screen.leave() == 130 and "Traceback" not in screen.seen
    with terminal("chat") as screen:
        screen.line("late")
        screen.wait_for("reading ...")
        screen.type(CTRL_C)
        screen.wait_for("stopped")
        screen.line("echo")
        screen.wait_for('[{"role": "user", "content": "echo"}]')


def test_a_whole_dialogue_in_40_columns():
    with terminal("chat", "--no-stats", "--plain", columns=40, TERM="dumb") as screen:
        for line in ("hi", "/undo", "think", "/xyz", "/exit"):
            screen.line(line)
        assert screen.leave() == 0
    assert screen.seen.replace("\r\n", "\n").replace("\r", "") == (
        "Loading the default pair of this machine ...\n"
        "Reading the target fake-target (2.00 GB) ...\n"
        "made of the default pair\n"
        "fake-target with fake-draft \u00b7 1.50 GB ready in 0.1 s \u00b7 temperature 0.6, top_p 0.95 \u00b7 "
        "/help lists the commands\n"
        "> hi\nhi\n"
        "> /undo\nforgotten: hi\n"
        "> think\nhmm [b]so\nyes, it is\n"
        "> /xyz\n/xyz is not a command; /help lists them. A space before it sends it as text.\n"
        "> /exit\n"
    )
