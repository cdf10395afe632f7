"""Whether the emulator can run on this machine, and what tests do where it cannot."""

import importlib.util
import platform
import sys
from pathlib import Path

import pytest


def require() -> None:
    """Skips the calling test on a Mac, where the metal cases take its place; elsewhere a gap is a failure."""
    if sys.platform == "darwin":
        pytest.skip("the emulator runs on Linux; on a Mac the same cases run with `-m metal`")
    reason = missing()
    if reason:
        pytest.fail(reason, pytrace=False)


def missing() -> str | None:
    """Why kernels cannot be compiled and run here, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the Metal emulator needs Linux on x86-64; this is {sys.platform} on {platform.machine()}"
    features = {"avx2", "f16c", "fma"} - set(Path("/proc/cpuinfo").read_text().split())
    if features:
        return f"the Metal emulator needs a CPU with {', '.join(sorted(features))}"
    if importlib.util.find_spec("ziglang") is None:
        return "kernels cannot be checked without the compiler in the `ziglang` wheel; run `uv sync`"
    return None
