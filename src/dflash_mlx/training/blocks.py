"""Which tokens a training pass drafts: answers in, anchors, labels and masks out, as plain arrays.

Shapes: N answers of a batch, A anchors each, B rows of a block, S context rows. An anchor is an answer token whose
successor is known; slot k of its block is to be the token at anchor + k. Knows no model.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx.training.records import Answer


class Blocks(NamedTuple):
    """The blocks of one batch; what fills it up to equal counts has no valid label."""

    anchors: npt.NDArray[np.int32]  # [N, A] positions in prompt + answer, rising
    anchor_ids: npt.NDArray[np.int32]  # [N, A] the tokens there
    labels: npt.NDArray[np.int32]  # [N, A, B - 1] the token at anchor + k for k = 1..B-1; 0 where not valid
    valid: npt.NDArray[np.bool_]  # [N, A, B - 1]


def candidates(answer: Answer) -> range:
    """Positions that may be anchors: answer tokens with a successor."""
    first = len(answer.prompt_ids)
    return range(first, first + len(answer.answer_ids) - 1)


def draw_anchors(
    answer: Answer,
    count: int,
    rng: np.random.Generator,
    chances: npt.NDArray[np.float64] | None = None,
) -> npt.NDArray[np.int32]:
    """`count` different positions at random, rising; all there are where these are fewer.

    Args:
        answer: whose.
        count: how many.
        rng: decides.
        chances: [n - 1] of each candidate, all above 0, summing to 1; None: the same for all.
    """
    places = candidates(answer)
    drawn = rng.choice(len(places), size=min(count, len(places)), replace=False, p=chances)
    return (places.start + np.sort(drawn)).astype(np.int32)


def make_blocks(
    answers: Sequence[Answer], anchors: Sequence[npt.NDArray[np.int32]], *, block_size: int, count: int
) -> Blocks:
    """Blocks of `block_size` rows at these anchors of each answer, filled up to `count` anchors."""
    shape = (len(answers), count)
    places = np.zeros(shape, np.int32)
    tokens = np.zeros(shape, np.int32)
    labels = np.zeros((*shape, block_size - 1), np.int32)
    valid = np.zeros((*shape, block_size - 1), np.bool_)
    slots = np.arange(1, block_size)
    for row, (answer, drawn) in enumerate(zip(answers, anchors, strict=True)):
        ids, used = np.array(answer.ids, np.int32), len(drawn)
        # A block that fills up stands where a real one stands, so that it sees something.
        places[row], places[row, :used] = len(answer.prompt_ids), drawn
        tokens[row] = ids[places[row]]
        at = drawn[:, None] + slots
        valid[row, :used] = at < len(ids)
        labels[row, :used] = np.where(valid[row, :used], ids[np.minimum(at, len(ids) - 1)], 0)
    return Blocks(places, tokens, labels, valid)


def seen_context(anchors: mx.array, context: int, block_size: int, window: int | None) -> mx.array:
    """Which context positions the rows of each block see: those before its anchor, and within the window.

    Returns:
        bool [N, A, 1, S], or [N, A, B, S] where a window makes rows of a block differ; row j stands at anchor + j and
        sees what is less than `window` positions back. Blocks never see each other.
    """
    keys = mx.arange(context)
    starts = anchors[:, :, None, None]
    seen = keys < starts
    if window is None:
        return seen
    rows = starts + mx.arange(block_size)[:, None]
    return seen & (rows - keys < window)


def slot_weights(block_size: int, gamma: float) -> npt.NDArray[np.float32]:
    """exp(-(k - 1) / gamma) for slots k = 1..B-1 (DFlash, 2602.06036, section 4)."""
    return np.exp(-np.arange(block_size - 1) / gamma).astype(np.float32)
