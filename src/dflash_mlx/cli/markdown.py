"""Markdown drawn while it is being written: pieces of text in, finished blocks and a live last one out.

A block is printed for good when a blank line, a heading or a fence ends it, code line by line; what is still open
stands below, under it a line of status, and both are drawn again with every piece. Each piece is one write, so that
no terminal shows half a picture. No text is dropped: what Markdown would swallow (HTML, link definitions,
backslashes) is shown as it is. Knows no chat.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.syntax import Syntax
from rich.text import Text

_THEME = "ansi_dark"  # the terminal's own colours
_FENCE = re.compile(r"^ {0,8}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$")


class MarkdownStream:
    """One answer on a terminal, the thoughts before it dimmed.

    Args:
        console: of the terminal.
    """

    def __init__(self, console: Console):
        self._console = console
        self._live: Live | None = None
        self._status = ""
        self._partial = ""  # the line that still grows
        self._thinks = False  # whether that line is a thought's
        self._block: list[str] = []  # whole lines of the open block
        self._fence: str | None = None  # the mark that ends the open code
        self._code: list[str] = []
        self._language = ""
        self._gap = False  # whether a blank line stands between what was printed and what comes

    @property
    def width(self) -> int:
        """Columns that a line of status may take."""
        return self._console.width - 1

    def feed(self, text: str, *, status: str = "") -> None:
        """Draw a piece of the answer, and a line of status below it."""
        self._status = status
        with self._one_write():
            self._end_thought()
            *lines, self._partial = (self._partial + text).split("\n")
            for line in lines:
                self._line(line)
            self._draw()

    def think(self, text: str, *, status: str = "") -> None:
        """Draw a piece of the thoughts, and a line of status below it."""
        self._status = status
        with self._one_write():
            if not self._thinks:
                self._flush()
            *lines, self._partial = (self._partial + text).split("\n")
            self._thinks = True
            for line in lines:
                self._thought(line)
            self._draw()

    def say(self, status: str) -> None:
        """Draw another line of status and nothing else; "" for none."""
        if status != self._status:
            self._status = status
            with self._one_write():
                self._draw()

    def finish(self) -> None:
        """Print what is still open; the next piece begins another answer."""
        self._status = ""
        if self._live is None:
            return
        with self._console:
            live, self._live = self._live, None
            live.stop()
            self._end_thought()
            if self._partial:
                self._line(self._partial)
            self._flush()
        self._partial, self._fence, self._code, self._gap = "", None, [], False

    @contextmanager
    def _one_write(self) -> Iterator[None]:
        with self._console:
            if self._live is None:
                self._live = Live(
                    console=self._console,
                    auto_refresh=False,
                    transient=True,
                    redirect_stdout=False,
                    redirect_stderr=False,
                )
                self._live.start()
            yield

    def _draw(self) -> None:
        assert self._live is not None
        body = self._open()
        gap = self._gap and body is not None and not self._thinks and self._fence is None
        rows = self._console.height - 2 - gap - bool(self._status)
        lines: list[RenderableType] = [Text("")] if gap and rows > 0 else []
        if body is not None:
            lines.append(_Drawn(body, most=max(1, rows)))
        if self._status:
            lines.append(Text(self._status, style="dim", no_wrap=True, overflow="crop"))
        self._live.update(Group(*lines), refresh=True)

    def _end_thought(self) -> None:
        if self._thinks:
            thought, self._partial, self._thinks = self._partial, "", False
            if thought:
                self._thought(thought)

    def _thought(self, line: str) -> None:
        self._console.print(_Drawn(Text(line, style="dim")))

    def _line(self, line: str) -> None:
        if self._fence is not None:
            if line.strip().startswith(self._fence) and not line.strip().strip(self._fence[0]):
                self._fence, self._code, self._gap = None, [], True
            else:
                self._code.append(line)
                self._console.print(self._highlighted()[-1])
        elif opens := _FENCE.match(line):
            self._flush()
            self._fence, self._language, self._code = opens[1], opens[2], []
            self._space()
        elif not line.strip():
            self._flush()
        else:
            if line.startswith("#"):
                self._flush()
            self._block.append(line)
            if line.startswith("#"):
                self._flush()

    def _flush(self) -> None:
        """Print the open block for good."""
        if self._block:
            self._space()
            self._console.print(drawn("\n".join(self._block)))
            self._block, self._gap = [], True

    def _space(self) -> None:
        if self._gap:
            self._console.print()
        self._gap = False

    def _open(self) -> RenderableType | None:
        """What may still change; None where that is nothing."""
        if self._thinks:
            return Text(self._partial, style="dim") if self._partial else None
        if self._fence is not None:
            return Text(self._partial) if self._partial else None
        text = "\n".join([*self._block, self._partial])
        return _markdown(text) if text.strip() else None

    def _highlighted(self) -> list[Text]:
        """The code so far; a line's colours depend on those before it."""
        syntax = Syntax("", self._language or "text", theme=_THEME)
        lines = syntax.highlight("\n".join(self._code)).split("\n", allow_blank=True)
        return list(lines)[: len(self._code)]


def drawn(text: str) -> RenderableType:
    """A whole text as Markdown."""
    return _Drawn(_markdown(text))


class _Drawn:
    """Something without the blanks that Rich fills lines with.

    Args:
        content: what to draw.
        most: lines to show, the last ones: of those above the screen's edge none can be drawn again.
    """

    def __init__(self, content: RenderableType, *, most: int | None = None):
        self._content, self._most = content, most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._content, options, pad=False)
        for line in lines if self._most is None else lines[-self._most :]:
            while line and not line[-1].text.strip() and not (line[-1].style and line[-1].style.bgcolor):
                line.pop()
            if line and not (line[-1].style and line[-1].style.bgcolor):
                line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
            yield from line
            yield Segment.line()


def _markdown(text: str) -> Markdown:
    drawn = Markdown(text, code_theme=_THEME, hyperlinks=False)
    parser = MarkdownIt().enable(["strikethrough", "table"])
    parser.disable(["html_block", "html_inline", "reference", "escape"])
    drawn.parsed = parser.parse(text)
    return drawn
