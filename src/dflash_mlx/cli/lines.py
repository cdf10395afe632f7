'''Where a chat's messages come from: a terminal with editing, a dumb terminal, or a pipe. Knows no chat.

A reader returns the next message, None at the end of input; Ctrl-C at an empty line is a KeyboardInterrupt. Lines
from one that begins with """ to one that ends with """ are one message, without the quotes; on a terminal a line
that ends in a backslash is followed by another of the same message.
'''

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dflash_mlx.cli.prompt import binary_stdin, decode, stdin_is_terminal

if TYPE_CHECKING:
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

Ask = Callable[[], str | None]

_PROMPT = "> "
_QUOTES = '"""'


def reader(*, history: Path | None, completions: Callable[[str], list[str]]) -> Ask:
    """The reader that suits this stdin.

    Args:
        history: where the lines of this and earlier runs are kept; None keeps them for this run alone.
        completions: what could stand in place of the last word of a line that begins with a slash.
    """
    stream = binary_stdin()
    if stream is None:
        return lambda: None
    if not stdin_is_terminal():
        return _blocks(lambda: _next_line(stream))
    if os.environ.get("TERM", "dumb") in ("", "dumb") or not (sys.stderr.isatty() or sys.stdout.isatty()):
        return _blocks(lambda: _prompted_line(stream))
    return _blocks(_edited_lines(history, completions))


def history_file() -> Path:
    """Where lines are kept from run to run; it may not exist yet."""
    from dflash_mlx import runtime

    return runtime.cache_dir() / "history"


def edit(text: str) -> str | None:
    """Let a person write in $VISUAL or $EDITOR; None where nothing was written.

    Raises:
        UsageError: the editor cannot be started or failed.
    """
    import click

    from dflash_mlx.errors import UsageError

    try:
        written = click.edit(text, extension=".md")
    except click.ClickException as error:
        raise UsageError(f"{error.message} Set EDITOR to one that works.") from None
    return (written or "").strip("\n") or None


def _blocks(ask: Ask) -> Ask:
    """Join the lines between quotes; an end of input ends them too."""

    def asked() -> str | None:
        text = ask()
        while text is not None and _is_open(text):
            more = ask()
            if more is None:
                break
            text = f"{text}\n{more}"
        if text is None or not text.lstrip().startswith(_QUOTES):
            return text
        inner = text.strip().removeprefix(_QUOTES).removesuffix(_QUOTES)
        return inner.removeprefix("\n").removesuffix("\n")

    return asked


def _is_open(text: str) -> bool:
    """Whether a message begins with quotes that nothing closes yet."""
    text = text.strip()
    closed = len(text) >= 2 * len(_QUOTES) and text.endswith(_QUOTES)
    return text.startswith(_QUOTES) and not closed


def _goes_on(text: str) -> bool:
    """Whether a typed line ends in a backslash of its own, which asks for another line."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def _next_line(stream: BinaryIO) -> str | None:
    line = stream.readline()
    return decode(line, "stdin").rstrip("\r\n") if line else None


def _prompted_line(stream: BinaryIO) -> str | None:
    sys.stderr.write(_PROMPT)
    sys.stderr.flush()
    text = _next_line(stream)
    while text is not None and _goes_on(text):
        text = text[:-1] + "\n" + (_next_line(stream) or "")
    return text


def _edited_lines(history: Path | None, completions: Callable[[str], list[str]]) -> Ask:
    """Messages edited with prompt-toolkit; what is pasted stays one message, whatever its lines."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    screen = sys.stderr if sys.stderr.isatty() else sys.stdout
    session: PromptSession[str] = PromptSession(
        output=create_output(stdout=screen),
        history=_history(history),
        completer=_completer(completions),
        complete_while_typing=False,
        multiline=True,
        key_bindings=_keys(completions),
        prompt_continuation="  ",
    )

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


def _keys(completions: Callable[[str], list[str]]) -> KeyBindings:
    """Enter sends what is written or, behind a backslash, begins a new line, as Alt-Enter does; Tab completes."""
    from prompt_toolkit.buffer import CompletionState
    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: Any) -> None:
        buffer = event.current_buffer
        menu = buffer.complete_state
        if _goes_on(buffer.text) and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif _is_open(buffer.text):
            buffer.insert_text("\n")
        elif menu and menu.current_completion is None:
            buffer.go_to_completion(0)  # a beginning of several commands is none yet
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("tab")
    def _(event: Any) -> None:
        buffer = event.current_buffer
        line = buffer.document.text_before_cursor
        if buffer.complete_state:
            buffer.complete_next()
        elif line.startswith("/"):
            # Inserted here and now: a completion that a task brings later would miss an Enter that is typed already.
            choices = completions(line)
            word = line.rpartition(" ")[2]
            buffer.insert_text(os.path.commonprefix(choices)[len(word) :])
            if len(choices) > 1:
                shown = buffer.completer.get_completions(buffer.document, CompleteEvent())
                buffer.complete_state = CompletionState(buffer.document, list(shown))
        elif not line.strip():
            buffer.insert_text("    ")

    return keys


def _completer(completions: Callable[[str], list[str]]) -> Completer:
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.document import Document

    class Commands(Completer):
        def get_completions(self, document: Document, complete_event: object) -> Iterator[Completion]:
            line = document.text_before_cursor
            if line.startswith("/"):
                for choice in completions(line):
                    yield Completion(choice, start_position=-len(line.split(" ")[-1]))

    return Commands()


def _history(path: Path | None) -> History:
    """Lines of earlier runs, readable by their writer alone; those of this run where no file can be had."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if path is not None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            path.chmod(0o600)
            return FileHistory(path)
    return InMemoryHistory()
