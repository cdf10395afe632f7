"""DFlash speculative decoding on MLX: the drafter proposes a block, the target verifies it, the text is the target's.

Importing it puts OpenBLAS in front of MLX on Linux and does nothing else; the names below load what they need.
"""

from typing import TYPE_CHECKING, Any

from dflash_mlx import runtime

runtime.prepare()

if TYPE_CHECKING:
    from dflash_mlx.core import Chunk, Comparison, Result, Stats
    from dflash_mlx.errors import DFlashError
    from dflash_mlx.generator import DFlashGenerator

__all__ = ["Chunk", "Comparison", "DFlashError", "DFlashGenerator", "Result", "Stats", "__version__"]

_HOMES = {
    "Chunk": "core",
    "Comparison": "core",
    "Result": "core",
    "Stats": "core",
    "DFlashError": "errors",
    "DFlashGenerator": "generator",
}


def __getattr__(name: str) -> Any:
    """Load public names when they are asked for, so that `dflash-mlx --help` need not wait for MLX."""
    import importlib
    import importlib.metadata

    if name == "__version__":
        return importlib.metadata.version("dflash-mlx")
    if name in _HOMES:
        return getattr(importlib.import_module(f"dflash_mlx.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'dflash_mlx' has no attribute {name!r}")
