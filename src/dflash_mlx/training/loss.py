"""Drafted rows and what they should have said in, a loss out; and the frozen head it goes through.

Cross-entropy over a set of candidate tokens (labels, soft targets, frequent and random ids) stands for that over the
vocabulary; random ids count for all that were left out, so that the sum of exponentials has no bias. Logits exist for
a few hundred rows at a time. Shapes: R rows, D hidden width, C candidates, T likeliest tokens of a soft target.
"""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from dflash_mlx.kernels import fastmath
from dflash_mlx.target import MLXTarget

_ROWS = 512  # rows whose logits exist at once


class RowLosses(NamedTuple):
    """Of each row, all [R]; only `loss` has a gradient."""

    loss: mx.array
    label_logprob: mx.array
    right: mx.array  # bool: no candidate has a higher logit than the label


class Candidates(NamedTuple):
    """The ids that take part in a step."""

    ids: npt.NDArray[np.int32]  # [C], different
    bias: npt.NDArray[
        np.float32
    ]  # [C] added to logits: log of how many ids of the vocabulary each stands for


class Head:
    """The target's head as rows of a matrix, so that the logits of a few ids cost a few rows."""

    def __init__(self, target: MLXTarget) -> None:
        """Find the matrix and hold it against the head."""
        self.target = target
        self.softcap = target.logit_softcap
        self._table, self._scale = self._found()

    @property
    def has_rows(self) -> bool:
        """Whether single rows can be had; otherwise the whole head is the only way."""
        return self._table is not None

    def rows(self, ids: mx.array) -> mx.array:
        """Rows [..., D] float32 of ids [...], scaled so that a product with them is a logit before any soft-cap."""
        assert self._table is not None, "asked for rows of a head that has none"
        return self._table(ids).astype(mx.float32) * self._scale

    def logits(self, hidden: mx.array) -> mx.array:
        """The target's own head: [R, D] to [R, V] float32."""
        return self.target.head(hidden.astype(self.target.dtype)).astype(mx.float32)

    def _found(self) -> tuple[Callable[[mx.array], mx.array] | None, mx.array]:
        """The module whose rows give the head's logits, up to one factor, on a few random rows."""
        rng = np.random.default_rng(0)
        hidden = mx.array(rng.standard_normal((4, self.target.hidden_size)), mx.float32)
        ids = mx.array(rng.choice(self.target.vocab_size, min(64, self.target.vocab_size), replace=False))
        wanted = self.logits(hidden)[:, ids]
        for _, module in self.target.model.named_modules():
            table = _lookup(module, self.target.vocab_size, self.target.hidden_size)
            if table is None:
                continue
            found = hidden @ table(ids).astype(mx.float32).T
            if self.softcap is not None:
                found = mx.tanh(found / self.softcap) * self.softcap
            scale = mx.sum(found * wanted) / mx.sum(found * found)
            if self.softcap is not None or mx.abs(scale - 1) < 0.002:
                scale = mx.array(1.0)
            error = mx.max(mx.abs(found * scale - wanted)) / mx.max(mx.abs(wanted))
            if (error < 0.02).item():  # of the activations' own rounding, bfloat16 at most
                return table, scale
        return None, mx.array(1.0)


def _lookup(module: nn.Module, vocab: int, width: int) -> Callable[[mx.array], mx.array] | None:
    """Rows of a module's matrix [V, D], unpacked where they are quantised."""
    if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        if module.weight.shape[0] != vocab or module.scales.shape[1] * module.group_size != width:
            return None
        biases: mx.array | None = module.get("biases")
        return lambda ids: mx.dequantize(
            module.weight[ids],
            module.scales[ids],
            None if biases is None else biases[ids],
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
        )
    if isinstance(module, (nn.Linear, nn.Embedding)) and module.weight.shape == (vocab, width):
        return lambda ids: module.weight[ids]
    return None


