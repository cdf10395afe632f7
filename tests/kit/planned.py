"""A drafter that knows the true continuation and is right exactly as often as planned."""

from collections.abc import Sequence

import mlx.core as mx

from dflash_mlx.core import Proposal


class PlannedDrafter:
    """Proposes the truth for `plan[i]` tokens in round i (the plan repeats), then wrong tokens.

    A random drafter accepts nothing and so tests nothing of undoing. `features` collects what was injected, so
    that a test can hold it against one pass over the whole text.
    """

    def __init__(
        self,
        truth: Sequence[int],
        plan: Sequence[int],
        *,
        vocab_size: int,
        taps: tuple[int, ...] = (0, 2),
        block_size: int = 8,
    ):
        self.truth = list(truth)
        self.plan = list(plan) or [0]
        self.taps = taps
        self.block_size = block_size
        self.context_length = 0
        self.features: list[mx.array] = []
        self._vocab = vocab_size
        self._round = 0

    def inject(self, features: mx.array, keep: int) -> None:
        self.features.append(features[:keep])
        self.context_length += keep

    def see(self, text):
        pass

    def settle(self) -> None:
        mx.eval(self.features)

    def propose(self, anchor: int, block_size: int) -> Proposal:
        right = self.plan[self._round % len(self.plan)]
        self._round += 1
        assert anchor == self.truth[self.context_length], "the anchor stands right after the context"
        start = self.context_length + 1
        tokens = []
        for j in range(block_size - 1):
            true = self.truth[start + j] if start + j < len(self.truth) else 0
            tokens.append(true if j < right else (true + 1) % self._vocab)
        return Proposal(mx.array(tokens, mx.int32), mx.ones(len(tokens)))

    def snapshot(self) -> int:
        return self.context_length

    def restore(self, snapshot: int) -> None:
        self.context_length = snapshot

    def rewind(self, length: int) -> bool:
        if length > self.context_length:
            return False
        self.context_length = length
        return True

    def part(self) -> None:
        pass

    def nbytes_of(self, snapshots: Sequence[int]) -> int:
        return 0
