"""Ctrl-C in real programs, from their first instruction on."""

import os
import signal
import subprocess
import sysconfig
import threading
from pathlib import Path

import pytest

import dflash_mlx_console
from tests.loading.checkpoints import write_draft, write_target
from tests.loading.hub_server import Hub

CHAT = str(Path(sysconfig.get_path("scripts")) / "dflash-mlx-chat")


def test_before_the_console_answers_for_itself_it_is_quiet(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(dflash_mlx_console, "_refuse_foreign_package", interrupted)
    with pytest.raises(SystemExit) as leaving:
        dflash_mlx_console.main()
    assert leaving.value.code == 130


@pytest.mark.slow
def test_a_program_that_fetches_leaves_at_once(tmp_path):
    """The hub's own threads would hold it until the file is there, which is never."""
    never = threading.Event()
    with Hub() as hub:
        hub.add("someone/tiny", write_target(tmp_path / "target")).stall["model.safetensors"] = never.wait
        hub.add("someone/tiny-drafter", write_draft(tmp_path / "draft"))
        variables = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "*"}
        program = subprocess.Popen(
            [CHAT, "--target-model", "someone/tiny", "--draft-model", "someone/tiny-drafter"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
        )
        seen = ""
        while "Fetching the target someone/tiny" not in seen:
            line = program.stderr.readline()
            assert line, seen
            seen += line
        while "GET /someone/tiny/resolve" not in " ".join(r for r in hub.requests if "safetensors" in r):
            assert program.poll() is None
        program.send_signal(signal.SIGINT)
        _, rest = program.communicate(timeout=60)
        never.set()
    assert program.returncode == 130 and "Traceback" not in seen + rest


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells when the package is being imported")
@pytest.mark.parametrize("after", [0.01, 0.3, 0.8, 1.5, 2.5])
def test_at_any_moment_of_a_start_it_is_quiet(after):
    """From the first import of the package on; what Python itself does before that is not ours."""
    program = subprocess.Popen(
        [CHAT, "--target-model", "smollm2-135m"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while "openblas" not in Path(f"/proc/{program.pid}/maps").read_text():
        assert program.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(after)
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert program.returncode in (130, -signal.SIGINT) and "Traceback" not in errors
