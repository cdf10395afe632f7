"""Whole conversations with targets whose caches cannot be cut: every turn is that of a cold run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings

from dflash_mlx import DFlashGenerator
from dflash_mlx.conversation import common_prefix
from tests.families.runners import pair_of, tokenizer
from tests.kit.families import FAMILIES
from tests.kit.talk import ENDINGS, TURNS, talk_through
from tests.loading.checkpoints import write_draft

SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
KINDS = ["qwen3_5", "gemma3_text"]  # recurrent beside attention; a sliding window beside attention
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
Pair = tuple[DFlashGenerator, DFlashGenerator]


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    return {
        "whole": write_draft(root / "whole"),
        "windowed": write_draft(root / "windowed", **WINDOWED),
    }


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, drafts: dict[str, Path]) -> Iterator[Pair]:
    yield pair_of(request.param, drafts["whole"])


def _settings(examples: int) -> settings:
    return settings(max_examples=examples, suppress_health_check=list(HealthCheck))


def test_every_ending_leaves_what_a_next_turn_can_use(pair: Pair) -> None:
    """And every turn, on planned acceptance, is that of a cold run that reads from the last mark on."""
    turns = [([3, 0, 7], ending, 4, i % 3, [50 + i, 60]) for i, ending in enumerate(ENDINGS)]
    talk_through(*pair, SAMPLED, turns)


@pytest.mark.slow
@given(turns=TURNS)
@_settings(80)
def test_every_turn_is_that_of_a_cold_run_and_reads_from_the_last_mark_on(pair: Pair, turns: Any) -> None:
    talk_through(*pair, SAMPLED, turns)


class Thinking:
    """Lets an answer begin with a thought of three tokens."""

    def __init__(self, prompt: int):
        opens, closes = (tokenizer().convert_tokens_to_ids(tag) for tag in ("<think>", "</think>"))
        self._forced = {prompt: opens, prompt + 4: closes}

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        forced = self._forced.get(tokens.shape[0])
        if forced is None:
            return logits
        return mx.where(mx.arange(logits.shape[-1])[None] == forced, 1e6, logits)


@pytest.mark.parametrize("think", [True, False])
@pytest.mark.parametrize("name", [*KINDS, "qwen3"])
def test_a_template_that_takes_thoughts_out_of_the_history_costs_one_answer_to_read_again(
    name: str, think: bool, drafts: dict[str, Path]
) -> None:
    """As Qwen's, whose prompts without a thought end with an empty one."""
    runner, cold = pair_of(name, drafts["whole"])
    chat = runner.chat(think=think, max_new_tokens=7, **SAMPLED)
    held: tuple[int, ...] = ()
    settled = 0
    for said in ("One thing first?", "Another.", "And this?"):
        asked = [*chat._messages(chat.turns), {"role": "user", "content": said}]
        request = runner._request(asked, {"think": think})
        processors = [Thinking(len(request.prompt))] if think else []
        chunks = list(chat.send(said, logits_processors=processors))
        told = tuple(token for chunk in chunks for token in chunk.tokens)
        truth = cold.generate(request.prompt, max_new_tokens=7, logits_processors=processors, **SAMPLED)
        assert told == truth.token_ids
        assert (tokenizer().convert_tokens_to_ids("</think>") in told) == think
        shared = common_prefix(held, request.prompt)
        stats = chunks[-1].stats
        assert stats.reused_tokens == (shared if name == "qwen3" else settled), said
        assert settled <= shared <= settled + 1, "the history leaves out what the answer began with"
        assert stats.read_tokens == len(request.prompt) - stats.reused_tokens
        held, settled = (*request.prompt, *told[:-1]), request.settled
    assert settled > 30


def goes_on(runner: DFlashGenerator, said: str, chat: Any) -> tuple[tuple[int, ...], int, list[int]]:
    chunks = list(chat.send(said))
    stats = chunks[-1].stats
    return tuple(t for c in chunks for t in c.tokens), stats.reused_tokens, stats.accept_lengths


@pytest.mark.parametrize(
    ("name", "draft", "changes"),
    [
        ("qwen3_5", "windowed", {}),
        ("gemma3_text", "whole", {}),
        ("qwen3", "windowed", {"kv_bits": 8, "head_dim": 32}),
        pytest.param("falcon_h1", "whole", {}, marks=pytest.mark.slow),
        pytest.param("llama4", "whole", {}, marks=pytest.mark.slow),
        pytest.param("qwen3_5", "whole", {"kv_bits": 4, "head_dim": 32}, marks=pytest.mark.slow),
        *(
            pytest.param(name, "windowed", {}, marks=pytest.mark.slow)
            for name in sorted(set(FAMILIES) - {"qwen3_5", "gemma3_text", "falcon_h1", "llama4"})
        ),
    ],
)
def test_a_saved_conversation_goes_on_as_if_it_had_not_been_saved(
    name: str, draft: str, changes: dict[str, Any], drafts: dict[str, Path], tmp_path: Path
) -> None:
    """Onwards from its end, from the mark of the last turn as a rewritten history asks for, and after an undo."""
    runner, cold = pair_of(name, drafts[draft], **changes)
    options = {"max_new_tokens": 6, **SAMPLED}
    for think in (True, False):
        chat = runner.chat(think=think, **options)
        for said in ("One thing first?", "Another."):
            list(chat.send(said))
        path = chat.save(tmp_path / "talk")
        expected = goes_on(runner, "And this?", chat)
        runner._kept.clear()
        again = runner.chat(think=think, **options)
        assert again.load(path) is None and again.history == chat.history[:4]
        assert goes_on(runner, "And this?", again) == expected
        prompt = runner._request([*chat._messages(chat.turns)[:-1]], {"think": think}).prompt
        assert expected[0] == cold.generate(prompt, **options).token_ids
        assert expected[1] > len(prompt) // 2, "what was held is not read again"
        undone = []
        for loads in (False, True):
            runner._kept.clear()
            one = runner.chat(think=think, **options)
            for said in ("One thing first?", "Another."):
                list(one.send(said))
            if loads:
                runner._kept.clear()
                assert one.load(path) is None
            one.undo()
            undone.append(goes_on(runner, "Something else?", one))
        assert undone[0] == undone[1] and undone[0][1] > 20, "back to the first turn, by the file too"
        runner._kept.clear()
