"""What is asked: built-in questions and text that fills a context."""

from itertools import islice

import pytest

from dflash_mlx.bench.filler import filled, sentences
from dflash_mlx.bench.prompts import CLASSES, MOST, check_classes, questions
from dflash_mlx.errors import UsageError


def test_there_are_questions_of_six_classes_and_none_twice():
    assert list(CLASSES) == ["code", "maths", "prose", "chat", "structured", "language"]
    texts = [text for kind in CLASSES for text in CLASSES[kind]]
    assert {len(texts) for texts in CLASSES.values()} == {MOST} and len(set(texts)) == len(texts)


def test_the_first_questions_of_each_class():
    found = questions(["prose", "code"], 2)
    assert [q.kind for q in found] == ["prose", "prose", "code", "code"]
    assert [q.text for q in found] == [*CLASSES["prose"][:2], *CLASSES["code"][:2]]


def test_an_unknown_class_is_named_with_those_that_there_are():
    with pytest.raises(UsageError, match="'poetry' is no class of prompts; they are code, maths"):
        check_classes(["code", "poetry"])


def test_no_sentence_comes_twice_and_no_phrase_repeats_at_once():
    found = list(islice(sentences(), 3000))
    bodies = [text.partition(": ")[2] for text in found]
    assert len(set(bodies)) == len(bodies)
    assert all(len(set(a.split()) & set(b.split())) < 8 for a, b in zip(bodies, bodies[1:], strict=False))


@pytest.mark.parametrize("tokens", [300, 1000, 5000])
def test_a_filled_prompt_is_nearly_as_long_as_asked_and_never_longer(tokens):
    made = filled("What now?", tokens, len)
    assert tokens - 120 < len(made) <= tokens and made.endswith("What now?")
    assert filled("What now?", tokens, len) == made


def test_without_room_for_notes_the_question_stands_alone():
    assert filled("What now?", 20, len) == "What now?"
