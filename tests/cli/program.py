"""The console with the fake generator, for tests that need a process: `program.py chat|generate [ARGUMENTS]`.

`program.py zygote` stays, and forks one such program for every request, so that a test need not wait for imports.
A request is a line of JSON: `{"arguments", "variables", "terminal", "stdout"}` is answered with the process id,
`{"wait": pid}` with the exit code once there is one, null while there is none.
"""

import atexit
import fcntl
import json
import os
import signal
import sys
import termios
import traceback

import prompt_toolkit.shortcuts  # noqa: F401  (imported late by the console; here before anything is forked)

from dflash_mlx.cli import chat, commands, lines  # noqa: F401
from dflash_mlx.cli.app import app, chat_app
from tests.cli.fake import FakeGenerator


def program(arguments: list[str]) -> None:
    which, *rest = arguments
    {"chat": chat_app, "generate": app}[which](rest, obj=FakeGenerator)


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork() or _become(request)
        print(json.dumps(answer), flush=True)


def _become(request: dict) -> None:
    """In a forked process: take the terminal and the variables, run, and end as an interpreter would."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        slave = os.open(request["terminal"], os.O_RDWR)
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        out = os.open(request["stdout"], os.O_WRONLY | os.O_CREAT) if request["stdout"] else slave
        for number, stream in enumerate((slave, out, slave)):
            os.dup2(stream, number)
        os.environ.clear()
        os.environ.update(request["variables"])
        sys.stdin = open(0, closefd=False)
        sys.stdout = open(1, "w", buffering=1, closefd=False, encoding="utf-8")
        sys.stderr = open(2, "w", buffering=1, closefd=False, encoding="utf-8")
        program(request["arguments"])
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1:] == ["zygote"]:
        serve()
    else:
        program(sys.argv[1:])
