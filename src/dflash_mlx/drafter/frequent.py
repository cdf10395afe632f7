"""The words that a drafter's target uses most: a small file beside the drafter, `draft_vocab.json`.

A JSON object: `version` 1, `vocab_size` of the target, `ids` with the most frequent first, and `counts`, how often
each stood in the answers that were counted. Ids that never did are left out. Knows no network.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from dflash_mlx.errors import CheckpointError

FILE = "draft_vocab.json"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class FrequentWords:
    """Counted words, the most frequent first."""

    vocab_size: int
    ids: tuple[int, ...]
    counts: tuple[int, ...]

    def missed(self, words: Collection[int]) -> float:
        """The share of what was counted that these words leave out."""
        listed = frozenset(words)
        left_out = sum(n for word, n in zip(self.ids, self.counts, strict=True) if word not in listed)
        return left_out / sum(self.counts)


def counted(counts: Mapping[int, int], *, vocab_size: int) -> FrequentWords:
    """Counts by id as frequent words; of equally frequent ones the lowest id comes first."""
    order = sorted((word for word, n in counts.items() if n > 0), key=lambda word: (-counts[word], word))
    return FrequentWords(vocab_size, tuple(order), tuple(counts[word] for word in order))


def write_frequent(folder: str | Path, words: FrequentWords) -> Path:
    """Write `draft_vocab.json` into a drafter's folder.

    Raises:
        OSError: it cannot be written.
    """
    record = {"version": _VERSION, "vocab_size": words.vocab_size, "ids": words.ids, "counts": words.counts}
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
    size, ids, counts = record.get("vocab_size"), record.get("ids"), record.get("counts")
    if not (_whole(size, 1) and _whole_list(ids, 0) and _whole_list(counts, 1)):
        raise CheckpointError(
            f"The {FILE} of {name} needs a vocab_size, and lists of whole numbers for ids and counts; remove the file."
        )
    if len(ids) != len(counts) or len(set(ids)) != len(ids) or max(ids) >= size:
        raise CheckpointError(
            f"The {FILE} of {name} holds {len(ids)} ids, the largest {max(ids)}, with {len(counts)} counts for a "
            f"vocabulary of {size}; each id may stand once, with one count. Remove the file."
        )
    return FrequentWords(size, tuple(ids), tuple(counts))


def _whole(value: Any, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _whole_list(value: Any, least: int) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) > 0 and all(_whole(item, least) for item in value)
