"""Where a chat's lines come from: a terminal with editing, a dumb terminal, or a pipe. Knows no chat.

A reader returns the next message, None at the end of input; Ctrl-C at an empty line is a KeyboardInterrupt.
"""

import os
import sys
from collections.abc import Callable
from typing import BinaryIO

from dflash_mlx.cli.prompt import binary_stdin, decode, stdin_is_terminal

Ask = Callable[[], str | None]

_PROMPT = "> "


def reader() -> Ask:
    """The reader that suits this stdin."""
    stream = binary_stdin()
    if stream is None:
        return lambda: None
    if not stdin_is_terminal():
        return lambda: _next_line(stream)
    if os.environ.get("TERM", "dumb") in ("", "dumb") or not (sys.stderr.isatty() or sys.stdout.isatty()):
        return lambda: _prompted_line(stream)
    return _edited_lines()


def _next_line(stream: BinaryIO) -> str | None:
    line = stream.readline()
    return decode(line, "stdin").rstrip("\r\n") if line else None


def _prompted_line(stream: BinaryIO) -> str | None:
    sys.stderr.write(_PROMPT)
    sys.stderr.flush()
    return _next_line(stream)


def _edited_lines() -> Ask:
    """Lines edited with prompt-toolkit: history of this run, pasted lines as one message."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    screen = sys.stderr if sys.stderr.isatty() else sys.stdout
    session: PromptSession[str] = PromptSession(output=create_output(stdout=screen))

    def ask() -> str | None:
        while True:
            try:
                return session.prompt(_PROMPT)
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not session.default_buffer.text:
                    raise

    return ask
