"""The prompt as text, from the command line, a file or a pipe; MLX is not loaded."""

import select
import sys
from collections.abc import Callable
from typing import BinaryIO

from dflash_mlx.cli.options import Options
from dflash_mlx.errors import UsageError

_PATIENCE = 1.0  # seconds of waiting for a pipe before saying so
_LONG_ENOUGH = 10.0  # seconds after which a silent pipe beside a prompt is taken for none


class NoPrompt(UsageError):
    """Nothing was asked, and there is no terminal to ask on."""


def read_prompt(options: Options, note: Callable[[str], None]) -> str | None:
    """The whole prompt, or None where none was given and stdin is a terminal.

    A pipe is the prompt, or, where one was given, a document after it.

    Args:
        options: checked ones.
        note: told when stdin keeps the program waiting.

    Raises:
        NoPrompt: where there is none at all.
        UsageError: for a prompt that is empty or not text.
    """
    if "-" in (options.prompt, options.prompt_file):
        return _filled(_read_stdin(note), "stdin")
    if options.prompt is not None:
        return _with_document(_filled(options.prompt, "--prompt"), note)
    if options.prompt_file is not None:
        source = f"--prompt-file {options.prompt_file}"
        return _with_document(_filled(read_file(options.prompt_file, source), source), note)
    if stdin_is_terminal():
        return None
    prompt = _read_stdin(note)
    if not prompt.strip():
        raise NoPrompt("There is no prompt: give one with --prompt, --prompt-file or a pipe.")
    return prompt


def stdin_is_terminal() -> bool:
    """Whether a person can answer; a program may also be started without any stdin."""
    return sys.stdin is not None and sys.stdin.isatty()


def binary_stdin() -> BinaryIO | None:
    """Stdin as bytes; None where the program was started without one."""
    return sys.stdin.buffer if sys.stdin is not None else None


def decode(data: bytes, source: str) -> str:
    """UTF-8 text without a byte-order mark.

    Raises:
        UsageError: at the first byte that is none.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8 text (byte {error.start}); convert it first.") from None


def _filled(text: str, source: str) -> str:
    if not text.strip():
        raise UsageError(f"The prompt is empty: {source} holds no text.")
    return text


def _with_document(prompt: str, note: Callable[[str], None]) -> str:
    document = _read_beside(note)
    return f"{prompt}\n\n{document}" if document.strip() else prompt


def _read_beside(note: Callable[[str], None]) -> str:
    """What a pipe holds beside a prompt; one that stays silent is left alone, as many programs leave one open."""
    stream = binary_stdin()
    if stream is None or stdin_is_terminal():
        return ""
    if not _has_something(stream, _PATIENCE):
        note("Waiting for the pipe beside the prompt; `< /dev/null` gives none.")
        if not _has_something(stream, _LONG_ENOUGH):
            note(f"Nothing came through the pipe within {_LONG_ENOUGH:.0f} seconds: going on without it.")
            return ""
    return _without_last_newline(decode(stream.read(), "stdin"))


def read_file(path: str, source: str) -> str:
    """The text of a file, without its last line's end; `source` is what it is called.

    Raises:
        UsageError: it cannot be read, or is no text.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UsageError(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    return _without_last_newline(decode(data, source))


def _read_stdin(note: Callable[[str], None]) -> str:
    stream = binary_stdin()
    if stream is None:
        return ""
    if stdin_is_terminal():
        note("Type the prompt; Ctrl-D on a new line ends it.")
    elif not _has_something(stream, _PATIENCE):
        note("Waiting for stdin to end; `< /dev/null` gives none.")
    return _without_last_newline(decode(stream.read(), "stdin"))


def _has_something(stream: BinaryIO, seconds: float) -> bool:
    """Whether data or the end comes within that time."""
    try:
        ready, _, _ = select.select([stream], [], [], seconds)
    except (OSError, ValueError):  # not a file that can be waited for
        return True
    return bool(ready)


def _without_last_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")
