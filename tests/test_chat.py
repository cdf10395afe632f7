"""`runner.chat()`: what people are promised of a conversation."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from dflash_mlx import DFlashGenerator
from dflash_mlx.conversation import common_prefix
from dflash_mlx.errors import UsageError
from dflash_mlx.loading import answer_ids, render, render_history
from tests.kit.tokenizers import ByteTokenizer
from tests.loading.checkpoints import write_draft, write_target

OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.8, "seed": 3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    return write_target(root / "target", eos_token_id=None), write_draft(root / "draft")


@pytest.fixture(scope="module")
def runner(folders: tuple[Path, Path]) -> Iterator[DFlashGenerator]:
    with DFlashGenerator(*folders) as made:
        yield made


def said(chunks: Any) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_a_next_turn_reads_only_what_is_new(runner: DFlashGenerator) -> None:
    """The answer stands in the prompt with the ids it was emitted with, so nothing of it is read again."""
    chat = runner.chat("Be brief.", **OPTIONS)
    first, second, third = (list(chat.send(text)) for text in ("One?", "Two?", "Three?"))
    for before, after in ((first, second), (second, third)):
        held = before[-1].stats.prompt_tokens + before[-1].stats.new_tokens - 1
        assert after[-1].stats.reused_tokens == held
    assert [message["role"] for message in chat.history] == ["system"] + ["user", "assistant"] * 3
    assert chat.history[2]["content"] == said(first)


def test_a_turn_left_in_the_middle_keeps_what_was_given(runner: DFlashGenerator) -> None:
    chat = runner.chat(**OPTIONS)
    stream = chat.send("One?")
    given = next(stream).text + next(stream).text
    stream.close()  # type: ignore[attr-defined]
    assert chat.history[1]["content"] == given
    again = list(chat.send("Two?"))
    assert again[0].stats.reused_tokens > 0


def test_undo_forgets_one_turn_and_reset_all(runner: DFlashGenerator) -> None:
    chat = runner.chat("S", **OPTIONS)
    once = said(chat.send("One?"))
    second = said(chat.send("Two?"))
    assert chat.undo() == "Two?" and len(chat.history) == 3
    assert said(chat.send("Two?")) == second, "as if it had not been asked before"
    chat.reset()
    assert chat.history == [{"role": "system", "content": "S"}] and chat.undo() is None
    assert said(chat.send("One?")) == once


def test_a_turn_that_fails_is_forgotten_and_bad_options_are_refused_at_once(runner: DFlashGenerator) -> None:
    chat = runner.chat(**OPTIONS)
    with pytest.raises(UsageError, match="prompt is empty|tokens"):
        chat.send("x" * 3000)
    with pytest.raises(UsageError, match="top_p"):
        chat.send("x", top_p=7)
    with pytest.raises(TypeError, match="top_q"):
        runner.chat(top_q=1)
    assert chat.history == []


def test_a_saved_conversation_goes_on_where_it_was(runner: DFlashGenerator, tmp_path: Path) -> None:
    runner._kept.clear()
    chat = runner.chat("S", **OPTIONS)
    list(chat.send("One?"))
    path = chat.save(tmp_path / "talk")
    assert path == tmp_path / "talk.safetensors" and path.stat().st_mode & 0o777 == 0o600
    expected = list(chat.send("Two?"))
    runner._kept.clear()
    other = runner.chat(**OPTIONS)
    assert other.load(tmp_path / "talk") is None
    assert other.history == chat.history[:3] and other.system == "S"
    got = list(other.send("Two?"))
    assert said(got) == said(expected)
    assert got[-1].stats.reused_tokens == expected[-1].stats.reused_tokens > 0
    assert got[-1].stats.accept_lengths == expected[-1].stats.accept_lengths


def test_a_file_holds_nothing_of_another_conversation(runner: DFlashGenerator, tmp_path: Path) -> None:
    """Which began alike and is the only one kept."""
    runner._kept.clear()
    chat, other = runner.chat("S", **OPTIONS), runner.chat("S", **OPTIONS)
    list(chat.send("One?"))
    mine = runner._kept._states[0].ids
    runner._kept.clear()
    list(other.send("My secret?"))
    kept = runner._kept._states[0].ids
    arrays: Any = mx.load(str(chat.save(tmp_path / "talk")))
    ids = arrays["ids"].tolist()
    assert ids == list(kept[: len(ids)]) and common_prefix(ids, mine) == len(ids) < len(kept)
    assert {a.shape[2] for name, a in arrays.items() if name[0] == "c"} == {len(ids)}
    assert runner._kept._states[0].ids == kept, "and it stays as it was"


@pytest.fixture
def written(runner: DFlashGenerator, tmp_path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """Arrays and header of a conversation of one turn."""
    chat = runner.chat(**OPTIONS)
    list(chat.send("One?"))
    found: Any = mx.load(str(chat.save(tmp_path / "talk")), return_metadata=True)
    mx.eval(found[0])
    runner._kept.clear()
    return found


@pytest.mark.parametrize(
    ("changed", "said_so"),
    [
        ({"target": "Other-8B"}, "is of Other-8B, and this is target"),
        ({"draft": None}, "is of the drafter none, and this one is draft"),
        ({"weights": 7}, "is of models of 7 bytes"),
        ({"dtype": "float16"}, "was computed in float16, and this is float32"),
        ({"kv_bits": 4}, "has kv_bits 4, and these are none"),
        ({"draft_window": 64}, "has draft_window 64, and this is none"),
        ({"versions": "mlx 9"}, "was written with mlx 9, and these are dflash-mlx"),
        ({}, "does not hold what such a pair keeps"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_in_a_sentence_and_the_messages_are_read_again(
    runner: DFlashGenerator, tmp_path: Path, written: Any, changed: dict[str, Any], said_so: str
) -> None:
    arrays, header = written
    holder = {**json.loads(header["holder"]), **changed}
    if not changed:
        arrays = {name: array for name, array in arrays.items() if "cache.3" not in name}
    mx.save_safetensors(str(tmp_path / "other"), arrays, {**header, "holder": json.dumps(holder)})
    chat = runner.chat(**OPTIONS)
    note = chat.load(tmp_path / "other")
    assert note and said_so in note and note.endswith("are taken up, and read again with the next one.")
    assert len(chat.history) == 2 and len(runner._kept) == 0
    assert ("target" in changed) == (chat.turns[0].ids is None), "ids of another tokenizer mean nothing"
    assert next(chat.send("Two?")).stats.reused_tokens == 0


def test_a_file_that_is_no_conversation_is_refused_in_a_sentence(
    runner: DFlashGenerator, tmp_path: Path, written: Any
) -> None:
    arrays, header = written
    for name, changed in {
        "a later format": {**header, "format": "dflash-mlx conversation 9"},
        "no header": {},
    }.items():
        mx.save_safetensors(str(tmp_path / name), arrays, changed)
    (tmp_path / "torn.safetensors").write_bytes((tmp_path / "talk.safetensors").read_bytes()[:1000])
    chat = runner.chat(**OPTIONS)
    list(chat.send("One?"))
    for name, said_so in (
        ("a later format", "no conversation of this version"),
        ("no header", "no conversation of this version"),
        ("torn", "cannot be read"),
        ("nowhere", "no file"),
    ):
        with pytest.raises(UsageError, match=said_so):
            chat.load(tmp_path / name)
    assert len(chat.history) == 2, "as it was"


def test_answers_keep_ids_that_their_text_would_not_give() -> None:
    """Emitted as "a" and "b", though the tokenizer knows "ab" as one token."""
    tokenizer: Any = ByteTokenizer([b"ab"])
    messages = [
        {"role": "user", "content": "\ue000?"},
        {"role": "assistant", "content": "ab", "token_ids": (97, 98)},
        {"role": "user", "content": "ab"},
    ]
    plain = [{name: value for name, value in m.items() if name != "token_ids"} for m in messages]
    tokenizer._tokenizer, tokenizer._chat_template = tokenizer, None
    ids, canonical = render_history(tokenizer, messages), render(tokenizer, plain)
    at = canonical.index(256)
    assert ids[at : at + 2] == [97, 98] and [*ids[:at], 256, *ids[at + 2 :]] == canonical
    assert render_history(tokenizer, plain) == canonical


@pytest.mark.parametrize(
    ("emitted", "text", "kept"),
    [
        ([97, 98, 258], "ab", [97, 98]),  # a stop id
        ([97, 98], "ab", [97, 98]),
        ([97, 98, 99, 100], "ab", [97, 98]),  # a stop string, "cd"
        ([97, 256, 99], "aa", [97, 97]),  # it begins inside a token
        ([104, 261, 10, 97, 98, 258], "ab", [97, 98]),  # a thought before
        ([104, 261, 97], "a", [97]),
        ([104, 260, 104], "", []),  # nothing but a thought
        ([], "", []),
    ],
)
def test_the_ids_of_an_answer(emitted: list[int], text: str, kept: list[int]) -> None:
    tokenizer: Any = ByteTokenizer([b"ab"])
    tokenizer.think_end_tokens = [261]
    assert answer_ids(tokenizer, emitted, text, (258,)) == tuple(kept)
