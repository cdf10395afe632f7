"""Features that were computed once: kept in memory or in one file, found again by the answer's ids.

A file belongs to one target and one set of taps, and another's is refused. It grows at its end; what was being
written when a run broke off is written over by the next. Knows no model.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflash_mlx.errors import UsageError, WriteError
from dflash_mlx.training.features import AnswerFeatures
from dflash_mlx.training.records import Answer

_ROWS, _INDEX, _ABOUT = "features.bin", "features.jsonl", "features.json"


class _Place(NamedTuple):
    """Where an answer lies in the file."""

    offset: int
    rows: int  # S - 1
    tops: int  # n - 1


class FeatureStore:
    """Features by answer, in memory (`folder` None) or on disk."""

    def __init__(self, folder: Path | None, *, width: int, top_k: int, about: Mapping[str, Any]) -> None:
        """Open or start a store.

        Args:
            folder: made if need be.
            width: values of one row, F * D.
            top_k: tokens kept of each distribution.
            about: what tells the target and its taps apart, see `fingerprint`.

        Raises:
            UsageError: the folder holds another target's features.
            WriteError: it cannot be written.
        """
        self.width, self.top_k = width, top_k
        self._held: dict[str, AnswerFeatures] = {}
        self._places: dict[str, _Place] = {}
        self._end = 0
        self._folder = folder
        self._file = -1
        if folder is not None:
            try:
                self._open(folder, {**about, "width": width, "top_k": top_k})
            except OSError as error:
                raise WriteError(f"Features cannot be kept in {folder}: {error.strerror}.") from error

    def __contains__(self, answer: Answer) -> bool:
        """Whether the answer's features are kept."""
        key = _key(answer)
        return key in self._held or key in self._places

    def __len__(self) -> int:
        return len(self._held) + len(self._places)

    @property
    def on_disk(self) -> bool:
        """Whether there is a file."""
        return self._folder is not None

    def bytes_of(self, answer: Answer) -> int:
        """What the answer's features take here, kept already or not."""
        rows, tops = len(answer.ids) - 1, len(answer.answer_ids) - 1
        return bytes_per_answer(rows, tops, width=self.width, top_k=self.top_k)

    def get(self, answer: Answer) -> AnswerFeatures | None:
        """The answer's features; None where they are not kept."""
        key = _key(answer)
        if (place := self._places.get(key)) is None:
            return self._held.get(key)
        data = os.pread(self._file, self._nbytes(place), place.offset)
        if len(data) < self._nbytes(place):
            del self._places[key]  # the file was cut off: as good as not kept
            return None
        sizes = place.rows * self.width, place.tops * self.top_k
        features = np.frombuffer(data, np.uint16, sizes[0]).reshape(place.rows, self.width)
        ids = np.frombuffer(data, np.int32, sizes[1], features.nbytes).reshape(place.tops, self.top_k)
        logprobs = np.frombuffer(data, np.float16, sizes[1], features.nbytes + ids.nbytes)
        return AnswerFeatures(features, ids, logprobs.reshape(place.tops, self.top_k))

    def put(self, answer: Answer, features: AnswerFeatures) -> None:
        """Keep an answer's features.

        Raises:
            WriteError: the disk is full; what was kept before stays.
        """
        if self._folder is None:
            self._held[_key(answer)] = features
            return
        place = _Place(self._end, len(features.features), len(features.top_ids))
        line = json.dumps({"key": _key(answer), **place._asdict()}) + "\n"
        try:
            for part in features:
                os.pwrite(self._file, np.ascontiguousarray(part).tobytes(), self._end)
                self._end += part.nbytes
            if os.fstat(self._file).st_size < self._end:
                raise OSError(0, "the file is shorter than what was written")
            with (self._folder / _INDEX).open("a", encoding="utf-8") as index:
                index.write(line)
        except OSError as error:
            self._end = place.offset
            raise WriteError(
                f"Features cannot be kept in {self._folder}: {error.strerror}. What was kept before stays; make room "
                "and run the same command again."
            ) from error
        self._places[_key(answer)] = place

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self, folder: Path, about: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        note = folder / _ABOUT
        if note.exists():
            try:
                found = json.loads(note.read_text(encoding="utf-8"))
            except ValueError:
                raise UsageError(
                    f"{note} is broken; remove {folder}, and features are computed anew."
                ) from None
            if other := sorted(key for key in about if found.get(key) != about[key]):
                raise UsageError(
                    f"{folder} holds the features of another target or other taps ({other[0]} is "
                    f"{found.get(other[0])!r}, {about[other[0]]!r} was expected); give another folder or remove it."
                )
        else:
            note.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        self._file = os.open(folder / _ROWS, os.O_RDWR | os.O_CREAT, 0o666)
        if (folder / _INDEX).exists():
            for line in (folder / _INDEX).read_bytes().splitlines():
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            fields = json.loads(line)
            place = _Place(fields["offset"], fields["rows"], fields["tops"])
        except (ValueError, KeyError, TypeError):
            return  # cut off while it was written; its rows are written over
        self._places[fields["key"]] = place
        self._end = max(self._end, place.offset + self._nbytes(place))

    def _nbytes(self, place: _Place) -> int:
        return 2 * place.rows * self.width + 6 * place.tops * self.top_k


def bytes_per_answer(rows: int, tops: int, *, width: int, top_k: int) -> int:
    """What an answer of `rows` feature rows takes."""
    return 2 * rows * width + 6 * tops * top_k


def _key(answer: Answer) -> str:
    ids = array("q", (len(answer.prompt_ids), *answer.ids))
    return hashlib.blake2b(ids.tobytes(), digest_size=12).hexdigest()
