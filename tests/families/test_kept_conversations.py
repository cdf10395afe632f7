"""Several conversations kept at once, with every kind of cache: apart, in any thread, and within their memory.

Also the faults that users of other software met with conversations and memory.
"""

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from dflash_mlx import DFlashGenerator
from dflash_mlx.conversation import Conversations, common_prefix
from dflash_mlx.target import caches
from tests.families.runners import pair_of, tokenizer
from tests.families.support import first_fast
from tests.kit.families import WINDOW
from tests.kit.talk import expected_reuse
from tests.loading.checkpoints import write_draft

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.8, "top_p": 0.95, "seed": 7}
KINDS = ["qwen3_5", "gemma3_text"]
QUESTIONS = ("One thing first?", "Another.", "And this?")
LARGE = {"num_key_value_heads": 4, "head_dim": 128}  # buffers of hundreds of kilobytes
Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("draft") / "draft")


def tokens_of(chunks: Any) -> Tokens:
    return tuple(token for chunk in chunks for token in chunk.tokens)


def alone(cold: DFlashGenerator, system: str, count: int = 3) -> list[Tokens]:
    """A conversation of which nothing is kept, drafted by nothing."""
    chat = cold.chat(system, **OPTIONS)
    return [tokens_of(chat.send(said)) for said in QUESTIONS[:count]]


@pytest.mark.parametrize("name", first_fast("gemma3_text", "qwen3_5", "qwen3"))
def test_two_conversations_in_turns_say_what_they_say_alone(name: str, draft: Path) -> None:
    """They begin alike, so that the second one forks the first."""
    runner, cold = pair_of(name, draft)
    chats = [runner.chat(system, **OPTIONS) for system in ("Be brief.", "Be kind.")]
    told: list[list[Tokens]] = [[], []]
    for said in QUESTIONS:
        for chat, heard in zip(chats, told, strict=True):
            heard.append(tokens_of(chat.send(said)))
    assert told == [alone(cold, chat.system or "") for chat in chats]
    assert len(runner._kept) == 2


def in_a_thread(run: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def watched() -> None:
        try:
            run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=watched)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("name", first_fast(*KINDS, "qwen3", "falcon_h1", "llama4"))
def test_a_conversation_goes_on_in_another_thread(name: str, draft: Path, tmp_path: Path) -> None:
    """Nothing lazy is left behind: not at the end, not at a mark, not in a fork and not by a file."""
    runner, cold = pair_of(name, draft)
    expected = alone(cold, "S")
    chat = runner.chat("S", **OPTIONS)
    told: list[Tokens] = []
    for said in QUESTIONS:
        in_a_thread(lambda said=said: told.append(tokens_of(chat.send(said))))  # type: ignore[misc]
    assert told == expected
    chat.undo()
    in_a_thread(lambda: chat.save(tmp_path / "talk") and None)
    again, forked = runner.chat(**OPTIONS), runner.chat("S", **OPTIONS)
    in_a_thread(lambda: told.append(tokens_of(chat.send(QUESTIONS[2]))))
    in_a_thread(lambda: told.append(tokens_of(forked.send(QUESTIONS[0]))))
    in_a_thread(runner._kept.clear)
    in_a_thread(lambda: again.load(tmp_path / "talk") and None)
    in_a_thread(lambda: told.append(tokens_of(again.send(QUESTIONS[2]))))
    assert told[3:] == [expected[2], expected[0], expected[2]]


