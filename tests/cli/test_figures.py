"""The figures of an answer in words, and the line of them that stands below an answer while it streams."""

import io

import pytest
from rich.console import Console

from dflash_mlx.cli import figures, view
from dflash_mlx.cli.markdown import MarkdownStream
from dflash_mlx.cli.view import View
from dflash_mlx.core import Seconds, Stats
from tests.cli.test_markdown import shown


def stats(**changes):
    made = Stats(target="t", draft="d", block_size=16, prompt_tokens=300, context_limit=8192, new_tokens=41)
    made.rounds, made.verified, made.accepted = 16, 80, 24
    made.verify_lengths, made.accept_lengths = [5] * 15 + [4], [1] * 16
    made.seconds, made.plain_tokens_per_second_estimate = Seconds(prefill=0.2, decode=1.0), 25.0
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_the_live_line_tells_speed_gain_context_and_block():
    assert figures.live(stats(), 200) == (
        "40.0 tokens/s · ~1.6x est. · 2.5 tokens/round · context 341 of 8,192 · block 16, 4 verified"
    )


def test_the_live_line_is_cut_between_figures():
    whole = figures.live(stats(), 200)
    for width in range(len(whole) + 1):
        line = figures.live(stats(), width)
        assert len(line) <= width and (whole == line or whole.startswith(f"{line} · ") or line == "")
    assert figures.live(stats(), 39) == "40.0 tokens/s · ~1.6x est."


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"new_tokens": 2}, "tokens/s"),
        ({"plain_tokens_per_second_estimate": None}, "est."),
        ({"draft": None, "block_size": None}, "block"),
        ({"draft": None, "block_size": None}, "est."),
        ({"context_limit": None}, "context"),
    ],
)
def test_what_is_not_known_is_not_said(changes, missing):
    assert missing in figures.live(stats(), 200)
    assert missing not in figures.live(stats(**changes), 200)


def test_a_round_that_verified_nothing_is_said():
    assert figures.live(stats(verify_lengths=[5, 0]), 200).endswith("block 16, none verified")


def test_the_line_after_an_answer_has_the_same_figures():
    line = figures.whole(stats(reused_tokens=100))
    for part in (
        "41 tokens · 40.0 tokens/s · ~1.6x est. · 2.50 tokens/round", "30% of 80 proposals accepted",
        "block 16, 4.9 verified", "prefill 0.20 s for 200 tokens, 100 re-used", "context 341 of 8,192",
    ):  # fmt: skip
        assert part in line


def test_plain_rounds_and_the_estimated_plain_speed_are_told():
    few = figures.whole(stats(rounds=16, plain_rounds=3))
    assert "3 of 16 rounds plain" in few and "plain ~25.0 tokens/s est." in few
    assert "decoded plainly: 12 of 16 rounds" in figures.whole(stats(rounds=16, plain_rounds=12))
    none = figures.whole(stats(plain_rounds=0, plain_tokens_per_second_estimate=None))
    assert "plain" not in none
    assert "plain" not in figures.whole(stats(plain_rounds=16, draft=None, block_size=None))


def test_one_token_is_one_token():
    assert "for 1 token, 299 re-used" in figures.whole(stats(reused_tokens=299))


class Terminal(io.StringIO):
    """Remembers each write; a terminal draws between writes."""

    def __init__(self):
        super().__init__()
        self.writes = []

    def write(self, text):
        self.writes.append(text)
        return super().write(text)

    def isatty(self):
        return True


def drawing(width=60):
    file = Terminal()
    return file, MarkdownStream(Console(file=file, force_terminal=True, width=width, highlight=False))


def test_the_status_stands_below_the_answer_and_leaves_with_it():
    file, stream = drawing()
    stream.feed("one", status="fast")
    assert shown(file.getvalue()) == "one\nfast"
    stream.feed(" two\n\nthree", status="faster")
    assert shown(file.getvalue()) == "one two\n\nthree\nfaster"
    stream.finish()
    assert shown(file.getvalue()) == "one two\n\nthree"
    stream.feed("next")
    assert shown(file.getvalue()).endswith("three\nnext"), "the next answer has none yet"


def test_each_piece_is_one_write():
    """Between two writes a terminal may show what was erased and not yet drawn again."""
    file, stream = drawing()
    for piece in ("# a\n", "b *c*\n\n", "```python\n1 = one\n2 = two\n", "```\nd"):
        before = len(file.writes)
        stream.feed(piece, status=piece[:1])
        assert len(file.writes) == before + 1


def test_thoughts_are_drawn_dim_above_the_answer():
    file, stream = drawing()
    for piece in ("hm", "m\nso [b]", " *it* is"):
        stream.think(piece, status="s")
    stream.feed("**yes**", status="s")
    stream.finish()
    assert shown(file.getvalue()) == "hmm\nso [b] *it* is\nyes"
    assert "\x1b[2mso [b] *it* is" in file.getvalue()


@pytest.fixture
def screen(monkeypatch):
    """A view on a terminal of 80 columns, and what it shows."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(view, "Console", lambda **o: Console(**o, width=80))
    file = Terminal()
    made = View(Console(file=file, force_terminal=True, width=80), file)
    made.read_markdown()
    return made, lambda: shown(file.getvalue())


def test_waiting_is_shown_until_the_first_piece(screen):
    made, seen = screen
    made.wait("reading ...")
    assert seen() == "reading ..."
    made.piece("hi", "answer", stats())
    assert seen() == "hi\n40.0 tokens/s · ~1.6x est. · 2.5 tokens/round · context 341 of 8,192"
    made.piece("", "answer", stats(new_tokens=31))
    assert seen().splitlines()[1].startswith("30.0 tokens/s")
    made.end_answer()
    assert seen() == "hi"


def test_hidden_thoughts_leave_a_line(screen):
    made, seen = screen
    made.hides_thoughts = True
    for tokens in (9, 12):
        made.piece("hmm", "thought", stats(new_tokens=tokens))
    assert seen().startswith("thinking · 11.0 tokens/s")
    made.piece("yes", "answer", stats())
    made.end_answer()
    assert seen() == "thought for 12 tokens, hidden\nyes"


def test_no_figures_are_drawn_where_they_are_not_wanted(screen):
    made, seen = screen
    made.shows_stats = False
    made.piece("hi", "answer", stats())
    assert seen() == "hi"
