"""A console with the fake generator: `console("-p", "hi")` is `dflash-mlx -p hi` with nothing on stdin."""

import pytest
from typer.testing import CliRunner

from dflash_mlx.cli.app import app, chat_app
from tests.cli.fake import FakeGenerator


class Console:
    """Runs commands in this process; `made` are the generators they made, in order."""

    def __init__(self):
        self.made = []

    def __call__(self, *arguments, stdin=b"", command=app):
        return CliRunner().invoke(command, list(arguments), input=stdin, obj=self._make)

    def chat(self, *arguments, stdin=b""):
        return self(*arguments, stdin=stdin, command=chat_app)

    @property
    def generator(self):
        [made] = self.made
        return made

    def _make(self, **arguments):
        self.made.append(FakeGenerator(**arguments))
        return self.made[-1]


@pytest.fixture
def console():
    return Console()
