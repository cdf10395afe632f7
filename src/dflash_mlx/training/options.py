"""What a training run is asked for, checked."""

from dataclasses import dataclass

from dflash_mlx.errors import UsageError

_GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}  # of the paper, by block size


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How to train; the defaults are those of the paper where it states them, sized for a small machine."""

    steps: int | None = None  # None: as many as `epochs` make
    epochs: float = 6.0
    minutes: float | None = (
        None  # end, with the schedule, after this time too; weights then depend on the clock
    )
    anchors: int = 64  # blocks of one answer and step, at most
    surprising: float = (
        0.0  # part of the anchors' chances that goes to tokens which the target did not expect
    )
    batch_rows: int = 3072  # block rows of one step, at most
    learning_rate: float = 6e-4
    final_learning_rate: float = 0.0  # as a part of `learning_rate`
    warm_up: float = 0.04  # part of all steps
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0  # of the gradient's norm
    gamma: float | None = None  # loss decay by slot; None: by the block size
    dpace: bool = False  # weigh slots by how many accepted tokens hang on them instead
    candidates: int = 8192  # tokens that take part in the cross-entropy of a step; 0: the whole vocabulary
    soft: float = 0.5  # part of the loss that follows the target's likeliest tokens instead of the label
    soft_top: int = 16  # how many of them
    gradient_checkpointing: bool = False  # compute a layer's inside twice instead of keeping it
    compiled: bool | None = None  # None: on a GPU; on a CPU compiling takes long and gains nothing
    longest: int = 3072  # tokens of prompt and answer; an answer is cut there
    seed: int = 0
    checkpoint_minutes: float = 5.0
    evaluate_steps: int = 0  # steps between measurements on held-out answers; 0: only at the end
    evaluate_answers: int = 24  # held-out answers to measure on

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            UsageError: naming the option.
        """
        least = {
            "longest": 4,
            "anchors": 1,
            "batch_rows": 16,
            "candidates": 0,
            "soft_top": 0,
            "evaluate_steps": 0,
        }
        for name, bound in {**least, "evaluate_answers": 1}.items():
            if getattr(self, name) < bound:
                raise UsageError(f"{name} is {getattr(self, name)}; at least {bound} is expected.")
        for name in ("epochs", "learning_rate", "clip", "checkpoint_minutes"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}; more than 0 is expected.")
        if self.surprising == 1:
            raise UsageError(
                "surprising is 1, which leaves no chance to most tokens; give less, such as 0.5."
            )
        for name in ("surprising", "soft", "warm_up", "final_learning_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; a number from 0 to 1 is expected.")
        for name in ("steps", "minutes", "gamma"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} is {value}; more than 0 is expected.")

    def decay(self, block_size: int) -> float:
        """The loss decay by slot: the paper's for its block sizes, half the block for others."""
        return _GAMMA.get(block_size, block_size / 2) if self.gamma is None else self.gamma

    @property
    def kept_top(self) -> int:
        """Likeliest tokens of the target that have to be known."""
        return self.soft_top if self.soft or self.surprising else 0