@pytest.mark.parametrize("name", first_fast("gemma3_text", "qwen3_5", "qwen3"))
def test_two_threads_at_once_get_the_texts_they_get_alone(name: str, draft: Path) -> None:
    runner, cold = pair_of(name, draft)
    told: dict[str, list[Tokens]] = {}

    def converse(system: str) -> None:
        chat = runner.chat(system, **OPTIONS)
        told[system] = [tokens_of(chat.send(said)) for said in QUESTIONS]

    threads = [threading.Thread(target=converse, args=(system,)) for system in ("Be brief.", "Be kind.")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == {system: alone(cold, system) for system in ("Be brief.", "Be kind.")}


@pytest.mark.parametrize("name", first_fast("qwen3_5", "gemma3_text", "qwen3", "falcon_h1"))
def test_the_bytes_counted_are_those_that_are_held(name: str, draft: Path) -> None:
    """memory: what is freed when all is forgotten; a mark holds no second copy of rows that stand by position."""
    runner, _ = pair_of(name, draft, **LARGE)
    chat = runner.chat("S", **OPTIONS)
    for said in QUESTIONS:
        list(chat.send(said))
    counted = runner._kept.nbytes
    [state] = runner._kept._states
    by_position = [layer for layer in caches.parts(state.cache) if type(layer).__name__ == "KVCache"]
    assert len(state.marks) == 2 and by_position
    arrays = 2 * len(list(caches.parts(state.cache))) * (1 + len(state.marks))
    del state, by_position
    gc.collect()
    before = mx.get_active_memory()
    runner._kept.clear()
    gc.collect()
    freed = before - mx.get_active_memory()
    # MLX may leave a slice in a buffer that is up to 16 KB larger.
    assert freed - arrays * 16384 <= counted <= 1.1 * freed


@pytest.mark.parametrize("name", first_fast("qwen3", "qwen3_5", "gemma3_text"))
def test_the_least_recently_used_leave_and_the_memory_stays_within_its_limit(name: str, draft: Path) -> None:
    """memory: however many conversations there are; one that was used stays, and the others are read again."""
    runner, cold = pair_of(name, draft)
    list(runner.chat("S 0", **OPTIONS).send(QUESTIONS[0]))
    runner._kept = Conversations(int(2.5 * runner._kept.nbytes))
    chats = [runner.chat(f"{letter} " * 9, **OPTIONS) for letter in "abc"]
    for chat in chats:
        list(chat.send(QUESTIONS[0]))
        assert runner._kept.nbytes <= runner._kept.limit
    assert len(runner._kept) == 2
    reaches = []
    for chat in chats:
        asked = [*chat._messages(chat.turns), {"role": "user", "content": QUESTIONS[1]}]
        reaches.append(expected_reuse(runner, runner._request(asked, {}).prompt))
    assert min(reaches) < 20 < 30 < sorted(reaches)[1], "all begin alike, and one of the three has left"
    assert reaches[-1] > 30, "the latest stays"
    left = reaches.index(min(reaches))
    again = list(chats[left].send(QUESTIONS[1]))
    assert again[-1].stats.reused_tokens == min(reaches)
    assert tokens_of(again) == alone(cold, chats[left].system or "", 2)[1]
    assert runner._kept.nbytes <= runner._kept.limit


@pytest.mark.parametrize("name", first_fast("qwen3_5", "gemma3_text", "qwen3"))
def test_undo_and_reset_re_use_what_is_still_true(name: str, draft: Path) -> None:
    """Each text is that of a cold run which never heard what was taken back."""
    runner, cold = pair_of(name, draft)
    chat, plain = runner.chat("S", **OPTIONS), cold.chat("S", **OPTIONS)
    for said in QUESTIONS[:2]:
        assert tokens_of(chat.send(said)) == tokens_of(plain.send(said))
    before = chat.history
    list(chat.send("Forget this."))
    assert chat.undo() == "Forget this." and chat.history == before
    answer = list(chat.send(QUESTIONS[2]))
    assert tokens_of(answer) == tokens_of(plain.send(QUESTIONS[2]))
    assert chat.history == plain.history
    stats = answer[-1].stats
    assert stats.reused_tokens > stats.prompt_tokens / 2
    chat.reset()
    once_more = list(chat.send(QUESTIONS[0]))
    assert tokens_of(once_more) == alone(cold, "S", 1)[0]
    assert name != "qwen3" or once_more[-1].stats.read_tokens == 1, "all but its last token is still held"


@pytest.mark.parametrize("name", first_fast("qwen3", "qwen3_5", "gemma3_text"))
def test_88_89_a_second_turn_reads_its_new_tokens_and_says_so(name: str, draft: Path) -> None:
    runner, _ = pair_of(name, draft)
    chat = runner.chat(**OPTIONS)
    first = list(chat.send("word " * 60))
    second = list(chat.send("And?"))
    held = first[-1].stats.prompt_tokens + first[-1].stats.new_tokens - 1
    stats = second[-1].stats
    new = stats.prompt_tokens - held
    assert first[-1].stats.reused_tokens == 0 and first[-1].stats.read_tokens > 60
    # The template takes the empty thought before the answer out of the history, so that both are read again.
    again = len(tokenizer().encode("<think>\n\n</think>\n\n")) + OPTIONS["max_new_tokens"]
    assert new <= stats.read_tokens <= new + again
    assert 0 < stats.seconds.first_token == stats.seconds.prefill


@pytest.mark.parametrize("name", first_fast(*KINDS, "qwen3"))
def test_94_a_long_and_a_short_conversation_swap_by_their_files(
    name: str, draft: Path, tmp_path: Path
) -> None:
    runner, cold = pair_of(name, draft)
    systems = {"long": "word " * 40, "short": "S"}
    told: dict[str, list[Tokens]] = {key: [] for key in systems}
    for said in QUESTIONS:
        for key, system in systems.items():
            chat = runner.chat(system, **OPTIONS)
            if told[key]:
                assert chat.load(tmp_path / key) is None
            chunks = list(chat.send(said))
            assert not told[key] or chunks[-1].stats.reused_tokens > 0
            told[key].append(tokens_of(chunks))
            chat.save(tmp_path / key)
            runner._kept.clear()
    assert told == {key: alone(cold, system) for key, system in systems.items()}


@pytest.mark.parametrize("name", first_fast("gemma3_text", "gpt_oss", "gemma4"))
def test_95_a_prompt_that_shares_only_its_beginning_with_a_wrapped_ring_is_that_of_a_cold_run(
    name: str, draft: Path
) -> None:
    runner, cold = pair_of(name, draft)
    first = [*range(20, 60)]
    assert len(first) > 2 * WINDOW
    runner.generate(first, **OPTIONS)
    other = [*first[:4], *range(80, 100)]
    assert common_prefix(first, other) == 4
    result = runner.generate(other, **OPTIONS)
    assert result.token_ids == cold.generate(other, **OPTIONS).token_ids
    assert result.stats.reused_tokens == 0 and runner.generate(first, **OPTIONS).stats.reused_tokens > 30
