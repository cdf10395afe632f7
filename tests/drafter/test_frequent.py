"""`draft_vocab.json`: what is counted, what is read again, and what is refused."""

import json

import pytest

from dflash_mlx.drafter import count_words, read_frequent, write_frequent
from dflash_mlx.errors import CheckpointError

ANSWERS = [[7, 7, 7, 2], [7, 2, 5, 1], [7, 2, 2, 3], [7, 2, 3, 9]]


def test_the_most_frequent_words_come_first_and_the_rare_are_left_out():
    words = count_words(ANSWERS, vocab_size=16)
    assert words.ids == (7, 2, 3)  # 6, 5, 2 times; 5, 1 and 9 were met once


def test_what_a_list_misses_is_told_by_answers_that_did_not_make_it():
    """The first and third make the list 7, 2, 3, 0, 1, ...; the others say 7, 2, 5, 1, 7, 2, 3, 9."""
    words = count_words(ANSWERS, vocab_size=16)
    assert words.missed == ((1, 0.75), (2, 0.5), (4, 0.375), (8, 0.125))
    assert [words.missing(n) for n in (1, 2, 4, 8, 100)] == [0.75, 0.5, 0.375, 0.125, 0.125]
    assert 0.375 < words.missing(3) < 0.5


def test_it_is_read_as_it_was_written(tmp_path):
    words = count_words(ANSWERS, vocab_size=16)
    assert write_frequent(tmp_path, words).name == "draft_vocab.json"
    assert read_frequent(tmp_path, name="toy") == words
    assert read_frequent(tmp_path / "elsewhere", name="toy") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"ids": []},
        {"ids": [3, 3]},
        {"ids": [-1]},
        {"ids": [True]},
        {"ids": [16]},
        {"vocab_size": "16"},
        {"missed": []},
        {"missed": [[2, 0.1], [1, 0.05]]},
        {"missed": [[1, 0.1], [2, 0.2]]},
        {"missed": [[1, 1.5]]},
        {"missed": [[1]]},
    ],
    ids=str,
)
def test_a_file_that_is_not_what_it_should_be_is_refused(tmp_path, changes):
    path = write_frequent(tmp_path, count_words(ANSWERS, vocab_size=16))
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=r"draft_vocab.json of toy .*emove the file"):
        read_frequent(tmp_path, name="toy")


def test_a_file_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "draft_vocab.json").write_text("[1, 2")
    with pytest.raises(CheckpointError, match="draft_vocab.json of toy cannot be read"):
        read_frequent(tmp_path, name="toy")


def test_one_answer_is_not_enough():
    with pytest.raises(ValueError, match="two answers"):
        count_words([[], [1, 2]], vocab_size=16)
