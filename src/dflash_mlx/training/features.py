"""What the frozen target says about one answer: token ids in, its hidden states and likeliest next tokens out.

The target's own forward under its own taps, chunk by chunk, so that logits of only a few rows exist at a time. What
all prompts begin with is read once. Knows no drafter and no files.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from dflash_mlx.kernels.fastmath import softmax_parts
from dflash_mlx.target import MLXTarget
from dflash_mlx.target.quick import quick_forward
from dflash_mlx.training.records import Answer

_CHUNK = 512  # rows of one pass that makes features only
_LOGIT_ROWS = 128  # rows of one pass whose logits are looked at
_GROUP = 128  # ids whose highest logit stands for them in the search for the likeliest


class AnswerFeatures(NamedTuple):
    """Of an answer of P prompt and n answer tokens, S = P + n; T tokens are kept of each distribution."""

    features: npt.NDArray[np.uint16]  # bfloat16 bits [S - 1, F * D]: every token but the last
    top_ids: npt.NDArray[np.int32]  # [n - 1, T]: row j is about the answer's token j + 1
    top_logprobs: npt.NDArray[np.float16]  # [n - 1, T]

    @property
    def nbytes(self) -> int:
        """Bytes of all three."""
        return self.features.nbytes + self.top_ids.nbytes + self.top_logprobs.nbytes


class FeatureComputer:
    """One target with its taps, and the beginning that all prompts share."""

    def __init__(
        self, target: MLXTarget, taps: Sequence[int], *, top_k: int, shared: Sequence[int] = ()
    ) -> None:
        """Read what is shared.

        Args:
            target: frozen.
            taps: layers whose outputs are the features, in this order.
            top_k: likeliest tokens to keep for each answer token; 0: none, and no logits are computed.
            shared: what every prompt begins with, see `shared_beginning`.
        """
        self.target = target
        self.taps = tuple(taps)
        self.top_k = min(top_k, target.vocab_size)
        self._shared = tuple(shared)
        self._cache = target.make_cache()
        self._head: list[mx.array] = []
        with quick_forward(target.model, target.dtype):
            self._head = self._read(self._shared)
        target.settle(self._cache)
        self._start = target.snapshot(self._cache)

    def compute(self, answer: Answer) -> AnswerFeatures:
        """One answer's rows, evaluated; it has at least two answer tokens."""
        ids, first = answer.ids[:-1], len(answer.prompt_ids)
        if ids[: len(self._shared)] != self._shared or first < len(self._shared):
            raise ValueError("the prompt does not begin with what all prompts share")
        self.target.restore(self._cache, self._start)
        with quick_forward(self.target.model, self.target.dtype):
            rows = self._head + self._read(ids[len(self._shared) : first])
            tops = []
            for at in range(first, len(ids), _LOGIT_ROWS if self.top_k else _CHUNK):
                part = ids[at : at + (_LOGIT_ROWS if self.top_k else _CHUNK)]
                read = self._pass(part)
                rows.append(read[0])
                if self.top_k:
                    tops.append(likeliest(read[1], self.top_k))
                    mx.eval(rows[-1], tops[-1])
                else:
                    mx.eval(rows[-1])
        features = np.array(mx.concatenate(rows).view(mx.uint16))
        if not tops:
            nothing = (len(ids) - first, 0)
            return AnswerFeatures(features, np.zeros(nothing, np.int32), np.zeros(nothing, np.float16))
        top_ids, logprobs = (mx.concatenate(list(parts)) for parts in zip(*tops, strict=True))
        return AnswerFeatures(features, np.array(top_ids), np.array(logprobs))

    def _read(self, ids: Sequence[int]) -> list[mx.array]:
        """Features [s, F*D] of ids that go into the cache, chunk by chunk."""
        rows = []
        for at in range(0, len(ids), _CHUNK):
            rows.append(self._pass(ids[at : at + _CHUNK])[0])
            mx.eval(rows[-1])
            self.target.settle(self._cache)
        return rows

    def _pass(self, ids: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Lazy bfloat16 features [s, F*D] and logits [s, V]."""
        read = self.target.verify(mx.array(list(ids)), self._cache, self.taps)
        self.target.commit(self._cache, read.tape, len(ids))
        return read.features.astype(mx.bfloat16), read.logits


def shared_beginning(answers: Sequence[Answer]) -> tuple[int, ...]:
    """What all prompts begin with, at most all but the last token of the shortest."""
    if not answers:
        return ()
    low, high = min(a.prompt_ids for a in answers), max(a.prompt_ids for a in answers)
    most = min(len(a.prompt_ids) for a in answers) - 1
    same = 0
    while same < most and low[same] == high[same]:
        same += 1
    return low[:same]


def likeliest(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Of logits [S, V] the `count` highest: ids int32 [S, count] and log-probabilities float16, in no order.

    The highest of all lie in the groups with the highest maxima, so only these groups are searched.
    """
    rows, vocab = logits.shape
    scores = logits.astype(mx.float32)
    _, total, highest = softmax_parts(scores)
    groups = -(-vocab // _GROUP)
    ids = mx.broadcast_to(mx.arange(vocab, dtype=mx.int32), (rows, vocab))
    if groups > 4 * count:
        padded = mx.pad(scores, [(0, 0), (0, groups * _GROUP - vocab)], constant_values=-float("inf"))
        best = padded.reshape(rows, groups, _GROUP).max(axis=-1)
        chosen = mx.argpartition(-best, count, axis=-1)[:, :count].astype(mx.int32)
        ids = (chosen[:, :, None] * _GROUP + mx.arange(_GROUP, dtype=mx.int32)).reshape(rows, -1)
        scores = mx.take_along_axis(padded, ids, axis=-1)
    if ids.shape[1] > count:
        places = mx.argpartition(-scores, count, axis=-1)[:, :count]
        ids, scores = (mx.take_along_axis(a, places, axis=-1) for a in (ids, scores))
    return ids, (scores - highest - mx.log(total)).astype(mx.float16)
