"""Compiling: once per content, safely beside other processes, and never silently not at all."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.metal_emulator import factory, support, toolchain
from tests.metal_emulator.cache import cache_folder

UNIT = 'extern "C" __attribute__((visibility("default"))) int answer() { return %d; }\n'
PROGRAM = """
import mlx.core as mx
from tests.metal_emulator import factory
for mode in ("fast", "check"):
    kernel = factory(mode=mode)(name="parallel", input_names=["x"], output_names=["o"],
        source="o[thread_position_in_grid.x] = 2 * x[thread_position_in_grid.x];")
    (out,) = kernel(inputs=[mx.arange(8)], grid=(8, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(8,)],
        output_dtypes=[mx.int32])
    print(out.tolist())
"""


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    support.require()
    monkeypatch.setenv("DFLASH_EMULATOR_CACHE", str(tmp_path / "cache"))
    return cache_folder()


def test_a_unit_is_compiled_once_per_content(fresh_cache: Path) -> None:
    first = toolchain.shared_object(UNIT % 1, "fast", "unit")
    stamp = first.stat().st_mtime_ns
    assert toolchain.shared_object(UNIT % 1, "fast", "unit") == first
    assert first.stat().st_mtime_ns == stamp
    others = {
        toolchain.shared_object(UNIT % 2, "fast", "unit"),
        toolchain.shared_object(UNIT % 1, "check", "unit"),
    }
    assert first not in others
    assert len(others) == 2


def test_builders_of_the_same_unit_do_not_disturb_each_other(fresh_cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: toolchain.shared_object(UNIT % 3, "fast", "unit"), range(4)))
    assert [path.name for path in fresh_cache.glob("*.so")] == [path.name for path in paths]
    assert not list(fresh_cache.glob("tmp*"))


@pytest.mark.slow
def test_processes_that_start_with_an_empty_cache_share_it(fresh_cache: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        )
        for _ in range(2)
    ]
    doubled = f"{[2 * i for i in range(8)]}\n"
    assert [p.communicate()[0].decode() for p in processes] == [doubled * 2] * 2
    assert not list(fresh_cache.glob("tmp*"))


def test_a_missing_compiler_fails_the_test_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    support.require()
    monkeypatch.setattr(support.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(pytest.fail.Exception, match="`ziglang` wheel; run `uv sync`"):
        factory(seed=4711)


def test_on_a_mac_the_test_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.sys, "platform", "darwin")
    with pytest.raises(pytest.skip.Exception, match="`-m metal`"):
        factory(seed=4712)


def test_another_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.platform, "machine", lambda: "aarch64")
    with pytest.raises(pytest.fail.Exception, match="needs Linux on x86-64; this is linux on aarch64"):
        factory(seed=4713)
