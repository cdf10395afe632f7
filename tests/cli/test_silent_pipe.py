"""A pipe beside a prompt that nobody writes to: many programs leave one open, and nothing may hang on it."""

import io
import os
from collections.abc import Iterator

import pytest
from rich.console import Console

from dflash_mlx import generator
from dflash_mlx.cli import app, prompt
from dflash_mlx.cli.options import Options
from dflash_mlx.cli.view import View
from dflash_mlx.errors import HubError


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Stdin is a pipe; gives the end to write to."""
    read, write = os.pipe()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(os.fdopen(read, "rb")))
    monkeypatch.setattr(prompt, "_PATIENCE", 0.05)
    monkeypatch.setattr(prompt, "_LONG_ENOUGH", 0.05)
    yield write


def test_a_silent_pipe_beside_a_prompt_is_left_alone_and_said(pipe: int) -> None:
    notes: list[str] = []
    assert prompt.read_prompt(Options(prompt="hi"), notes.append) == "hi"
    assert any("going on without it" in note for note in notes)


def test_what_a_pipe_holds_beside_a_prompt_comes_after_it(pipe: int) -> None:
    os.write(pipe, b"document\n")
    os.close(pipe)
    assert prompt.read_prompt(Options(prompt="hi"), lambda _: None) == "hi\n\ndocument"


def test_a_target_that_cannot_be_had_is_said_before_a_missing_prompt(
    pipe: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line that articles print has no prompt; piped somewhere, it should still say what is wrong with the model."""
    os.close(pipe)

    def unreachable(name: str) -> None:
        raise HubError(f"{name} could not be fetched")

    monkeypatch.setattr(generator, "find_target", unreachable)
    view = View(Console(), io.StringIO(), stats=None)
    with pytest.raises(HubError, match="Qwen3-8B could not be fetched"):
        app._generate(view, Options(target_model="Qwen3-8B"), app._load)
    with pytest.raises(prompt.NoPrompt):
        app._generate(view, Options(), app._load)
