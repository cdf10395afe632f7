"""Where a training run is, and how it ended. Computes nothing."""

from dataclasses import dataclass
from pathlib import Path

from dflash_mlx.training.simulate import Measured


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is; the figures of loss and slots are running means."""

    step: int
    steps: int  # all of them, as far as known
    epoch: int
    loss: float
    agreeing: tuple[
        float, ...
    ]  # by slot: part of labels that the draft finds likeliest, whatever came before
    gradient_norm: float
    learning_rate: float
    tokens_per_second: float  # labels drafted
    seconds: float  # of this run and those that it resumes
    seconds_left: float
    measured: Measured | None = None  # on held-out answers, where this step measured
    checkpoint: Path | None = None  # where this step wrote one


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended."""

    steps: int
    new_steps: int  # of this run alone
    epochs: float  # times over all answers
    seconds: float  # of this run and those that it resumed
    finished: bool  # False: stopped by Ctrl-C, and saved
    measured: Measured | None
    checkpoint: Path | None


@dataclass(slots=True)
class Place:
    """Where in the data a run is."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0
