"""What only a process shows: streams, pipes that close, interrupts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dflash_mlx.cli.view import silence

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, str(Path(__file__).with_name("program.py"))]


def environment(**variables):
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "", **variables}


def run(*arguments, stdin="", **variables):
    return subprocess.run(
        [*PROGRAM, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env=environment(**variables),
        timeout=60,
    )


def start(*arguments, **streams):
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.Popen([*PROGRAM, *arguments], env=environment(), **pipes)


def test_a_closed_pipe_is_quiet():
    program = start("generate", "-p", "slow")
    assert program.stdout.read(1) == b"w"
    program.stdout.close()
    errors = program.stderr.read().decode()
    assert program.wait(30) == 141
    assert errors == "made of the default pair\n"


def test_an_interrupted_answer_keeps_its_text_and_exits_130():
    program = start("generate", "-p", "slow")
    assert program.stdout.read(6) == b"word0 "
    program.send_signal(signal.SIGINT)
    rest, errors = program.communicate(timeout=30)
    assert program.returncode == 130
    assert rest.endswith(b"\n") and errors == b"made of the default pair\n"


def test_a_piped_answer_arrives_piece_by_piece():
    program = start("generate", "-p", "slow")
    program.stdout.read(6)
    assert program.poll() is None
    program.kill()
    program.communicate()


def test_a_full_disk_is_one_sentence():
    with open("/dev/full", "w") as full:
        program = start("generate", "-p", "hi", stdout=full)
        errors = program.stderr.read().decode()
    assert program.wait(30) == 1
    assert errors.splitlines()[1:] == ["error: The answer cannot be written: No space left on device."]
    program.stderr.close()


def test_no_control_bytes_and_no_prompt_reach_a_pipe():
    done = run("chat", "--stats", stdin="think\nescape\n/nothing\nfail\n/exit\n", TERM="xterm-256color")
    assert (
        done.stdout == "yes, it is\na\x1b[31mred\x07\nb\nhalf\n"
    )  # text mode reads \r as \n; the model's own bytes
    assert "\x1b" not in done.stderr and "> " not in done.stderr
    assert done.returncode == 1


def test_text_that_stdout_cannot_encode_is_replaced():
    done = subprocess.run(
        [*PROGRAM, "generate", "-p", "markup"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment(PYTHONIOENCODING="latin-1"),
    )
    assert done.returncode == 0
    assert done.stdout == b"[bold]a[/bold] :smile: [/nothing] \\[x] \xe9 ? ?\n"


def test_waiting_for_a_silent_pipe_is_said():
    program = start("generate", "-p", "hi", stdin=subprocess.PIPE)
    assert program.stderr.readline().startswith(b"Waiting for the pipe")
    answer, _ = program.communicate(b"", timeout=30)
    assert (program.returncode, answer) == (0, b"hi\n")


def test_a_program_without_stdin_is_answered():
    program = start("generate", "-p", "hi", stdin=None, preexec_fn=lambda: os.close(0))
    assert program.communicate(timeout=30)[0] == b"hi\n"


def test_a_pipe_is_a_document_beside_a_prompt():
    assert run("generate", "-p", "echo\n", stdin="and echo").stdout == '"echo\\n\\n\\nand echo"\n'


def test_the_next_question_is_answered_while_the_pipe_stays_open():
    program = start("chat", stdin=subprocess.PIPE)
    for _ in range(2):
        program.stdin.write(b"hi\n")
        program.stdin.flush()
        assert program.stdout.readline() == b"hi\n"
    began = time.monotonic()
    program.communicate(b"/exit\n", timeout=30)
    assert program.returncode == 0 and time.monotonic() - began < 30


def test_what_is_left_for_a_closed_pipe_goes_nowhere():
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        stream.write("left in the buffer")
        silence(stream)
        stream.flush()  # a BrokenPipeError before
