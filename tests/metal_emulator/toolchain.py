"""The compiler and its flags.

In: translation units. Out: shared objects, each compiled once per content and kept in the cache folder. The compiler
is the clang inside the `ziglang` wheel, a dev dependency: the same diagnostics everywhere and nothing to install;
measured against Debian's clang-19 it was as fast. Knows nothing of kernels' arguments.
"""

import functools
import hashlib
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from tests.metal_emulator.cache import cache_folder
from tests.metal_emulator.headers import SHIM, include_folders
from tests.metal_emulator.report import KernelFault
from tests.metal_emulator.support import missing
from tests.metal_emulator.translate import PRELUDE

Build = Literal["lint", "check", "fast"]

_RUNTIME = Path(__file__).parent / "runtime"
_OBJECT = [
    *("-target", "x86_64-linux-gnu", "-fPIC", "-fvisibility=hidden"),
    *("-fno-exceptions", "-fno-rtti", "-nostdinc++"),
]
_LANGUAGE = [
    *("-march=x86-64-v3", "-x", "c++", "-ffp-contract=on", "-gline-tables-only"),
    # Metal: unsuffixed literals are float; half and bfloat arithmetic rounds after every operation
    *("-Xclang", "-cl-single-precision-constant"),
    *("-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"),
    # a private array that is too large meets the guard page; a return address names the line that met a barrier
    *("-fstack-clash-protection", "-fno-optimize-sibling-calls"),
    *(
        "-Wno-everything",
        "-Werror=uninitialized",
        "-Werror=conditional-uninitialized",
        "-Werror=array-bounds",
    ),
]
_BUILDS: dict[Build, list[str]] = {
    "lint": ["-std=c++14", "-DMSL_LINT"],  # C++14 is what Metal is; the shim itself is C++17
    "fast": ["-std=c++17", "-O2", "-ftrivial-auto-var-init=pattern"],
    "check": [
        *("-std=c++17", "-O1", "-DMSL_CHECK", "-ftrivial-auto-var-init=pattern"),
        *("-fno-vectorize", "-fno-slp-vectorize"),
        # the instrumentation of the thread sanitizer, answered by runtime/hooks.cpp
        *("-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0"),
        *("-mllvm", "-tsan-instrument-read-before-write=1"),
        "-fsanitize=bounds,shift,integer-divide-by-zero,signed-integer-overflow,alignment,float-cast-overflow",
        "-fsanitize=unreachable,return",
    ],
}


def check_syntax(unit: str, kernel: str) -> None:
    """Compiles with address spaces as part of the types, for the errors only.

    Raises:
        KernelFault: with the compiler's messages.
    """
    passed = cache_folder() / f"{_key(unit, 'lint')}.ok"
    if not passed.exists():
        _compile(unit, "lint", kernel, ["-fsyntax-only"])
        passed.touch()


def shared_object(unit: str, build: Literal["check", "fast"], kernel: str) -> Path:
    """The compiled unit. It is loaded after `runtime_library`, which has what it calls.

    Raises:
        KernelFault: with the compiler's messages.
    """
    path = cache_folder() / f"{kernel[:40]}-{build}-{_key(unit, build)}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            compiled = Path(scratch) / "kernel.o"
            _compile(unit, build, kernel, ["-c", "-o", str(compiled)])
            _link([compiled], path)
    return path


@functools.cache
def runtime_library() -> Path:
    """The scheduler and the checks, runtime/*.cpp."""
    path = cache_folder() / f"runtime-{_digest_of_own_files()}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            sources = sorted(_RUNTIME.glob("*.cpp"))
            objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
            with ThreadPoolExecutor() as pool:
                list(pool.map(_compile_runtime, sources, objects))
            _link(objects, path)
    return path


def _compile_runtime(source: Path, target: Path) -> None:
    _run(["c++", *_OBJECT, "-std=c++17", "-O2", "-c", str(source), "-o", str(target)])


def _compile(unit: str, build: Build, kernel: str, output: list[str]) -> None:
    flags = ["-include-pch", str(_precompiled_prelude(build)), *_flags(build), *output, "-"]
    result = _zig(["clang", *flags], unit)
    if result.returncode:
        raise KernelFault(kernel, ["does not compile\n" + result.stderr[:6000]])


@functools.cache
def _precompiled_prelude(build: Build) -> Path:
    """The shim and MLX's `utils.h`, parsed once: a third of the time that a small kernel takes."""
    path = cache_folder() / f"{build}-{_key(PRELUDE, build)}.pch"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            fresh = Path(scratch) / "prelude.pch"
            flags = ["c++-header" if flag == "c++" else flag for flag in _flags(build)]
            _run(["clang", *flags, "-Xclang", "-fno-pch-timestamp", "-o", str(fresh), "-"], PRELUDE)
            fresh.replace(path)
    return path


def _link(objects: Sequence[Path], target: Path) -> None:
    fresh = objects[0].with_suffix(".so")
    _run(["ld.lld", "-shared", *map(str, objects), "-o", str(fresh)])
    fresh.replace(target)


def _run(arguments: list[str], text: str = "") -> None:
    result = _zig(arguments, text)
    if result.returncode:
        raise RuntimeError(f"zig {' '.join(arguments)} failed:\n{result.stderr}")


def _zig(arguments: list[str], text: str) -> subprocess.CompletedProcess[str]:
    folder = str(cache_folder() / "zig")
    environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
    return subprocess.run(
        [_zig_program(), *arguments], input=text, capture_output=True, text=True, env=environment
    )


@functools.cache
def _zig_program() -> str:
    reason = missing()
    if reason:
        raise RuntimeError(reason)
    package = importlib.util.find_spec("ziglang")
    assert package is not None and package.origin is not None
    return str(Path(package.origin).parent / "zig")


def _flags(build: Build) -> list[str]:
    return [*_OBJECT, *_LANGUAGE, *_BUILDS[build], *(f"-I{folder}" for folder in include_folders())]


def _key(unit: str, build: Build) -> str:
    content = "\0".join([_digest_of_own_files(), version("mlx"), *_flags(build), unit])
    return hashlib.sha256(content.encode()).hexdigest()[:20]


@functools.cache
def _digest_of_own_files() -> str:
    digest = hashlib.sha256(version("ziglang").encode())
    for path in sorted([*SHIM.glob("**/*.h"), *_RUNTIME.iterdir()]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]
