"""A pair measured: races against plain decoding, their figures and pictures, and what acceptance depends on."""

from dflash_mlx.bench.arms import Arm, Subject, Task, Trial
from dflash_mlx.bench.lineup import Lineup, Setting, lineup
from dflash_mlx.bench.pictures import pictures
from dflash_mlx.bench.race import race
from dflash_mlx.bench.report import Outcome
from dflash_mlx.bench.subject import Pair
from dflash_mlx.bench.summary import Row, Spread

__all__ = [
    "Arm",
    "Lineup",
    "Outcome",
    "Pair",
    "Row",
    "Setting",
    "Spread",
    "Subject",
    "Task",
    "Trial",
    "lineup",
    "pictures",
    "race",
]
