"""Prompts from files and templates: every form that is accepted, and what is said of one that is not."""

import json
from pathlib import Path
from random import Random

import pytest

from dflash_mlx.errors import UsageError
from dflash_mlx.training.prompts import digest, read_prompts
from dflash_mlx.training.stream import Mixture, shuffled, slots
from dflash_mlx.training.templates import CLASSES, made_up


def written(folder: Path, name: str, *lines: object) -> Path:
    path = folder / name
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return path


def test_text_is_a_prompt_a_line(tmp_path: Path) -> None:
    found = read_prompts([written(tmp_path, "a.txt", "One?", "", "  Two?  ", '{"prompt": "no JSON here"}')])
    assert [p.messages[0]["content"] for p in found] == ["One?", "Two?", '{"prompt": "no JSON here"}']
    assert {p.prompt_class for p in found} == {"given"} and found[1].place.endswith("a.txt, line 3")


def test_json_lines_of_all_forms(tmp_path: Path) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "an answer of another model"},
    ]
    shared = [{"from": "human", "value": "Hey"}, {"from": "gpt", "value": None}]  # dropped, whatever it is
    path = written(
        tmp_path,
        "a.jsonl",
        '"a string"',
        {"prompt": "p", "class": "code"},
        {"instruction": "i", "input": "more", "output": "ignored"},
        {"instruction": "alone", "input": ""},
        {"question": "q", "answer": "ignored"},
        {"messages": turns, "class": "chat"},
        {"conversations": shared},
    )
    found = read_prompts([path])
    assert [p.messages[-1]["content"] for p in found] == [
        "a string",
        "p",
        "i\n\nmore",
        "alone",
        "q",
        "Who?",
        "Hey",
    ]
    assert [p.prompt_class for p in found] == ["given", "code", "given", "given", "given", "chat", "given"]
    assert [m["role"] for m in found[5].messages] == ["system", "user", "assistant", "user"]
    assert found[6].messages == ({"role": "user", "content": "Hey"},)


def test_an_array_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"prompt": "x"}, "y"], indent=1))
    assert [p.messages[0]["content"] for p in read_prompts([path])] == ["x", "y"]
    path.write_text('["x",\n"y"\n')
    with pytest.raises(UsageError, match=r"a\.json, line 3: this is no JSON"):
        read_prompts([path])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "x"', "line 2: this is no JSON"),
        ("7", "line 2: a text or an object was expected, this is a int"),
        ('{"title": "x"}', "line 2: none of messages, instruction, prompt, .* is there, only title"),
        ('{"prompt": "  "}', "line 2: prompt is '  ', a text was expected"),
        ('{"prompt": null}', "line 2: prompt is None"),
        ('{"prompt": "x", "class": 3}', "line 2: class is 3"),
        ('{"messages": []}', "line 2: messages must be a list of messages, not empty"),
        ('{"messages": [{"content": "x"}]}', "line 2: a message of messages has no role"),
        (
            '{"messages": [{"role": "assistant", "content": "x"}]}',
            "line 2: messages has no message of a user",
        ),
        ('{"messages": [{"role": "user", "content": ["x"]}]}', "line 2: the user message is"),
        (r'{"prompt": "half a smile: \ud83d"}', "line 2: prompt holds half of a character pair"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_prompts([written(tmp_path, "a.jsonl", {"prompt": "good"}, line)])


def test_files_that_give_nothing_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"There is no file .*none\.txt"):
        read_prompts([tmp_path / "none.txt"])
    with pytest.raises(UsageError, match=r"empty\.txt holds no prompts"):
        read_prompts([written(tmp_path, "full.txt", "x"), written(tmp_path, "empty.txt", "", " ")])
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_prompts([tmp_path])
    (tmp_path / "latin.txt").write_bytes("gut\nschön\n".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin\.txt, line 2: this is not UTF-8"):
        read_prompts([tmp_path / "latin.txt"])


def test_the_digest_tells_order_and_class(tmp_path: Path) -> None:
    one, two = read_prompts([written(tmp_path, "a.txt", "1", "2")])
    assert digest([one, two]) == digest([one, two]) != digest([two, one])


def test_templates_give_six_classes_and_hardly_anything_twice() -> None:
    made = [made_up(Random(f"7:{place}:words")) for place in range(2000)]
    assert {kind for _, kind in made} == set(CLASSES) and len(CLASSES) == 6
    assert len({text for text, _ in made}) > 1700
    for text, _ in made:
        assert "{" not in text and "  " not in text and "\n" not in text and text.strip() == text


def test_places_of_a_shard_are_the_same_however_one_gets_there() -> None:
    mixture = Mixture(seed=3, own_share=0.25, sampled_share=0.3, given=0)
    first, second = slots(mixture, 0, 400), slots(mixture, 1, 400)
    assert slots(mixture, 0, 800) == first + second
    assert 60 < sum(slot.source == "own" for slot in first) < 140
    assert 80 < sum(slot.sampled for slot in first) < 160
    assert slots(Mixture(seed=4, own_share=0.25, sampled_share=0.3, given=0), 0, 400) != first


def test_given_prompts_are_asked_once_each_and_then_it_ends(tmp_path: Path) -> None:
    mixture = Mixture(seed=3, own_share=0.25, sampled_share=0.3, given=100)
    places = [slot for shard in range(4) for slot in slots(mixture, shard, 40)]
    assert [slot.number for slot in places if slot.source == "given"] == list(range(100))
    assert slots(mixture, 4, 40) == [] and all(slot.source != "template" for slot in places)
    prompts = read_prompts([written(tmp_path, "a.txt", *map(str, range(100)))])
    assert shuffled(prompts, 1) != prompts and sorted(p.place for p in shuffled(prompts, 1)) == sorted(
        p.place for p in prompts
    )
