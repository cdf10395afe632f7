"""The words that a drafter's target uses most: a small file beside the drafter, `draft_vocab.json`.

A JSON object: `version` 1, `vocab_size` of the target, `ids` with the most frequent first, and `missed`, a list of
[n, share]: of answers that were not counted, the first n ids miss this share of the tokens. Ids that were met once or
never are left out of `ids`. Knows no network.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from dflash_mlx.errors import CheckpointError

FILE = "draft_vocab.json"
_VERSION = 1
_SHARES = (64, 32, 16, 8, 4, 2)  # `missed` is told for one of so many words


@dataclass(frozen=True, slots=True)
class FrequentWords:
    """Counted words, the most frequent first, and what lists of them miss."""

    vocab_size: int
    ids: tuple[int, ...]
    missed: tuple[tuple[int, float], ...]  # words of a list, share of tokens that it misses; both in order

    def missing(self, words: int) -> float:
        """The share of an answer's tokens that a list of so many words misses."""
        if words <= self.missed[0][0]:
            return self.missed[0][1]
        for (few, more_missed), (many, less_missed) in zip(self.missed, self.missed[1:], strict=False):
            if words <= many:
                share = math.log(words / few) / math.log(many / few)
                return more_missed + share * (less_missed - more_missed)
        return self.missed[-1][1]


def count_words(answers: Iterable[Sequence[int]], *, vocab_size: int) -> FrequentWords:
    """Rank the words of a target's answers; every second answer tells what lists made of the others miss.

    Raises:
        ValueError: fewer than two answers with tokens.
    """
    halves: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
    for index, answer in enumerate(answer for answer in answers if len(answer)):
        halves[index % 2].update(answer)
    counted, held_out = halves
    if not held_out:
        raise ValueError("two answers at least are needed to count words")
    order = [*_ranked(counted), *(word for word in range(vocab_size) if word not in counted)]
    total = held_out.total()
    missed = [
        (n, sum(held_out[word] for word in order[n:]) / total)
        for n in (vocab_size // share for share in _SHARES)
        if n > 0
    ]
    both = counted + held_out
    ids = [word for word in _ranked(both) if both[word] > 1]
    return FrequentWords(vocab_size, tuple(ids), tuple((n, round(share, 5)) for n, share in missed))


def write_frequent(folder: str | Path, words: FrequentWords) -> Path:
    """Write `draft_vocab.json` into a drafter's folder.

    Raises:
        OSError: it cannot be written.
    """
    record = {"version": _VERSION, "vocab_size": words.vocab_size, "missed": words.missed, "ids": words.ids}
    path = Path(folder) / FILE
    path.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
    return path


def read_frequent(folder: str | Path, *, name: str) -> FrequentWords | None:
    """What a drafter's folder holds of them; None without such a file. `name` is the drafter's, for messages.

    Raises:
        CheckpointError: a file that is not what it should be.
    """
    path = Path(folder) / FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"The {FILE} of {name} cannot be read: {error}.") from error
    if not isinstance(record, dict) or record.get("version") != _VERSION:
        raise CheckpointError(f"The {FILE} of {name} is no object of version {_VERSION}; remove the file.")
    size, ids, missed = record.get("vocab_size"), record.get("ids"), record.get("missed")
    if not (_is_whole(size) and _are_ids(ids, size)):
        raise CheckpointError(
            f"The {FILE} of {name} needs a vocab_size, and in ids whole numbers below it, each once; remove the file."
        )
    if not _are_shares(missed):
        raise CheckpointError(
            f"The {FILE} of {name} needs in missed pairs of a number of words and a share from 0 to 1, the numbers "
            "rising and the shares not; remove the file."
        )
    return FrequentWords(size, tuple(ids), tuple((n, float(share)) for n, share in missed))


def _ranked(counts: Counter[int]) -> list[int]:
    """Of equally frequent words the lowest comes first."""
    return sorted(counts, key=lambda word: (-counts[word], word))


def _is_whole(value: Any, least: int = 1) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_ids(value: Any, size: int) -> TypeGuard[list[int]]:
    if not isinstance(value, list) or not value or not all(_is_whole(word, 0) for word in value):
        return False
    return len(set(value)) == len(value) and max(value) < size


def _are_shares(value: Any) -> TypeGuard[list[tuple[int, float]]]:
    if not isinstance(value, list) or not value:
        return False
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or not _is_whole(pair[0]):
            return False
        if not isinstance(pair[1], int | float) or not 0 <= pair[1] <= 1:
            return False
    return all(a[0] < b[0] and a[1] >= b[1] for a, b in zip(value, value[1:], strict=False))
