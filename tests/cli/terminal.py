"""A terminal of its own (a pty) for the console with the fake generator, driven as a hand would.

    with terminal("chat", "--plain", columns=40, NO_COLOR="1") as screen:
        screen.line("hi")
        screen.wait_for("tokens/s")

Everything waits for output and nothing for a time; what is typed may come before it is asked for.
"""

import atexit
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import termios
import time
from contextlib import contextmanager, suppress
from functools import cache

from tests.cli.test_process import PROGRAM, environment

CTRL_C, CTRL_D, ENTER, BACKSPACE, UP, LEFT = b"\x03", b"\x04", b"\r", b"\x7f", b"\x1b[A", b"\x1b[D"
ALT_ENTER, TAB = b"\x1b\r", b"\t"
OWN = tempfile.mkdtemp(prefix="dflash-terminal-")  # no test writes to the history of whoever runs it
atexit.register(shutil.rmtree, OWN, ignore_errors=True)
TIMEOUT = 60  # seconds until something is taken not to come; a busy machine is slow


class Program:
    """A process that runs the console, forked from one that has imported everything."""

    def __init__(self, arguments, variables, terminal, stdout):
        self.pid = _asked(
            arguments=arguments,
            variables=variables,
            terminal=terminal,
            stdout=str(stdout) if stdout else None,
        )
        self.code = None

    def send_signal(self, number):
        os.kill(self.pid, number)

    def wait(self):
        deadline = time.monotonic() + TIMEOUT
        while self.code is None:
            assert time.monotonic() < deadline, "still there"
            self.code = _asked(wait=self.pid)
            if self.code is None:
                time.sleep(0.01)
        return self.code

    def end(self):
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()


@cache
def _zygote():
    made = subprocess.Popen(
        [*PROGRAM, "zygote"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(DFLASH_BLAS="off"),
        start_new_session=True,
    )
    atexit.register(made.kill)
    return made


def _asked(**request):
    zygote = _zygote()
    zygote.stdin.write(json.dumps(request) + "\n")
    zygote.stdin.flush()
    return json.loads(zygote.stdout.readline())


class Terminal:
    """The master's end: types, and waits for what appears."""

    def __init__(self, process, master):
        self.process, self._master = process, master
        self.seen = ""  # everything so far, escape sequences included
        self._read_to = 0
        self._prompts = 0

    def type(self, keys):
        os.write(self._master, keys)

    def type_all(self, keys):
        """Type more than the terminal holds at once, reading meanwhile."""
        while keys:
            self._pump(0)
            if select.select([], [self._master], [], 0.2)[1]:
                keys = keys[os.write(self._master, keys[:512]) :]

    def wait_for_output(self):
        """Read until something stands there."""
        self._wait(lambda: self.seen, "output")

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
        return self.process.wait()

    def _wait(self, come, what):
        deadline = time.monotonic() + TIMEOUT
        while not come():
            assert time.monotonic() < deadline, f"no {what!r} in {self.seen[-500:]!r}"
            assert self._pump(), f"ended without {what!r}: {self.seen[-500:]!r}"

    def _pump(self, seconds=0.5):
        ready, _, _ = select.select([self._master], [], [], seconds)
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
def terminal(*arguments, stdout=None, columns=300, rows=24, **variables):
    """The console on a terminal; `stdout` is a file for the answers, `variables` are of the environment."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    own = {"TERM": "xterm", "NO_COLOR": "", "PROMPT_TOOLKIT_NO_CPR": "1"}
    own |= {"DFLASH_CACHE": OWN, "DFLASH_BLAS": "off", "COLUMNS": "", "LINES": ""}
    process = Program(arguments, environment(**{**own, **variables}), os.ttyname(slave), stdout)
    screen = Terminal(process, master)
    screen.wait_for_output()  # the process holds the terminal itself then
    os.close(slave)
    try:
        yield screen
    finally:
        process.end()
        os.close(master)


def drawn(output, columns):
    """What a terminal of so many columns shows at last, all lines that left the screen included; no styles."""
    rows, row, column = [""], 0, 0
    pattern = r"([^\x1b\x00-\x1f]+)|(\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>78]|\x1b\][^\x07]*\x07|[\x00-\x1f])"
    for text, key in re.findall(pattern, output):
        for letter in text:
            if column >= columns:
                row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
            rows[row] = rows[row][:column].ljust(column) + letter + rows[row][column + 1 :]
            column += 1
        rows += [""] * (row + 1 - len(rows))
        count = int(key[2:-1]) if key[2:-1].isdigit() else 1
        match key[-1:] if key.startswith("\x1b[") else key:
            case "\r":
                column = 0
            case "\n":
                row += 1
            case "\b" | "D":
                column = max(0, column - (count if key != "\b" else 1))
            case "A":
                row = max(0, row - count)
            case "B":
                row += count
            case "C":
                column += count
            case "K":
                rows[row] = "" if key == "\x1b[2K" else rows[row][:column]
            case "J":
                rows[row:] = [rows[row][:column]]
    return "\n".join(line.rstrip() for line in rows).rstrip("\n")
