"""The chat on a terminal of its own (a pty), driven as a hand would."""

import os
import pty
import re
import select
import signal
import subprocess
import time
from contextlib import contextmanager

from tests.cli.test_process import PROGRAM, environment

CTRL_C, CTRL_D, ENTER, BACKSPACE, UP, LEFT = b"\x03", b"\x04", b"\r", b"\x7f", b"\x1b[A", b"\x1b[D"
TIMEOUT = 10


class Terminal:
    """The master's end: types, and waits for what appears."""

    def __init__(self, process, master):
        self.process, self._master = process, master
        self.seen = ""  # everything so far, escape sequences included
        self._read_to = 0
        self._prompts = 0

    def type(self, keys):
        os.write(self._master, keys)

    def line(self, text):
        """Wait for the prompt, then type a line."""
        self.wait_for_prompt()
        self.type(text.encode() + ENTER)

    def wait_for_prompt(self):
        """Read until a prompt stands there that was not waited for before."""
        self._prompts += 1
        self._wait(lambda: len(re.findall(r"\x1b\[\?2004h|\n> ", self.seen)) >= self._prompts, "prompt")
        self._read_to = len(plain(self.seen))

    def wait_for(self, text):
        """Read until `text` stands after what was waited for before."""
        self._wait(lambda: plain(self.seen).find(text, self._read_to) >= 0, text)
        self._read_to = plain(self.seen).find(text, self._read_to) + len(text)

    def leave(self):
        """Wait for the end; the exit code."""
        deadline = time.monotonic() + TIMEOUT
        while self._pump():
            assert time.monotonic() < deadline, f"still there: {self.seen[-500:]!r}"
        return self.process.wait(TIMEOUT)

    def _wait(self, come, what):
        deadline = time.monotonic() + TIMEOUT
        while not come():
            assert time.monotonic() < deadline, f"no {what!r} in {self.seen[-500:]!r}"
            assert self._pump(), f"ended without {what!r}: {self.seen[-500:]!r}"

    def _pump(self):
        ready, _, _ = select.select([self._master], [], [], 0.5)
        if not ready:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)


def plain(text):
    return re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|[=>78])", "", text)


@contextmanager
def terminal(*arguments, stdout=None, **variables):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, *arguments],
        stdin=slave,
        stdout=slave if stdout is None else stdout,
        stderr=slave,
        env=environment(**{"TERM": "xterm", "NO_COLOR": "", "PROMPT_TOOLKIT_NO_CPR": "1", **variables}),
        preexec_fn=_own_terminal,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _own_terminal():
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_ctrl_c_stops_the_answer_and_keeps_the_chat():
    """cli-repl 140."""
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
    with (tmp_path / "answers").open("w") as file, terminal("chat", stdout=file) as screen:
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
