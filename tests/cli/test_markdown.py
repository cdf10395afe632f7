"""Markdown drawn while it streams: what is on the screen in the end, however the pieces came."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from dflash_mlx.cli.markdown import MarkdownStream

ANSWER = """\
# A title
Some *words* and `code`, then
a second line.

- one
- two

1. first
2. second

```python
def f(x):

    return "a" + x
```
| a | b |
|---|---|
| 1 | 2 |

<div>kept</div> and \\(x^2\\) and [ref]: and a < b

[later]: http://example.com
```
no end"""


def screen(pieces, *, width=60, height=24):
    """What a terminal shows at last: lines that are erased and drawn again count once."""
    return shown(written(pieces, width=width, height=height))


def reach(pieces, *, width, height):
    """By how many lines the cursor goes up at most."""
    moves = re.findall(r"(?:\x1b\[1A\x1b\[2K)+", written(pieces, width=width, height=height))
    return max(len(move) // len("\x1b[1A\x1b[2K") for move in moves)


def written(pieces, *, width, height):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=height, highlight=False)
    stream = MarkdownStream(console)
    for piece in pieces:
        stream.feed(piece)
    stream.finish()
    return file.getvalue()


def shown(output):
    """Follow the few sequences that a redrawn tail uses; styles are dropped."""
    rows, row, column = [""], 0, 0
    for text, key in re.findall(r"([^\x1b\r\n]+)|(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)", output):
        if text:
            rows[row] = rows[row][:column].ljust(column) + text + rows[row][column + len(text) :]
            column += len(text)
        elif key == "\r":
            column = 0
        elif key == "\n":
            row, column = row + 1, 0
            if row == len(rows):
                rows.append("")
        elif key.endswith("A"):
            row -= int(key[2:-1] or 1)
            assert row >= 0, "drawn above what it owns"
        elif key == "\x1b[2K":
            rows[row] = ""
    return "\n".join(rows).rstrip("\n")


WHOLE = screen([ANSWER])


def test_nothing_is_lost():
    for word in (
        "A title", "words", "code", "second line.", "• one", "• two", "1 first", "2 second", "def f(x):",
        'return "a" + x', "<div>kept</div>", "\\(x^2\\)", "[ref]:", "a < b", "[later]: http://example.com", "no end",
    ):  # fmt: skip
        assert word in WHOLE, word
    assert "*words*" not in WHOLE and "```" not in WHOLE and not re.search(r" +$", WHOLE, re.M)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60))
@settings(max_examples=20, deadline=None)
def test_the_pieces_make_no_difference(lengths):
    pieces, rest = [], ANSWER
    for length in lengths:
        pieces.append(rest[:length])
        rest = rest[length:]
    assert screen([*pieces, rest]) == WHOLE


@pytest.mark.parametrize(("width", "height"), [(40, 24), (20, 5), (60, 3)])
def test_a_small_terminal_loses_nothing_either(width, height):
    """A block longer than the screen: only its end is drawn again while it grows."""
    text = " ".join(f"w{i}" for i in range(60))
    pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
    drawn = screen(pieces, width=width, height=height)
    assert drawn.split() == text.split()
    assert reach(pieces, width=width, height=height) < height, (
        "what has left the screen cannot be drawn again"
    )
    assert max(map(len, drawn.splitlines())) <= width


def test_two_answers_do_not_run_together():
    file = io.StringIO()
    stream = MarkdownStream(Console(file=file, force_terminal=True, width=60))
    for answer in ("```\none", "two"):
        stream.feed(answer)
        stream.finish()
    assert shown(file.getvalue()) == "one\ntwo"


def test_code_is_coloured_by_what_stands_before_it():
    file = io.StringIO()
    stream = MarkdownStream(Console(file=file, force_terminal=True, width=60, color_system="standard"))
    stream.feed('```python\n"""a\nb"""\nc = 1\n```\n')
    stream.finish()
    first, second = (re.search(r"(\x1b\[[0-9;]+m)" + text, file.getvalue()) for text in ('"""', 'b"""'))
    assert first and second and first[1] == second[1]
