"""Rounds on answers that are known, as the engine would walk them, many answers at once.

Comes in: a network, answers with their features, the head. Goes out: tokens per round, acceptance by slot. The walk
begins at the first answer token; a round accepts what agrees with the answer and adds the answer's next token, which
is what the target emits greedily, or with the same draws. Nothing is trained here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx.training.batches import make_batch, plan_epoch
from dflash_mlx.training.features import AnswerFeatures
from dflash_mlx.training.loss import vocabulary_losses
from dflash_mlx.training.network import LayerRows, context_rows, drafted, sights
from dflash_mlx.training.records import Answer
from dflash_mlx.training.step import Stepper

_AT_ONCE = 16  # answers that are walked together
_RANDOM_ANCHORS = 16  # of each answer
_FIRST_SLOTS = 2


@dataclass(frozen=True, slots=True)
class Measured:
    """What a drafter does on held-out answers."""

    tokens_per_round: float  # of the walk, as the engine counts them
    accepted: tuple[float, ...]  # [B - 1] part of the walk's rounds whose slots 1..k all agree
    random_tokens_per_round: float  # at random anchors, which flatters: it does not go where drafts fail
    random_accepted: tuple[float, ...]
    cross_entropy: float  # over the whole vocabulary, slot 1, at random anchors
    rounds: int
    answers: int


def measure(stepper: Stepper, answers: Sequence[Answer], features: Sequence[AnswerFeatures]) -> Measured:
    """Walk the answers, then draft at random anchors of them, the same ones each time."""
    block_size = stepper.network.config.block_size
    order = sorted(range(len(answers)), key=lambda i: len(answers[i].ids))
    accepted: list[int] = []
    emitted = 0
    for at in range(0, len(order), _AT_ONCE):
        part = order[at : at + _AT_ONCE]
        accepted += walk(stepper, [answers[i] for i in part], [features[i] for i in part])
        emitted += sum(len(answers[i].answer_ids) - 1 for i in part)
    agreeing, entropy = _at_random(stepper, answers, features)
    return Measured(
        tokens_per_round=emitted / max(len(accepted), 1),
        accepted=_by_slot(accepted, block_size),
        random_tokens_per_round=1 + float(np.mean(agreeing)),
        random_accepted=_by_slot(agreeing, block_size),
        cross_entropy=entropy,
        rounds=len(accepted),
        answers=len(answers),
    )


def walk(stepper: Stepper, answers: Sequence[Answer], features: Sequence[AnswerFeatures]) -> list[int]:
    """Accepted tokens of every round of every answer, in the order in which rounds are computed."""
    rows = _contexts(stepper, features)
    ids = [np.array(answer.ids, np.int32) for answer in answers]
    places = np.array([len(answer.prompt_ids) for answer in answers], np.int32)
    alive = np.array([at < len(of) - 1 for at, of in zip(places, ids, strict=True)])
    accepted: list[int] = []
    while alive.any():
        live = np.flatnonzero(alive)
        true = np.full((len(live), stepper.network.config.block_size - 1), -1, np.int32)  # -1: beyond the end
        for row, i in zip(true, live, strict=True):
            rest = ids[i][places[i] + 1 :][: len(row)]
            row[: len(rest)] = rest
        tokens = np.array([ids[i][places[i]] for i in live], np.int32)
        hidden = _draft(stepper, _only(rows, live, len(answers)), places[live], tokens)
        same = _agreeing(stepper, hidden, true)
        accepted += same.tolist()
        places[live] += same.astype(np.int32) + 1
        for i in live:
            alive[i] = places[i] < len(ids[i]) - 1
    return accepted


def _contexts(stepper: Stepper, features: Sequence[AnswerFeatures]) -> list[LayerRows]:
    longest = max(len(item.features) for item in features)
    laid = np.zeros((len(features), longest, features[0].features.shape[1]), np.uint16)
    for row, item in zip(laid, features, strict=True):
        row[: len(item.features)] = item.features
    rows = context_rows(stepper.network, mx.array(laid).view(mx.bfloat16))
    mx.eval(rows)
    return rows


def _only(rows: list[LayerRows], live: npt.NDArray[np.intp], count: int) -> list[LayerRows]:
    if len(live) == count:
        return rows
    chosen = mx.array(live)
    return [LayerRows(keys[chosen], values[chosen]) for keys, values in rows]


def _draft(
    stepper: Stepper, rows: list[LayerRows], places: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32]
) -> mx.array:
    """What the head is to read [n, B - 1, D] of one block for each of n answers."""
    network, block_size = stepper.network, stepper.network.config.block_size
    anchors = mx.array(places[:, None])
    block = stepper.embedded_blocks(stepper.embedded(tokens)[:, None], block_size)
    seen = sights(network.config, anchors, rows[0].keys.shape[2], block_size)
    hidden = drafted(network, block, rows, anchors, seen)[:, 0] * network.config.output_multiplier
    mx.eval(hidden)
    return hidden


def _agreeing(stepper: Stepper, hidden: mx.array, true: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """How many of the first drafted tokens are the true ones [n, B - 1].

    Most rounds end in the first slots, so the head, dearer than the draft, reads the others where it must only.
    """
    counts = np.zeros(len(true), np.int64)
    going = np.arange(len(true))
    for slots in (slice(0, _FIRST_SLOTS), slice(_FIRST_SLOTS, true.shape[1])):
        part = true[going, slots]
        if not part.size:
            break
        rows = hidden[mx.array(going), slots]
        logits = stepper.head.logits(rows.reshape(-1, rows.shape[-1]))
        drafts = np.array(mx.argmax(logits, axis=-1).astype(mx.int32)).reshape(part.shape)
        same = np.cumprod(drafts == part, axis=-1).sum(-1)
        counts[going] += same
        going = going[same == part.shape[1]]
    return counts


def _at_random(
    stepper: Stepper, answers: Sequence[Answer], features: Sequence[AnswerFeatures]
) -> tuple[list[int], float]:
    """Agreeing tokens at each random anchor, and the mean cross-entropy of slot 1."""
    block_size = stepper.network.config.block_size
    plans = plan_epoch(
        answers, seed=0, epoch=0, anchors=_RANDOM_ANCHORS, block_size=block_size, batch_rows=1024
    )
    rng = np.random.default_rng(0)
    agreeing: list[int] = []
    losses: list[float] = []
    for plan in plans:
        members, items = [answers[i] for i in plan.members], [features[i] for i in plan.members]
        batch = make_batch(plan, members, items, block_size=block_size, rng=rng, soft_top=0)
        hidden = stepper.hidden(batch)
        labels = mx.array(batch.blocks.labels.reshape(-1))
        rows = vocabulary_losses(hidden.reshape(-1, hidden.shape[-1]), labels, stepper.head)
        mx.eval(rows)
        valid = batch.blocks.valid
        right = np.array(rows.right).reshape(valid.shape) & valid
        real = valid[..., 0]
        agreeing += np.cumprod(right, axis=-1).sum(-1)[real].tolist()
        losses += np.array(rows.loss).reshape(valid.shape)[..., 0][real].tolist()
    return agreeing, float(np.mean(losses))


def _by_slot(accepted: Sequence[int], block_size: int) -> tuple[float, ...]:
    counts = np.asarray(accepted)
    return tuple(float((counts >= slot).mean()) for slot in range(1, block_size))
