"""The machine: BLAS before MLX is loaded, device, chip, memory, default dtype."""

import ctypes
import os
import sys


def prepare() -> None:
    """Put OpenBLAS in front of MLX's reference BLAS on Linux; must run before `mlx.core` is imported."""
    if sys.platform == "linux" and os.environ.get("DFLASH_BLAS") != "off":
        try:
            ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)
        except OSError:
            pass
