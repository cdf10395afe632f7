"""The machine: what it is, its memory, and the folders that belong to this package on it.

In: the operating system, MLX's device, the environment. Out: plain facts. Knows no model and no
checkpoint. MLX is imported inside the functions: `prepare` must run before MLX is loaded.
"""

import functools
import os
import platform
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dflash_mlx.blas import Blas, put_in_front

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn

GB = 1e9  # bytes, as in mlx-lm's peak memory and in the sizes of files


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process computes on."""

    device: Literal["gpu", "cpu"]  # MLX's default device
    chip: str
    memory_gb: float  # physical memory in 1e9 bytes; a Mac shares it between CPU and GPU
    os: str
    blas: str  # what float32 products run on where `device` is "cpu"
    default_dtype: "mx.Dtype | None"  # what weights are cast to at load; None: as they are stored
    working_set_gb: float | None = None  # what Metal recommends a process to hold; None without a GPU
    swap_gb: float = 0.0  # of fixed size; a Mac makes room on its disk as it needs it


@functools.cache
def prepare() -> Blas:
    """Put OpenBLAS in front of MLX's own BLAS on Linux, once a process, before `mlx.core` is imported."""
    return put_in_front(cache_dir)


def blas() -> Blas:
    """What `prepare` found; its note, if any, is one sentence that the user should see once."""
    return prepare()


def machine() -> Machine:
    """Facts about this machine and MLX's current default device."""
    import mlx.core as mx

    on_gpu = mx.default_device().type == mx.gpu
    return Machine(
        device="gpu" if on_gpu else "cpu",
        chip=_chip(),
        memory_gb=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GB,
        os=_operating_system(),
        blas=blas().name,
        # On a CPU, float32 products alone go through BLAS; 16-bit and quantised ones are ten times slower.
        default_dtype=None if on_gpu else mx.float32,
        working_set_gb=_working_set_gb() if on_gpu else None,
        swap_gb=_swap_gb(),
    )


def _working_set_gb() -> float | None:
    import mlx.core as mx

    found = mx.device_info().get("max_recommended_working_set_size")
    return None if found is None else int(found) / GB


def _swap_gb() -> float:
    if sys.platform == "linux":
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("SwapTotal:"):
                return int(line.split()[1]) * 1024 / GB
    return 0.0


def _chip() -> str:
    import mlx.core as mx

    return str(mx.device_info().get("device_name") or platform.machine())


def _operating_system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    return f"{platform.system()} {platform.release()}"


def peak_memory_gb() -> float:
    """Most memory that MLX's arrays held at once since `reset_peak_memory`, in 1e9 bytes."""
    import mlx.core as mx

    # MLX starts again from 0, and counts what was held at the reset only when it next allocates.
    return max(mx.get_peak_memory(), mx.get_active_memory()) / GB


def process_peak_memory_gb() -> float:
    """Most resident memory of the whole process, in 1e9 bytes: files read by other means than MLX included.

    On Linux since `reset_peak_memory`, elsewhere since the process began.
    """
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / GB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GB


def reset_peak_memory() -> None:
    """Let both peaks start again from what is held now."""
    import mlx.core as mx

    mx.reset_peak_memory()
    if sys.platform == "linux":
        try:
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size
        except OSError:
            pass  # not every container lets us; the peak then counts from the start and is never too low


_wired_lock = threading.Lock()
_wired_users = 0
_wired_limit = ExitStack()


@contextmanager
def wired_limit(model: "nn.Module") -> Iterator[None]:
    """Keep `model` resident in a Mac's GPU memory for as long as the block runs; does nothing elsewhere.

    May span a yield and may overlap with others: MLX has one limit for the process, so the first block sets
    it and the last one to end puts the former one back. What mlx-lm prints about big models goes to stderr.
    """
    global _wired_users
    import mlx.core as mx

    if not mx.metal.is_available():
        yield
        return
    with _wired_lock:
        if _wired_users == 0:
            from mlx_lm.generate import wired_limit as mlx_lm_wired_limit

            with redirect_stdout(sys.stderr):
                _wired_limit.enter_context(mlx_lm_wired_limit(model))
        _wired_users += 1
    try:
        yield
    finally:
        with _wired_lock:
            _wired_users -= 1
            if _wired_users == 0:
                _wired_limit.close()


def cache_dir() -> Path:
    """The folder for what can be made again: `DFLASH_CACHE`, else dflash-mlx in the user's cache folder.

    It may not exist yet.

    Raises:
        RuntimeError: none of these is set and the user has no home.
    """
    if own := os.environ.get("DFLASH_CACHE"):
        return Path(own).expanduser().absolute()
    if (shared := Path(os.environ.get("XDG_CACHE_HOME", ""))).is_absolute():
        return shared / "dflash-mlx"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "dflash-mlx"


def kernels_folder() -> Path:
    """Where the Metal kernel bodies lie: inside an installed package, at the top of a checkout.

    Raises:
        FileNotFoundError: the package is incomplete.
    """
    package = Path(__file__).parent
    for folder in (package / "kernels_metal", package.parents[1] / "kernels_metal"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"No folder kernels_metal in {package}: the installation is incomplete, install it again."
    )
