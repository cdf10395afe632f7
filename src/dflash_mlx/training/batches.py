"""Batches in an order that a seed decides: answers and their features in, the arrays of a step out.

Answers of like length go together, as many as the budget of rows allows; lengths and counts are rounded up, so that
a compiled step sees few shapes. What is random depends on (seed, epoch, batch) alone: a resumed run draws the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx.training.blocks import Blocks, candidates, draw_anchors, make_blocks
from dflash_mlx.training.features import AnswerFeatures
from dflash_mlx.training.records import Answer

_LENGTH_STEP, _ANCHOR_STEP = 32, 8


class BatchPlan(NamedTuple):
    """One batch before its features are there."""

    members: tuple[int, ...]  # answers by number
    anchors: int  # blocks of each
    context: int  # rows of context, S


class Batch(NamedTuple):
    """Arrays of one step; N answers, A anchors, B rows a block, S context rows, T likeliest tokens kept."""

    features: mx.array  # bfloat16 [N, S, F * D]
    blocks: Blocks
    soft_ids: npt.NDArray[np.int32]  # [U, T] one row for each answer token that is a label
    soft_weights: npt.NDArray[np.float32]  # [U, T], each row sums to 1
    soft_rows: npt.NDArray[
        np.int32
    ]  # [N, A, B - 1] which of the U rows is about each label; 0 where not valid


def plan_epoch(
    answers: Sequence[Answer], *, seed: int, epoch: int, anchors: int, block_size: int, batch_rows: int
) -> list[BatchPlan]:
    """All answers once, in batches of at most `batch_rows` block rows and four times as many context rows."""
    rng = np.random.default_rng([seed, epoch])
    lengths = np.array([len(answer.ids) for answer in answers])
    order = np.argsort(lengths + rng.uniform(0, _LENGTH_STEP, len(lengths)), kind="stable")
    plans: list[BatchPlan] = []
    members: list[int] = []

    def shape(of: list[int]) -> tuple[int, int]:
        most = max(len(candidates(answers[i])) for i in of)
        longest = max(lengths[i] for i in of) - 2
        return _up(min(anchors, most), _ANCHOR_STEP), _up(max(longest, 1), _LENGTH_STEP)

    for number in order.tolist():
        count, context = shape([*members, number])
        size = len(members) + 1
        if members and (size * count * block_size > batch_rows or size * context > 4 * batch_rows):
            plans.append(BatchPlan(tuple(members), *shape(members)))
            members = []
        members.append(number)
    if members:
        plans.append(BatchPlan(tuple(members), *shape(members)))
    return [plans[i] for i in rng.permutation(len(plans))]


def make_batch(
    plan: BatchPlan,
    answers: Sequence[Answer],
    features: Sequence[AnswerFeatures],
    *,
    block_size: int,
    rng: np.random.Generator,
    soft_top: int,
    surprising: float = 0.0,
) -> Batch:
    """Draw anchors for the plan's answers and lay their arrays out.

    Args:
        plan: which answers; `answers` and `features` are theirs, in its order.
        answers: see above.
        features: see above.
        block_size: rows of a block.
        rng: decides the anchors.
        soft_top: likeliest tokens to take into a soft target, at most those kept.
        surprising: part of the anchors' chances that goes by `surprise` instead of being the same for all.
    """
    drawn = []
    for answer, item in zip(answers, features, strict=True):
        chances = None
        if surprising and item.top_ids.shape[1]:
            odds = surprise(answer, item)
            chances = (1 - surprising) / len(odds) + surprising * odds / odds.sum()
        drawn.append(draw_anchors(answer, plan.anchors, rng, chances))
    blocks = make_blocks(answers, drawn, block_size=block_size, count=plan.anchors)
    laid = np.zeros((len(answers), plan.context, features[0].features.shape[1]), np.uint16)
    for row, item in zip(laid, features, strict=True):
        used = min(plan.context, len(item.features))
        row[:used] = item.features[:used]
    ids, weights, rows = _soft(answers, features, blocks, soft_top)
    return Batch(mx.array(laid).view(mx.bfloat16), blocks, ids, weights, rows)


def surprise(answer: Answer, features: AnswerFeatures) -> npt.NDArray[np.float64]:
    """How little the target expected each anchor candidate, 1 - p [n - 1]; 1 for the first.

    Real rounds begin at tokens that the draft before them missed, which are mostly such ones.
    """
    tokens = np.array(answer.answer_ids[1:-1], np.int32)[:, None]
    about = slice(0, len(tokens))
    chances = np.exp(features.top_logprobs[about].astype(np.float64))
    expected = np.where(features.top_ids[about] == tokens, chances, 0.0).sum(-1)
    return np.concatenate([[1.0], np.clip(1.0 - expected, 0.0, 1.0)])


def _soft(
    answers: Sequence[Answer], features: Sequence[AnswerFeatures], blocks: Blocks, top: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Soft targets of all labels, each answer token once."""
    rows = np.zeros(blocks.labels.shape, np.int32)
    kept = min(top, features[0].top_ids.shape[1])
    if not kept:
        return np.zeros((1, 0), np.int32), np.zeros((1, 0), np.float32), rows
    slots = np.arange(1, blocks.labels.shape[2] + 1)
    ids, weights, start = [], [], 0
    for n, (answer, item) in enumerate(zip(answers, features, strict=True)):
        about = blocks.anchors[n][:, None] + slots - len(answer.prompt_ids) - 1
        rows[n] = np.where(blocks.valid[n], start + about, 0)
        best = np.argsort(-item.top_logprobs.astype(np.float32), axis=-1, kind="stable")[:, :kept]
        chances = np.exp(np.take_along_axis(item.top_logprobs, best, -1).astype(np.float32))
        ids.append(np.take_along_axis(item.top_ids, best, -1))
        weights.append(chances / chances.sum(-1, keepdims=True))
        start += len(item.top_ids)
    # Rounded up, for the sake of a compiled step.
    room = [(0, _up(start, 256) - start), (0, 0)]
    return np.pad(np.concatenate(ids), room), np.pad(np.concatenate(weights), room), rows


def _up(count: int, step: int) -> int:
    return int(-(-count // step) * step)
