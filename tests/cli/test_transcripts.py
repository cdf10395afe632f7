"""Whole dialogues as they stand on the screen in the end, on each kind of terminal and through a pipe."""

import re
import textwrap

import pytest

from dflash_mlx.cli import figures
from tests.cli.fake import FakeGenerator
from tests.cli.terminal import CTRL_C, CTRL_D, ENTER, drawn, terminal
from tests.cli.test_process import run

LOADED = "Loading the default pair of this machine ...\n"
MADE = "made of the default pair\n"
READY = (
    "fake-target with fake-draft · 1.50 GB ready in 0.1 s · temperature 0.6, top_p 0.95 · "
    "/help lists the commands\n"
)


def figures_of(question):
    """The line after an answer; what it says is held down elsewhere."""
    return figures.whole(list(FakeGenerator().stream(question))[-1].stats) + "\n"


def wrapped(text, columns):
    """Lines broken between words."""
    lines = [textwrap.wrap(line, columns, break_on_hyphens=False) or [""] for line in text.split("\n")]
    return "\n".join("\n".join(parts) for parts in lines)


@pytest.mark.parametrize("columns", [300, 40])
def test_a_dialogue_is_drawn(columns):
    with terminal("chat", "--no-history", columns=columns) as screen:
        for line in ("think", "/undo", "markdown", "/xyz", "/exit"):
            screen.line(line)
        assert screen.leave() == 0
    expected = (
        f"{LOADED}{MADE}{READY}"
        f"> think\nhmm [b]so\nyes, it is\n{figures_of('think')}"
        "> /undo\nforgotten: think\n"
        "> markdown\nbold and\n\n1 = one\n"
        f"{figures_of('markdown')}"
        "> /xyz\n/xyz is not a command; /help lists them. A space before it sends it as text.\n"
        "> /exit"
    )  # fmt: skip
    assert drawn(screen.seen, columns) == wrapped(expected, columns)


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_dialogue_is_plain_where_that_is_wanted(variables):
    with terminal("chat", "--no-history", columns=300, **variables) as screen:
        for line in ("think", "markdown", "/exit"):
            screen.line(line)
        assert screen.leave() == 0
    expected = (
        f"{LOADED}Reading the target fake-target (2.00 GB) ...\n{MADE}{READY}"
        f"> think\nhmm [b]so\nyes, it is\n{figures_of('think')}"
        "> markdown\n**bold** and\n\n```python\n1 = one\n```\n"
        f"{figures_of('markdown')}"
        "> /exit"
    )  # fmt: skip
    assert drawn(screen.seen, 300) == expected
    styles = [key for key in ("\x1b[2m", "\x1b[1m", "\x1b[3") if key in screen.seen]
    assert not styles and ("dumb" not in variables.values() or "\x1b" not in screen.seen)


def test_a_piped_dialogue_is_answers_alone():
    done = run("chat", stdin="think\n/undo\nmarkdown\n/xyz\n")
    assert done.stdout == "yes, it is\n**bold** and\n\n```python\n1 = one\n```\n"
    assert done.stderr == (
        f"{MADE}hmm [b]so\nforgotten: think\n"
        "/xyz is not a command; /help lists them. A space before it sends it as text.\n"
    )


def test_figures_stand_below_an_answer_while_it_streams_and_leave_with_it():
    with terminal("chat", "--no-history", columns=60) as screen:
        screen.line("slow")
        screen.wait_for("word8 ")
        whole = screen.seen[: screen.seen.rindex("\r\x1b[2K")]  # the next picture may be there in part
        *answer, line = drawn(whole, 60).splitlines()
        assert re.fullmatch(r"[\d.]+ tokens/s · ~[\d.]+x est. · [\d.]+ tokens/round", line)
        assert "tokens/s" not in "\n".join(answer)
        screen.type(CTRL_C)
        screen.wait_for("stopped")
        screen.wait_for_prompt()
        kept = drawn(screen.seen, 60)
        assert "est." not in kept and "word7 word8" in " ".join(kept.split())


def test_hidden_thoughts_are_folded_into_a_line():
    with terminal("chat", "--no-history", "--no-stats", columns=80) as screen:
        for line in ("/think hide", "think", "/think on", "think", "/exit"):
            screen.line(line)
        assert screen.leave() == 0
    assert drawn(screen.seen, 80).endswith(
        "> /think hide\nthoughts: hidden\n"
        "> think\nthought for 4 tokens, hidden\nyes, it is\n"
        "> /think on\nthoughts: on\n"
        "> think\nhmm [b]so\nyes, it is\n"
        "> /exit"
    )


def test_an_answer_is_copied_through_the_terminal():
    """Where no clipboard program is at hand, as over SSH: OSC 52."""
    with terminal("chat", "--no-history", SSH_CONNECTION="a b") as screen:
        screen.line("think")
        screen.line("/copy")
        screen.wait_for("copied")
    assert "\x1b]52;c;eWVzLCBpdCBpcw==\x07" in screen.seen


def test_a_retry_draws_a_new_seed():
    with terminal("chat", "--no-history", "--seed", "7", columns=300) as screen:
        for line in ("hi", "/retry", "/exit"):
            screen.line(line)
        assert screen.leave() == 0
    seeds = [
        line.rpartition("seed ")[2] for line in drawn(screen.seen, 300).splitlines() if "· seed " in line
    ]
    assert seeds[0] == "7" and len(set(seeds)) == 2


def test_an_answer_cut_at_the_limit_says_what_allows_more():
    with terminal("chat", "--no-history", "--no-stats") as screen:
        screen.line("long")
        screen.wait_for("stopped at the limit of 2 tokens")
        screen.wait_for("/set max_new_tokens NUMBER allows more")


def test_ctrl_d_leaves_and_so_does_ctrl_c_twice():
    for keys, said in (([CTRL_D], None), ([CTRL_C, CTRL_C], "Ctrl-C once more leaves.")):
        with terminal("chat", "--no-history") as screen:
            for key in keys:
                screen.wait_for_prompt()
                screen.type(key)
            assert screen.leave() == 0
            assert said is None or said in screen.seen


def test_a_line_that_only_looks_like_a_command_is_explained():
    with terminal("chat", "--no-history") as screen:
        screen.line("/retyr")
        screen.wait_for("/retyr is not a command; /retry is one.")
        screen.wait_for_prompt()
        screen.type(b" /retyr echo" + ENTER)
        screen.wait_for('"content": " /retyr echo"')
