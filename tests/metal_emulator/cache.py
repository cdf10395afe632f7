"""The folder of compiled kernels."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$DFLASH_EMULATOR_CACHE`, else a folder among the user's caches. Files in it are named by their content and
    moved into place whole, so processes can share it; it may be removed whenever no test runs."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("DFLASH_EMULATOR_CACHE") or user / "dflash-mlx" / "metal-emulator")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
