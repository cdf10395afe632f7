"""The machine: which BLAS MLX really gets, what is said when it is a slow one, memory, folders."""

import contextlib
import importlib
import json
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import dflash_mlx
from dflash_mlx import blas, runtime

PACKAGE = Path(dflash_mlx.__file__).parent
linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="a Mac has Accelerate and needs no other BLAS"
)

# blas.py alone, in a fresh process: what is in front is decided once a process.
ALONE = f"""
import json, os, sys
sys.path.append({str(PACKAGE)!r})
import blas
from pathlib import Path
cache = Path(os.environ["CACHE"])
before = dict(os.environ)
def tell(found):
    assert dict(os.environ) == before, "the environment was changed"
    print(json.dumps([found.name, found.note, blas.is_in_front()]))
"""
ABSENT = "blas.SYSTEM_LIBRARY = 'libnowhere-to-be-found.so.0'\n"


def run(code: str, cache: Path, **environ: str) -> tuple[str, str | None, bool]:
    """Name, note and whether OpenBLAS is in front after `code` in a new Python."""
    clean = {name: value for name, value in os.environ.items() if name != "DFLASH_BLAS"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE + code],
        env={**clean, "CACHE": str(cache), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""
    return tuple(json.loads(done.stdout))


@linux_only
def test_mlx_takes_its_products_from_openblas(tmp_path):
    """The linker itself says where libmlx's cblas_sgemm is bound."""
    code = """
import dflash_mlx
from dflash_mlx import runtime
import mlx.core as mx
mx.eval(mx.ones((32, 32)) @ mx.ones((32, 32)))
print(runtime.blas().name)
"""
    environ = {name: value for name, value in os.environ.items() if name != "DFLASH_BLAS"}
    environ |= {"LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(tmp_path / "bindings")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert re.match(r"OpenBLAS \d+\.\d+\S* \((system|scipy-openblas32)\)\n", done.stdout)
    pattern = re.compile(r"binding file \S*/(?P<user>[^/ ]+) \[0\] to (?P<giver>\S+) \[0\]: .*`(\w+)'")
    bound = {}
    for line in (path for log in tmp_path.glob("bindings*") for path in log.open(errors="replace")):
        if "blas_sgemm'" in line and (match := pattern.search(line)):
            bound[match["user"]] = Path(match["giver"]).name
    assert "openblas" in bound["libmlx.so"], bound


@linux_only
@pytest.mark.parametrize("dtype", [mx.float32, mx.float64, mx.complex64])
def test_products_through_the_forwarder_are_right(dtype):
    """Shapes that differ in every dimension, so that no argument can have changed its place."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape) + 1j * rng.normal(size=shape) for shape in ((5, 7), (7, 3)))
    if dtype != mx.complex64:
        a, b = a.real, b.real
    with mx.stream(mx.cpu):
        left, right, right_t = (mx.array(x, dtype=dtype) for x in (a, b, np.ascontiguousarray(b.T)))
        product, transposed = left @ right, left @ right_t.T
        mx.eval(product, transposed)
    assert np.allclose(np.array(product), a @ b, atol=1e-5)
    assert np.allclose(np.array(transposed), a @ b, atol=1e-5)


@linux_only
def test_forwarder_is_compiled_once_and_named_by_the_version_of_the_wheel(tmp_path):
    wheel = pytest.importorskip("scipy_openblas32")
    code = ABSENT + "tell(blas.put_in_front(lambda: cache))"
    first = run(code, tmp_path / "new" / "folder")
    (made,) = (tmp_path / "new" / "folder").iterdir()
    stamp = made.stat().st_mtime_ns
    assert first == run(code, tmp_path / "new" / "folder")
    assert first == (f"OpenBLAS {wheel.__version__} (scipy-openblas32)", None, True)
    assert made.stat().st_mtime_ns == stamp
    assert wheel.__version__ in made.name


@linux_only
def test_damaged_forwarder_is_compiled_again(tmp_path):
    code = ABSENT + "tell(blas.put_in_front(lambda: cache))"
    run(code, tmp_path)
    (made,) = tmp_path.iterdir()
    made.write_bytes(made.read_bytes()[:100])
    name, note, in_front = run(code, tmp_path)
    assert in_front and note is None
    assert list(tmp_path.iterdir()) == [made]


@linux_only
def test_system_library_comes_before_the_wheel(tmp_path):
    (library,) = (Path(mx.__file__).parents[1] / "mlx_cpu.libs").glob("libblas-*.so*")
    name, note, in_front = run(
        f"blas.SYSTEM_LIBRARY = {str(library)!r}; tell(blas.put_in_front(lambda: cache))", tmp_path / "cache"
    )
    assert (name, note, in_front) == ("another BLAS (system)", None, True)
    assert not (tmp_path / "cache").exists()


@linux_only
def test_without_any_openblas_a_note_says_why_what_it_costs_and_what_to_do(tmp_path):
    name, note, in_front = run(ABSENT + "tell(blas.put_in_front(lambda: cache))", tmp_path, PATH="/nowhere")
    assert (name, in_front) == ("reference BLAS", False)
    for part in (
        "libnowhere-to-be-found",
        "no C compiler (cc, gcc, clang)",
        "slower",
        "apt install libopenblas0",
    ):
        assert part in note
    assert "\n" not in note


@linux_only
def test_a_user_without_a_home_gets_the_note_and_no_traceback(tmp_path):
    code = (
        ABSENT + "def homeless(): raise RuntimeError('no home directory')\ntell(blas.put_in_front(homeless))"
    )
    name, note, in_front = run(code, tmp_path)
    assert (name, in_front) == ("reference BLAS", False)
    assert "scipy-openblas32: no home directory" in note


@linux_only
def test_off_leaves_the_blas_of_mlx_alone(tmp_path):
    code = "tell(blas.put_in_front(lambda: cache))"
    assert run(code, tmp_path, DFLASH_BLAS="off") == ("reference BLAS", None, False)
    assert not list(tmp_path.iterdir())


@linux_only
def test_unknown_setting_is_not_ignored_silently(tmp_path):
    name, note, in_front = run("tell(blas.put_in_front(lambda: cache))", tmp_path, DFLASH_BLAS="of")
    assert in_front
    assert "'of'" in note and "'auto' or 'off'" in note


@linux_only
def test_mlx_imported_first_is_told_since_nothing_can_be_done(tmp_path):
    name, note, in_front = run("import mlx.core\ntell(blas.put_in_front(lambda: cache))", tmp_path)
    assert (name, in_front) == ("reference BLAS", False)
    assert "import dflash_mlx first" in note


@linux_only
def test_a_blas_that_is_in_front_already_stays_there(tmp_path):
    code = "blas.put_in_front(lambda: cache); tell(blas.put_in_front(lambda: cache))"
    name, note, in_front = run(code, tmp_path)
    assert re.fullmatch(r"OpenBLAS \S+ \(already loaded\)", name)
    assert note is None and in_front


def test_a_mac_is_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.put_in_front(lambda: pytest.fail("asked for a folder")) == blas.Blas("Accelerate")


def test_machine_names_what_it_runs_on():
    here = runtime.machine()
    assert here.device == ("gpu" if mx.default_device().type == mx.gpu else "cpu")
    assert here.blas == runtime.blas().name
    assert here.chip and here.os
    assert 0.5 < here.memory_gb < 10_000


def test_weights_are_float32_on_a_cpu_and_as_stored_on_a_gpu(monkeypatch):
    for device, expected in ((mx.Device(mx.cpu), mx.float32), (mx.Device(mx.gpu), None)):
        monkeypatch.setattr(mx, "default_device", lambda device=device: device)
        assert runtime.machine().default_dtype == expected


def test_peak_memory_counts_from_the_last_reset_and_includes_what_is_held():
    held, dropped = (mx.zeros((size,), dtype=mx.float32) for size in (2_000_000, 5_000_000))
    mx.eval(held, dropped)
    assert runtime.peak_memory_gb() >= 0.028
    del dropped
    runtime.reset_peak_memory()
    start = runtime.peak_memory_gb()
    assert start >= 0.008
    mx.eval(mx.zeros((1_000_000,), dtype=mx.float32))
    assert start + 0.003 < runtime.peak_memory_gb() < start + 0.02


@linux_only  # elsewhere the peak cannot be reset, and another test may have set it higher
def test_process_peak_sees_what_mlx_does_not_hold():
    runtime.reset_peak_memory()
    mlx_before, before = runtime.peak_memory_gb(), runtime.process_peak_memory_gb()
    pages = mmap.mmap(-1, 200_000_000)  # an allocator could hand out memory that is resident already
    np.frombuffer(pages, dtype=np.uint8)[:] = 1
    assert runtime.process_peak_memory_gb() - before > 0.15
    assert runtime.peak_memory_gb() == mlx_before


@pytest.fixture
def mac(monkeypatch):
    """A Mac as far as the wired limit goes: what mlx-lm was told, in order."""
    told = []

    @contextlib.contextmanager
    def wired_limit(model):
        told.append(f"set for {model}")
        print("a warning about a big model")
        try:
            yield
        finally:
            told.append("put back")

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(importlib.import_module("mlx_lm.generate"), "wired_limit", wired_limit)
    return told


def test_overlapping_wired_limits_set_once_and_put_back_once(mac, capsys):
    """Two interleaved generators: the first to end left the other's model unwired, the last a limit set."""
    first, second = runtime.wired_limit("A"), runtime.wired_limit("B")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert mac == ["set for A"]
    second.__exit__(None, None, None)
    assert mac == ["set for A", "put back"]
    assert capsys.readouterr().out == ""


def test_wired_limit_is_put_back_after_an_error_and_works_again(mac):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), runtime.wired_limit("A"):
            raise ZeroDivisionError
    assert mac == ["set for A", "put back"] * 2


def test_wired_limit_does_nothing_without_metal(mac, monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    with runtime.wired_limit("A"):
        pass
    assert mac == []


@pytest.mark.parametrize(
    ("platform", "environ", "expected"),
    [
        ("linux", {"DFLASH_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/dflash-mlx"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/dflash-mlx"),
        ("linux", {}, "/home/me/.cache/dflash-mlx"),
        ("darwin", {}, "/home/me/Library/Caches/dflash-mlx"),
        ("darwin", {"DFLASH_CACHE": "~/here"}, "/home/me/here"),
    ],
)
def test_cache_folder_is_the_users_choice_then_the_platforms(monkeypatch, platform, environ, expected):
    for name in ("DFLASH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **environ}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert runtime.cache_dir() == Path(expected)


def test_kernels_are_taken_from_the_package_first(monkeypatch, tmp_path):
    package = tmp_path / "src" / "dflash_mlx"
    packaged, checkout = package / "kernels_metal", tmp_path / "kernels_metal"
    monkeypatch.setattr(runtime, "__file__", str(package / "runtime.py"))
    with pytest.raises(FileNotFoundError, match="kernels_metal.*install"):
        runtime.kernels_folder()
    checkout.mkdir()
    assert runtime.kernels_folder() == checkout
    packaged.mkdir(parents=True)
    assert runtime.kernels_folder() == packaged
