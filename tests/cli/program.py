"""The console with the fake generator, for tests that need a process: `program.py chat|generate [ARGUMENTS]`."""

import sys

from dflash_mlx.cli.app import app, chat_app
from tests.cli.fake import FakeGenerator

if __name__ == "__main__":
    which, *arguments = sys.argv[1:]
    {"chat": chat_app, "generate": app}[which](arguments, obj=FakeGenerator)
