import json

import pytest

from dflash_mlx.errors import UsageError
from dflash_mlx.training.records import Answer, is_held_out, read_answers

ANSWERS = [Answer((1, 2), (3, 4, 5), 0.0, "code"), Answer((6,), (7,), None), Answer((6,), (8,), 0.7)]


def written(path, lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_what_is_written_is_read_again(tmp_path):
    file = written(tmp_path / "a.jsonl", [answer.line() for answer in ANSWERS])
    assert list(read_answers([file])) == ANSWERS
    assert ANSWERS[0].ids == (1, 2, 3, 4, 5)


def test_a_folder_is_read_in_the_order_of_its_files(tmp_path):
    written(tmp_path / "b.jsonl", [ANSWERS[1].line()])
    written(tmp_path / "a.jsonl", [ANSWERS[0].line(), "", ANSWERS[2].line()])
    assert list(read_answers([tmp_path])) == [ANSWERS[0], ANSWERS[2], ANSWERS[1]]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt_ids": [1], "answer_ids"', "no JSON"),
        ("[1, 2]", "object"),
        ('{"prompt_ids": [1], "answer_ids": []}', "answer_ids"),
        ('{"prompt_ids": [1, true], "answer_ids": [2]}', "prompt_ids"),
        ('{"prompt_ids": [1], "answer_ids": [-2]}', "answer_ids"),
        ('{"prompt_ids": [1], "answer_ids": [2], "temperature": "hot"}', "temperature"),
        ('{"prompt_ids": [1], "answer_ids": [2], "class": 3}', "class"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path, line, said):
    file = written(tmp_path / "answers.jsonl", [ANSWERS[0].line(), line])
    with pytest.raises(UsageError, match=rf"answers\.jsonl, line 2: .*{said}"):
        list(read_answers([file]))


def test_no_answers_and_no_file_are_one_sentence_each(tmp_path):
    with pytest.raises(UsageError, match="no answers"):
        list(read_answers([written(tmp_path / "empty.jsonl", [])]))
    with pytest.raises(UsageError, match="does not exist"):
        list(read_answers([tmp_path / "missing.jsonl"]))
    with pytest.raises(UsageError, match="no answers to read"):
        list(read_answers([]))


def test_the_line_that_is_being_written_is_left_out_where_asked(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(ANSWERS[0].line() + "\n" + ANSWERS[1].line()[:20], encoding="utf-8")
    assert list(read_answers([file], growing=True)) == ANSWERS[:1]
    with pytest.raises(UsageError, match="line 2"):
        list(read_answers([file]))


def test_one_prompt_in_fifty_is_held_out_whatever_was_answered():
    held = [is_held_out(Answer((1, n), (n,), 0.0)) for n in range(5000)]
    assert 60 < sum(held) < 140
    assert held == [is_held_out(Answer((1, n), (5,), 0.7)) for n in range(5000)]
    assert json.loads(ANSWERS[1].line()) == {"prompt_ids": [6], "answer_ids": [7], "temperature": None}