def choose_candidates(
    wanted: npt.NDArray[np.int32],
    frequent: npt.NDArray[np.int32],
    *,
    vocab: int,
    count: int,
    rng: np.random.Generator,
) -> Candidates:
    """The ids of a step: all that are wanted, then frequent ones, then random ones up to `count`.

    A quarter of `count` is kept for random ones. Where more ids are wanted than fit, the set grows by whole steps of
    1024, so that a compiled step sees few sizes.
    """
    fixed = np.unique(wanted)
    count = max(count, -(-(len(fixed) + 64) // 1024) * 1024)
    if count >= vocab:
        return Candidates(np.arange(vocab, dtype=np.int32), np.zeros(vocab, np.float32))
    room = max(0, count - count // 4 - len(fixed))
    fixed = np.concatenate([fixed, frequent[~np.isin(frequent, fixed)][:room]])
    left_out = np.setdiff1d(np.arange(vocab, dtype=np.int32), fixed, assume_unique=True)
    drawn = rng.choice(left_out, size=min(len(left_out), count - len(fixed)), replace=False)
    bias = np.zeros(len(fixed) + len(drawn), np.float32)
    bias[len(fixed) :] = np.log(len(left_out) / len(drawn))
    return Candidates(np.concatenate([fixed, drawn]).astype(np.int32), bias)


def candidate_losses(
    hidden: mx.array, meant: mx.array, label_rows: mx.array, head: mx.array, bias: mx.array
) -> RowLosses:
    """Cross-entropy of rows without a soft-cap.

    A soft target's loss is lse - sum p_i * logit_i = lse - hidden . (sum p_i * head_i), so that one row of the head
    is all that is needed of it.

    Args:
        hidden: [R, D] float32.
        meant: [R, D] the rows of the head of what the target means, weighted by its probabilities.
        label_rows: [R, D] the rows of the head of the labels.
        head: [C, D].
        bias: [C].
    """

    @mx.custom_function
    def rows(hidden: mx.array, meant: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        logits = mx.addmm(bias, hidden, head.T)
        weights, total, highest = fastmath.softmax_parts(logits)
        lse = (mx.log(total) + highest)[:, 0]
        slope = weights @ head / total - meant
        return lse - (hidden * meant).sum(-1), slope, lse, highest[:, 0]

    @rows.vjp
    def gradient(
        primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
    ) -> tuple[mx.array, ...]:
        return cotangents[0][:, None] * outputs[1], mx.zeros_like(primals[1])

    parts = []
    for at in range(0, hidden.shape[0], _ROWS):
        part = slice(at, at + _ROWS)
        found: tuple[mx.array, ...] = rows(hidden[part], meant[part])  # type: ignore[assignment]
        loss, _, lse, highest = found
        label = mx.stop_gradient((hidden[part] * label_rows[part]).sum(-1))
        parts.append((loss, label - lse, label >= highest - 1e-4))
    loss, logprob, right = (mx.concatenate(column) for column in _columns(parts))
    return RowLosses(loss, mx.stop_gradient(logprob), right)


def vocabulary_losses(hidden: mx.array, labels: mx.array, head: Head) -> RowLosses:
    """Cross-entropy with hard labels [R] over the whole vocabulary, through the target's own head."""

    def part_of(hidden: mx.array, labels: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        logits = head.logits(hidden)
        labels = mx.stop_gradient(labels)
        logprob = mx.take_along_axis(logits, labels[:, None], axis=-1)[:, 0] - mx.logsumexp(logits, axis=-1)
        return -logprob, logprob, mx.argmax(logits, axis=-1) == labels

    kept = mx.checkpoint(part_of)
    parts = [kept(hidden[at : at + _ROWS], labels[at : at + _ROWS]) for at in range(0, len(hidden), _ROWS)]
    loss, logprob, right = (mx.concatenate(column) for column in _columns(parts))
    return RowLosses(loss, mx.stop_gradient(logprob), right)


def _columns(parts: list[tuple[mx.array, mx.array, mx.array]]) -> list[list[mx.array]]:
    return [list(column) for column in zip(*parts, strict=True)]


def dpace_weights(label_logprobs: mx.array, valid: mx.array, alpha: float = 0.5) -> mx.array:
    """D-PACE: slot j weighs sum over m >= j of the product over i <= m of (1 - alpha) q_i + alpha.

    `label_logprobs` and `valid` are [..., B - 1]; q_i is the draft's probability of the right token. A slot counts
    by how many accepted tokens hang on it.
    """
    odds = ((1 - alpha) * mx.exp(label_logprobs) + alpha) * valid
    reach = mx.cumprod(odds, axis=-1)
    return mx.stop_gradient(mx.cumsum(reach, axis=-1, reverse=True) * valid)
