"""The headers that kernels see: our shim, then the installed MLX's own, three of them adapted.

Nothing of MLX is vendored: its wheel ships the Metal headers on Linux too.
"""

import functools
import hashlib
import re
import tempfile
from pathlib import Path

import mlx

from tests.metal_emulator.cache import cache_folder

SHIM = Path(__file__).parent / "include"
MLX_INCLUDE = next(Path(folder) / "include" for folder in mlx.__path__)
MLX_KERNELS = "mlx/backend/metal/kernels"

_METAL_HEADERS = (
    "stdlib atomic common compute integer limits math pack relational simdgroup simdgroup_matrix type_traits types"
).split()
_ADAPTED = ("utils.h", "steel/attn/attn.h", "steel/gemm/gemm.h")


@functools.cache
def include_folders() -> tuple[Path, ...]:
    """In the order of search."""
    return SHIM, _adapted_folder(), MLX_INCLUDE


def adapt(text: str) -> str:
    """Two things that C++ cannot take: arrays as parameters in `constant` memory, which become pointers, and the
    attribute [[threadgroup(n)]], whose name is a macro of the shim."""
    text = re.sub(r"(constant const \w+) (\w+)\[\d+\]", r"\1* \2", text)
    return re.sub(r"\[\[threadgroup\(\d+\)\]\]", "", text)


def _adapted_folder() -> Path:
    files = {f"metal_{name}": '#pragma once\n#include "msl/all.h"\n' for name in _METAL_HEADERS}
    for name in _ADAPTED:
        files[f"{MLX_KERNELS}/{name}"] = adapt((MLX_INCLUDE / MLX_KERNELS / name).read_text())
    folder = cache_folder() / f"include-{hashlib.sha256(repr(files).encode()).hexdigest()[:20]}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            fresh = Path(scratch) / "include"
            for name, text in files.items():
                path = fresh / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            try:
                fresh.rename(folder)
            except OSError:  # another process was first
                if not folder.exists():
                    raise
    return folder
