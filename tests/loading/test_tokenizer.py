"""Tokenizers: stop ids, templates, thinking, messages; whatever a tokenizer returns, ids come out."""

import json
import re

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import BatchEncoding

from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.loading.tokenizer import (
    encode_raw,
    eos_token_ids,
    generation_config,
    has_template,
    load_tokenizer,
    render,
)
from tests.kit.tokenizers import build_bpe
from tests.loading.checkpoints import write_target

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path):
    return write_target(tmp_path / "tiny")


@pytest.fixture
def tokenizer(folder):
    return load_tokenizer(folder, (7,), name="tiny")


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": [3, 4]}, (3, 4)),
        ({"eos_token_id": 7}, {}, (7,)),
        ({"text_config": {"eos_token_id": 9}}, {}, (9,)),
        ({}, {"eos_token_id": 0}, (0,)),
        ({}, {}, ()),
    ],
)
def test_what_ends_an_answer_comes_from_the_generation_config_first(config, generation, ids):
    assert eos_token_ids(config, generation) == ids


def test_the_tokenizer_s_own_end_counts_too(folder):
    own = build_bpe(vocab_size=300).eos_token_id
    assert load_tokenizer(folder, (3, 4), name="tiny").eos_token_ids == {3, 4, own}


def test_a_generation_config_that_is_broken_is_named(folder):
    assert generation_config(folder, name="tiny") == {}
    (folder / "generation_config.json").write_text('{"temperature": 0.7}')
    assert generation_config(folder, name="tiny") == {"temperature": 0.7}
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="generation_config.json of tiny is not valid JSON"):
        generation_config(folder, name="tiny")


def test_a_broken_tokenizer_is_one_sentence(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="The tokenizer of tiny") as caught:
        load_tokenizer(folder, (), name="tiny")
    assert "\n" not in str(caught.value)


def test_a_message_is_rendered_up_to_where_the_answer_begins(tokenizer):
    assert tokenizer.decode(render(tokenizer, HI)) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"


@pytest.mark.parametrize(("think", "opens"), [(True, True), (False, False), (None, False)])
def test_thinking_is_the_caller_s_or_else_the_template_s_own_default(tokenizer, think, opens):
    """The default of this template is off although the tokenizer has think tags; mlx-lm would switch it on."""
    assert tokenizer.has_thinking
    assert tokenizer.decode(render(tokenizer, HI, think=think)).endswith("<think>\n") == opens


def test_a_base_model_says_what_to_do():
    inner = build_bpe(vocab_size=300)
    inner.chat_template = None
    base = TokenizerWrapper(inner)
    assert not has_template(base)
    with pytest.raises(UsageError, match=r"looks like a base model.*raw=True \(--raw\).*instruct model"):
        render(base, HI)
    assert base.decode(encode_raw(base, "hi")) == "hi"


@pytest.mark.parametrize(
    "returned",
    [
        [5, 6],
        [[5, 6]],
        {"input_ids": [5, 6]},
        BatchEncoding({"input_ids": [5, 6], "attention_mask": [1, 1]}),
        BatchEncoding({"input_ids": [[5, 6]]}),
    ],
    ids=["list", "nested", "dict", "BatchEncoding", "nested BatchEncoding"],
)
def test_ids_come_out_whatever_a_template_returns(tokenizer, monkeypatch, returned):
    """Transformers 5 returns a dict-like object where 4 returned a list."""
    monkeypatch.setattr(type(tokenizer._tokenizer), "apply_chat_template", lambda *_, **__: returned)
    assert render(tokenizer, HI) == [5, 6]
    assert render(tokenizer, HI, think=True) == [5, 6]


def test_content_in_text_parts_is_joined(tokenizer):
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    assert render(tokenizer, parts) == render(tokenizer, HI)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "no messages"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "part of type 'image_url'",
        ),
        ([{"role": "user", "content": None}], "content of the user message is a NoneType"),
        ([{"role": "user", "content": 3}], "content of the user message is a int"),
        ([{"content": "hi"}], "a mapping with 'role' and 'content'"),
        (["hi"], "a mapping with 'role' and 'content'"),
    ],
)
def test_messages_that_cannot_be_rendered(tokenizer, messages, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        render(tokenizer, messages)


def test_roles_that_the_template_refuses_are_a_sentence(tokenizer):
    tokenizer._tokenizer.chat_template = "{{ raise_exception('Roles must alternate') }}"
    with pytest.raises(UsageError, match="chat template refuses these messages: Roles must alternate"):
        render(tokenizer, HI)


def test_special_tokens_in_a_message_are_what_the_template_makes_of_them(tokenizer):
    ids = render(tokenizer, HI)
    assert ids == tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False)


def test_a_template_in_its_own_file_is_found(folder):
    assert (folder / "chat_template.jinja").exists()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert "chat_template" not in settings
    assert has_template(load_tokenizer(folder, (), name="tiny"))
