"""Which answers take part in a run, and what is counted over them: answers in, answers and counts out."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dflash_mlx.training.records import Answer


def usable(answers: Sequence[Answer], longest: int) -> list[Answer]:
    """Those with an anchor and a label, cut where they are too long."""
    cut = (replace(a, answer_ids=a.answer_ids[: max(0, longest - len(a.prompt_ids))]) for a in answers)
    return [answer for answer in cut if len(answer.answer_ids) >= 2]


def some(answers: list[Answer], count: int) -> list[Answer]:
    """Evenly spread ones, the same in each run: by what their ids hash to."""
    return sorted(answers, key=lambda answer: hashlib.blake2b(repr(answer.ids).encode()).digest())[:count]


def frequent(answers: Sequence[Answer], vocab: int) -> npt.NDArray[np.int32]:
    """Ids that occur in answers, the most frequent first."""
    counts = np.zeros(vocab, np.int64)
    for answer in answers:
        np.add.at(counts, np.array(answer.answer_ids), 1)
    order = np.argsort(-counts, kind="stable")
    return order[: int((counts > 0).sum())].astype(np.int32)


def digest(answers: Sequence[Answer]) -> str:
    """What tells these answers from others."""
    digest = hashlib.blake2b(digest_size=12)
    for answer in answers:
        digest.update(repr((answer.prompt_ids, answer.answer_ids)).encode())
    return digest.hexdigest()
