"""OpenBLAS in front of the reference BLAS that MLX links on Linux.

In: the platform, `DFLASH_BLAS`, a folder for the compiled forwarder. Out: a record of the BLAS that MLX's
products will run on. Knows nothing of MLX but the names that libmlx imports, and never loads it: the linker
looks for `cblas_sgemm` in the process's global scope before libmlx's own libraries; what is there first wins.
"""

import ctypes
import importlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

SYSTEM_LIBRARY = "libopenblas.so.0"
COMPILERS = ("cc", "gcc", "clang")
WHEEL = "scipy-openblas32"
REFERENCE = "reference BLAS"

_FORWARDER = Path(__file__).with_name("openblas_forwarder.c")
_COST = "float32 products run 10 to 30 times slower than with OpenBLAS, so that drafting cannot pay"


@dataclass(frozen=True, slots=True)
class Blas:
    """What MLX's float32 products run on; `note` is one sentence for the user when it is a slow one."""

    name: str  # "OpenBLAS 0.3.34 (scipy-openblas32)"
    note: str | None = None


def put_in_front(cache_dir: Callable[[], Path], environ: Mapping[str, str] = os.environ) -> Blas:
    """Load OpenBLAS into the process's global scope; must run before `mlx.core` is imported.

    Args:
        cache_dir: gives the folder for the compiled forwarder; asked, and the folder made, only if needed.
        environ: `DFLASH_BLAS=off` leaves MLX's own BLAS in place.

    Returns:
        What is in place now. Nothing is raised: without OpenBLAS all goes on, slower, and the note says so.
    """
    if sys.platform != "linux":
        return Blas("Accelerate" if sys.platform == "darwin" else REFERENCE)
    setting = environ.get("DFLASH_BLAS", "auto")
    if setting == "off":
        return Blas(REFERENCE)
    if is_in_front():
        return Blas(_name("already loaded"))
    if "mlx.core" in sys.modules:
        return Blas(REFERENCE, f"mlx was imported before dflash_mlx: {_COST}; import dflash_mlx first.")
    found = _first_that_loads(cache_dir)
    if setting != "auto" and found.note is None:
        return Blas(found.name, f"DFLASH_BLAS is {setting!r} and was ignored: expected 'auto' or 'off'.")
    return found


def is_in_front() -> bool:
    """Whether a library that is loaded from now on gets its `cblas_sgemm` from the process's global scope."""
    return hasattr(ctypes.CDLL(None), "cblas_sgemm")


def _first_that_loads(cache_dir: Callable[[], Path]) -> Blas:
    sources: tuple[tuple[str, Callable[[], None]], ...] = (
        ("system", _load_system),
        (WHEEL, lambda: _load_wheel(cache_dir())),
    )
    reasons = []
    for source, load in sources:
        try:
            load()
        except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
            reasons.append(f"{source}: {_last_line(error)}")
            continue
        if is_in_front():
            return Blas(_name(source))
        reasons.append(f"{source}: it has no cblas_sgemm")
    return Blas(
        REFERENCE,
        f"no OpenBLAS could be loaded ({'; '.join(reasons)}): {_COST}; install the system's OpenBLAS "
        "(on Debian and Ubuntu: apt install libopenblas0).",
    )


def _load_system() -> None:
    ctypes.CDLL(SYSTEM_LIBRARY, mode=ctypes.RTLD_GLOBAL)


def _load_wheel(cache: Path) -> None:
    """Load the wheel's library, then the forwarder that gives its functions their plain names."""
    wheel = importlib.import_module("scipy_openblas32")
    library = Path(wheel.get_lib_dir(), wheel.get_library(fullname=True))
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    source = _FORWARDER.read_bytes()
    key = f"{wheel.__version__}-{platform.machine()}-{zlib.crc32(source):08x}"
    forwarder = cache / f"openblas-forwarder-{key}.so"
    try:
        ctypes.CDLL(str(forwarder), mode=ctypes.RTLD_GLOBAL)
    except OSError:  # not compiled yet, or damaged
        _compile(forwarder)
        ctypes.CDLL(str(forwarder), mode=ctypes.RTLD_GLOBAL)


def _compile(forwarder: Path) -> None:
    """Write the forwarder in one step, so that a process that starts meanwhile never sees half of it."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError(f"no C compiler ({', '.join(COMPILERS)}) for its forwarder")
    forwarder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=forwarder.parent, prefix=".openblas-") as folder:
        built = Path(folder, forwarder.name)
        command = [compiler, "-O2", "-shared", "-fPIC", "-nostdlib", "-o", str(built), str(_FORWARDER)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        built.replace(forwarder)


def _name(source: str) -> str:
    """The library in front by its own word: "OpenBLAS 0.3.34 DYNAMIC_ARCH ..."; others say nothing."""
    try:
        get_config = ctypes.CDLL(None).openblas_get_config
    except AttributeError:
        return f"another BLAS ({source})"
    get_config.restype = ctypes.c_char_p
    return f"{' '.join(get_config().decode().split()[:2])} ({source})"


def _last_line(error: Exception) -> str:
    told = error.stderr if isinstance(error, subprocess.CalledProcessError) and error.stderr else str(error)
    return str(told).strip().splitlines()[-1]
