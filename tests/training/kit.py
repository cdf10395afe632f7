"""A tiny target that is loaded as a real one, with its tokenizer and template."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from dflash_mlx.loading import LoadedTarget, load_pair
from dflash_mlx.runtime import Machine
from tests.loading.checkpoints import write_target


@cache
def _folder() -> "TemporaryDirectory[str]":
    made = TemporaryDirectory(prefix="dflash-training-")
    write_target(Path(made.name) / "target")
    return made


def target_folder() -> Path:
    return Path(_folder().name) / "target"


@cache
def tiny_loaded() -> LoadedTarget:
    import mlx.core as mx

    cpu = Machine("cpu", "test", 16.0, "test", "test", mx.float32)
    return load_pair(target_folder(), mode="off", machine=cpu).target
