"""What people see: text and figures in, stdout and stderr out. The only file that draws; it decides nothing.

Model text goes to stdout as it is, never as markup. All else goes to stderr, styled where that is a terminal.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dflash_mlx.cli import figures
from dflash_mlx.cli.markdown import MarkdownStream
from dflash_mlx.cli.sections import lines

if TYPE_CHECKING:  # it loads MLX
    from rich.console import RenderableType

    from dflash_mlx.cli.record import Record
    from dflash_mlx.core import ChunkKind, Comparison, LoadStep, Stats

_FRAME = 0.1  # seconds between two pictures of how far loading is
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)))  # all but tab and newline


def stderr_console() -> Console:
    """Stderr; without styles where it is no terminal, where TERM is dumb or NO_COLOR is set."""
    if os.environ.get("NO_COLOR"):
        return Console(stderr=True, color_system=None)
    return Console(stderr=True)


class View:
    """One run's output.

    Args:
        console: where everything but the answer goes.
        answers: where the answer goes.
        stats: whether to show figures; None: only on a terminal.

    Attributes:
        hides_thoughts: whether thoughts are told but not shown.
    """

    def __init__(self, console: Console, answers: TextIO, stats: bool | None = None):
        self.hides_thoughts = False
        self._markdown: MarkdownStream | None = None
        self._console = console
        self._answers = answers
        self._answers_on_terminal = answers.isatty()
        self.shows_stats = console.is_terminal if stats is None else stats
        self._kind: ChunkKind = "answer"
        self._open = {"answer": False, "thought": False}  # whether its last line still lacks a newline
        # Whether a terminal can draw a line again.
        self._moves = not (os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") in ("", "dumb"))
        self._live: Live | None = None  # how far loading is
        self._next_progress = 0.0
        self._folded = 0  # tokens of the thought that is being hidden
        self._noted: set[str] = set()

    def read_markdown(self) -> None:
        """From now on draw answers as Markdown, where they go to a terminal that can do so."""
        if self._answers_on_terminal and self._moves:
            self._markdown = MarkdownStream(Console(file=self._answers, force_terminal=True, highlight=False))

    def wait(self, text: str) -> None:
        """Show what is being waited for, until the first piece comes; only where answers are drawn."""
        if self._markdown and self._console.is_terminal:
            self._markdown.say(_printable(text))

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """For the time that something is loaded; what `loading` draws leaves with it."""
        try:
            yield
        finally:
            self.end_answer()

    def loading(self, step: LoadStep) -> None:
        """Show what is being fetched or read, and how far that is; the latter only on a terminal."""
        if step.stage == "fetch":
            self.note(f"Fetching the {step.role} {step.name}{_in_gb(step.nbytes, ' ({})')} from the hub ...")
        elif self._console.is_terminal and (not step.done or time.monotonic() > self._next_progress):
            self._next_progress = time.monotonic() + _FRAME if step.done else 0.0
            if self._live is None and not self._moves:
                self.note(f"Reading the {step.role} {step.name}{_in_gb(step.nbytes, ' ({})')} ...")
                return
            if self._live is None:
                self._live = Live(
                    console=self._console,
                    transient=True,
                    auto_refresh=False,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()
            far = f" {step.done / 1e9:.2f} of" if step.done else ""
            line = f"reading the {step.role} {step.name}:{far}{_in_gb(step.nbytes, ' {}')}"
            self._live.update(Text(line, style="dim", no_wrap=True, overflow="ellipsis"), refresh=True)

    def piece(self, text: str, kind: ChunkKind, stats: Stats | None = None) -> None:
        """Show the next piece of an answer or of the thoughts before it.

        Args:
            text: the piece.
            kind: of the text.
            stats: running totals, for the line below what is drawn.
        """
        drawn = self._markdown if kind == "answer" or self._console.is_terminal else None
        status = self._status(stats) if drawn else ""
        if kind == "thought" and text and self.hides_thoughts:
            self._fold(stats)
        elif drawn is not None and text:
            self._unfold()
            self._break("thought")
            (drawn.think if kind == "thought" else drawn.feed)(_printable(text), status=status)
        elif drawn is not None and status:
            drawn.say(status)
        elif text:
            self._write(text, kind)

    def end_answer(self) -> None:
        """Finish the line that is open on either stream."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._markdown:
            self._markdown.finish()
        self._unfold()
        self._break("thought")
        self._break("answer")
        self._kind = "answer"

    def record(self, record: Record) -> None:
        """Print one JSON object on stdout."""
        self._answers.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._answers.flush()

    def report(self, record: Record) -> None:
        """Print a record of sections on stdout: names beside values, rows of a table in columns."""
        for title, content in record.items():
            if content:
                self._answers.write(
                    f"{title}\n" + "".join(f"  {_printable(line)}\n" for line in lines(content))
                )
        self._answers.flush()

    def tables(self, parts: Iterable[RenderableType]) -> None:
        """Print tables on stdout; where that is no terminal, as wide as they are."""
        width = None if self._answers_on_terminal else 180
        colourless = bool(os.environ.get("NO_COLOR"))
        console = Console(file=self._answers, width=width, no_color=colourless, highlight=False)
        for part in parts:
            console.print(part)
        self._answers.flush()

    def note(self, text: str) -> None:
        """Say a thing on a line of its own; the same thing is said once."""
        if text not in self._noted:
            self._noted.add(text)
            self.say(text)

    def say(self, text: str) -> None:
        """Say a thing on a line of its own."""
        self.end_answer()
        if self._console.is_terminal and self._moves:
            self._console.print(Text(_printable(text), style="dim"))  # wrapped between words
        else:
            self._console.out(_printable(text), style="dim", highlight=False)

    def error(self, text: str) -> None:
        """Say what went wrong."""
        self.end_answer()
        self._console.out("error: ", style="bold red", highlight=False, end="")
        self._console.out(_printable(text), highlight=False)

    def traceback(self) -> None:
        """Show where the exception in hand came from."""
        self.end_answer()
        self._console.print_exception(show_locals=False)

    def figures(self, stats: Stats) -> None:
        """The line of figures after an answer, and the notes that were not said yet."""
        for text in stats.notes:
            self.note(text)
        if stats.finish_reason == "length":
            self.say(f"stopped at the limit of {stats.new_tokens} tokens")
        if self.shows_stats:
            self.say(figures.whole(stats))

    def verdict(self, comparison: Comparison) -> None:
        """Two lines: whether plain and drafted decoding agree, and how their speeds compare."""
        if (difference := comparison.first_difference) is None:
            self.say(f"identical: {comparison.drafted.stats.new_tokens} tokens, plain and drafted")
        elif difference.logit_gap is None:
            self.say(f"not identical: one text ends before token {difference.index}")
        else:
            self.say(
                f"not identical: token {difference.index} is {difference.plain} plain and "
                f"{difference.drafted} drafted, their logits {difference.logit_gap:.2g} apart"
            )
        plain, drafted = comparison.plain.stats, comparison.drafted.stats
        self.say(
            f"speed: {drafted.tokens_per_second:.1f} tokens/s drafted, {plain.tokens_per_second:.1f} plain, "
            f"{comparison.speedup:.2f} times"
        )

    def _status(self, stats: Stats | None) -> str:
        if stats is None or self._markdown is None or not (self.shows_stats and self._console.is_terminal):
            return ""
        return figures.live(stats, self._markdown.width)

    def _fold(self, stats: Stats | None) -> None:
        """Tell of a thought without showing it."""
        first, self._folded = self._folded == 0, stats.new_tokens if stats else 1
        if self._markdown and self._console.is_terminal:
            self._markdown.say(
                " · ".join(filter(None, ("thinking", self._status(stats))))[: self._markdown.width]
            )
        elif first:
            self._write("thinking", "thought")

    def _unfold(self) -> None:
        """Leave a line in the place of thoughts that were not shown."""
        tokens, self._folded = self._folded, 0
        if tokens and self._markdown and self._console.is_terminal:
            self._markdown.finish()
            self._console.out(f"thought for {tokens} tokens, hidden", style="dim", highlight=False)

    def _write(self, text: str, kind: ChunkKind) -> None:
        """Show a piece as it is."""
        if kind != self._kind:
            self._break(self._kind)
            self._kind = kind
        self._open[kind] = not text.endswith("\n")
        if kind == "thought":
            self._console.out(_printable(text), style="dim", highlight=False, end="")
        else:
            self._answers.write(_printable(text) if self._answers_on_terminal else text)
            self._answers.flush()

    def _break(self, kind: ChunkKind) -> None:
        if not self._open[kind]:
            return
        self._open[kind] = False
        if kind == "thought":
            self._console.out("")
        else:
            self._answers.write("\n")
            self._answers.flush()

    def details(self, stats: Stats) -> None:
        """Everything that is known of an answer, a line for each thing."""
        self.say(figures.details(stats))

    def copy(self, text: str) -> str:
        """Put a text on the clipboard; says how that went."""
        away = "SSH_CONNECTION" in os.environ  # the clipboard is where the terminal is
        for program in (["pbcopy"], ["wl-copy"], ["xclip", "-selection", "clipboard"]):
            if not away and shutil.which(program[0]):
                with suppress(OSError, subprocess.SubprocessError):
                    subprocess.run(program, input=text.encode(), check=True, timeout=5, capture_output=True)
                    return "copied"
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            return "Nothing was copied: there is no clipboard (pbcopy, wl-copy or xclip)."
        self._console.file.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\x07")
        self._console.file.flush()
        return "copied, where this terminal lets programs write to the clipboard"


def mute() -> View:
    """A view that shows nothing, for a process that works beside another."""
    nowhere = io.StringIO()
    return View(Console(file=nowhere), nowhere)


def silence(*streams: TextIO) -> None:
    """Let what is still in the buffers of closed pipes go nowhere, so that leaving the program is quiet."""
    for stream in streams:
        with suppress(OSError, ValueError):  # a stream without a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def stdout() -> TextIO:
    """Stdout, replacing what its encoding cannot write; nowhere where the program was started without one."""
    if sys.stdout is None:
        return open(os.devnull, "w")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return sys.stdout


def _in_gb(nbytes: int | None, form: str) -> str:
    return "" if nbytes is None else form.format(f"{nbytes / 1e9:.2f} GB")


def _printable(text: str) -> str:
    """Text without the control characters that would steer a terminal."""
    return text.translate(_CONTROLS)
