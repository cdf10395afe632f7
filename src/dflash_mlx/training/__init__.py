"""Training a drafter for a target: answers, features, blocks, loss, the loop and its checkpoints."""

from dflash_mlx.training.records import Answer, is_held_out, read_answers

__all__ = ["Answer", "is_held_out", "read_answers"]
