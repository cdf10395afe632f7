"""The public surface on a tiny random pair: what people are promised of generate, stream and compare."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from dflash_mlx import DFlashError, DFlashGenerator, Result, engine
from dflash_mlx.conversation import Conversations
from dflash_mlx.core import Chunk
from dflash_mlx.errors import UsageError
from dflash_mlx.loading import render
from tests.kit.planned import PlannedDrafter
from tests.loading.checkpoints import VOCAB, write_draft, write_target

QUESTION = "Say it."
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "seed": 7}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    return write_target(root / "target", eos_token_id=None), write_draft(root / "draft")


@pytest.fixture(scope="module")
def runner(folders: tuple[Path, Path]) -> Iterator[DFlashGenerator]:
    with DFlashGenerator(*folders) as made:
        yield made


@pytest.fixture(scope="module")
def plain(runner: DFlashGenerator) -> DFlashGenerator:
    return DFlashGenerator(runner.target, mode="off")


@pytest.fixture
def plan(runner: DFlashGenerator, plain: DFlashGenerator, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace the drafter by one that is right as planned for one question and its options; gives the plain result."""

    def planned(question: Any, accepted: Sequence[int], **options: Any) -> Result:
        truth = plain.generate(question, **options)
        longer = plain.generate(question, **{**options, "stop": (), "max_new_tokens": 200})
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        ids = render(runner.target.tokenizer, messages, think=options.get("think"))
        monkeypatch.setattr(runner, "_kept", Conversations(10**9))  # of planned drafters alone
        monkeypatch.setattr(
            engine,
            "Drafter",
            lambda *_, **__: PlannedDrafter([*ids, *longer.token_ids], accepted, vocab_size=VOCAB),
        )
        return truth

    return planned


@pytest.mark.parametrize(
    "options", [{}, SAMPLED, {**SAMPLED, "repetition_penalty": 1.2}], ids=["greedy", "sampled", "penalised"]
)
@pytest.mark.parametrize("accepted", [[0], [7], [0, 3, 7, 7, 1]], ids=["never", "always", "mixed"])
def test_drafted_text_is_plain_text(
    runner: DFlashGenerator, plan: Any, options: dict[str, Any], accepted: list[int]
) -> None:
    truth = plan(QUESTION, accepted, max_new_tokens=40, **options)
    drafted = runner.generate(QUESTION, max_new_tokens=40, **options)
    assert drafted.token_ids == truth.token_ids
    assert (drafted.text, drafted.finish_reason) == (truth.text, "length")
    assert drafted.stats.accept_lengths[:4] == (accepted * 4)[:4]


def test_a_stream_joins_to_the_whole(runner: DFlashGenerator, plan: Any) -> None:
    plan(QUESTION, [2, 7, 0], max_new_tokens=50, **SAMPLED)
    whole = runner.generate(QUESTION, max_new_tokens=50, **SAMPLED)
    chunks = list(runner.stream(QUESTION, max_new_tokens=50, **SAMPLED))
    assert "".join(c.text for c in chunks if c.kind == "answer") == whole.text == str(whole)
    assert tuple(t for c in chunks for t in c.tokens) == whole.token_ids
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert whole.text == runner.target.tokenizer.decode(list(whole.token_ids), skip_special_tokens=True)


def test_totals_add_up(runner: DFlashGenerator, plan: Any) -> None:
    plan(QUESTION, [3, 0, 7], max_new_tokens=38)
    stats = runner.generate(QUESTION, max_new_tokens=38, profile=True).stats
    cut_off = stats.accepted + stats.rounds - (stats.new_tokens - 1)
    assert stats.new_tokens == 38 and cut_off in (0, 1)
    assert stats.accepted == sum(stats.accept_lengths) and len(stats.accept_lengths) == stats.rounds
    assert stats.tokens_per_round == 37 / stats.rounds
    assert 0 < stats.acceptance_rate < 1
    seconds = stats.seconds
    assert seconds.draft + seconds.verify + seconds.other == pytest.approx(seconds.decode)
    assert min(seconds.load, seconds.prefill, seconds.draft, seconds.verify) > 0
    assert stats.weights_gb > 0 and stats.peak_memory_gb > 0


@pytest.mark.parametrize("accepted", [[0], [7], [1, 4]])
def test_a_stop_string_ends_the_text_before_it(
    runner: DFlashGenerator, plain: DFlashGenerator, plan: Any, accepted: list[int]
) -> None:
    text = plain.generate(QUESTION, max_new_tokens=60, **SAMPLED).text
    stop = text[20:23]
    truth = plan(QUESTION, accepted, max_new_tokens=60, stop=stop, **SAMPLED)
    drafted = runner.generate(QUESTION, max_new_tokens=60, stop=[stop, "never said"], **SAMPLED)
    assert drafted.text == truth.text == text[: text.index(stop)]
    assert drafted.finish_reason == "stop"
    assert drafted.token_ids == truth.token_ids, "the token that completes the stop string is kept"


def test_a_stop_id_ends_the_text_and_is_not_in_it(
    folders: tuple[Path, Path], runner: DFlashGenerator, tmp_path: Path
) -> None:
    """The id is read from the checkpoint, wherever it is; no id is built in."""
    ids = runner.generate(QUESTION, max_new_tokens=60).token_ids
    stop = ids[10]
    target = write_target(tmp_path / "target", eos_token_id=[stop, VOCAB - 2])
    with DFlashGenerator(target, folders[1]) as made:
        result = made.generate(QUESTION, max_new_tokens=60)
    assert result.token_ids == ids[: ids.index(stop) + 1]
    assert result.finish_reason == "stop"
    assert result.text == made_text(runner, ids[: ids.index(stop)])


def made_text(runner: DFlashGenerator, ids: Sequence[int]) -> str:
    return runner.target.tokenizer.decode(list(ids), skip_special_tokens=True)


def test_thoughts_are_apart_and_the_opening_tag_may_be_in_the_prompt(
    runner: DFlashGenerator, plain: DFlashGenerator, plan: Any
) -> None:
    truth = plan(QUESTION, [7, 0], think=True, max_new_tokens=40, **SAMPLED)
    result = runner.generate(QUESTION, think=True, max_new_tokens=40, **SAMPLED)
    assert result.token_ids == truth.token_ids
    assert result.thinking and not result.text, "the thought never ends, so there is no answer"
    without = plain.generate(QUESTION, think=False, max_new_tokens=8)
    assert without.text and not without.thinking


def test_same_request_same_text_and_the_seed_is_reported(runner: DFlashGenerator) -> None:
    first = runner.generate(QUESTION, temperature=0.9, max_new_tokens=20)
    again = [
        runner.generate(QUESTION, temperature=0.9, max_new_tokens=20, seed=first.stats.seed) for _ in range(2)
    ]
    assert [r.token_ids for r in again] == [first.token_ids] * 2
    assert runner.generate(QUESTION, temperature=0.9, max_new_tokens=20, seed=8).token_ids != first.token_ids


def test_prompts_are_text_messages_or_ids(runner: DFlashGenerator) -> None:
    text = runner.generate(QUESTION, max_new_tokens=6)
    messages = runner.generate([{"role": "user", "content": QUESTION}], max_new_tokens=6)
    ids = render(runner.target.tokenizer, [{"role": "user", "content": QUESTION}])
    assert text.token_ids == messages.token_ids == runner.generate(ids, max_new_tokens=6).token_ids
    raw = runner.generate(QUESTION, raw=True, max_new_tokens=6)
    assert raw.stats.prompt_tokens < text.stats.prompt_tokens
    system = runner.generate(QUESTION, system="Be brief.", max_new_tokens=6)
    assert system.stats.prompt_tokens > text.stats.prompt_tokens


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("", {}, "prompt is empty"),
        ("  \n", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        (7, {}, "is a int"),
        ([1, "a"], {}, "neither messages"),
        ([5, VOCAB], {}, f"token id {VOCAB}"),
        ([5, -1], {}, "token id -1"),
        (QUESTION, {"max_new_tokens": 0}, "max_new_tokens is 0"),
        (QUESTION, {"max_new_tokens": -3}, "max_new_tokens is -3"),
        (QUESTION, {"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        (QUESTION, {"temperature": -0.1}, "temperature is -0.1"),
        (QUESTION, {"temperature": "hot"}, "temperature is 'hot'"),
        (QUESTION, {"temperature": float("nan")}, "temperature is nan"),
        (QUESTION, {"top_p": 0}, "top_p is 0"),
        (QUESTION, {"top_p": 1.5}, "top_p is 1.5"),
        (QUESTION, {"top_k": -1}, "top_k is -1"),
        (QUESTION, {"min_p": 2}, "min_p is 2"),
        (QUESTION, {"stop": ""}, "stop string is empty"),
        (QUESTION, {"raw": True, "system": "x"}, "system"),
        ([5, 6], {"system": "x"}, "system"),
        (list(range(9)) * 60, {}, "540 tokens"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused_at_the_call(
    runner: DFlashGenerator, prompt: Any, options: dict[str, Any], words: str
) -> None:
    """One sentence, before any model work and before the first chunk is asked for."""
    with pytest.raises(UsageError, match=words) as caught:
        runner.stream(prompt, **options)
    assert "\n" not in str(caught.value)


def test_an_unknown_option_is_a_type_error(runner: DFlashGenerator) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        runner.stream(QUESTION, max_tokens=5)
    with pytest.raises(TypeError):
        DFlashGenerator(draft="x")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"mode": "off", "draft_bits": 4}, "draft_bits would be ignored"),
        ({"mode": "off", "block_size": 4}, "block_size would be ignored"),
        ({"draft_bits": 3}, "draft_bits"),
        ({"dtype": "int4"}, "dtype is 'int4'"),
        ({"block_size": 0}, "block_size 0"),
        ({"block_size": 1}, "block_size 1"),
        ({"block_size": 9}, "block_size 9"),
    ],
)  # fmt: skip
def test_bad_construction_is_refused(folders: tuple[Path, Path], options: dict[str, Any], words: str) -> None:
    draft = None if options.get("mode") == "off" else folders[1]
    with pytest.raises(UsageError, match=words):
        DFlashGenerator(folders[0], draft, **options)


def test_the_context_limit_shortens_the_answer_and_says_so(runner: DFlashGenerator) -> None:
    prompt = [5, 9, 11] * 168  # 504 of 512
    result = runner.generate(prompt, max_new_tokens=100)
    assert (len(result.token_ids), result.finish_reason) == (8, "length")
    assert any("512" in note for note in result.stats.notes)


def test_auto_without_a_known_drafter_decodes_plainly_and_says_so(folders: tuple[Path, Path]) -> None:
    with DFlashGenerator(folders[0]) as made:
        result = made.generate(QUESTION, max_new_tokens=5)
    assert made_notes(result, "No drafter is known")
    assert result.stats.draft is None and result.stats.verified == 0
    with pytest.raises(DFlashError, match="No drafter is known"):
        DFlashGenerator(folders[0], mode="on")


def made_notes(result: Result, words: str) -> bool:
    return any(words in note for note in result.stats.notes)


def test_an_error_inside_reaches_the_caller_and_the_next_request_works(runner: DFlashGenerator) -> None:
    calls = []

    def breaks(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append(1)
        if len(calls) > 12:
            raise RuntimeError("inside")
        return logits

    with pytest.raises(RuntimeError, match="inside"):
        runner.generate(QUESTION, max_new_tokens=30, logits_processors=[breaks])
    assert runner.generate(QUESTION, max_new_tokens=5).stats.new_tokens == 5


def test_interleaved_and_abandoned_streams_do_not_disturb_each_other(
    runner: DFlashGenerator, plain: DFlashGenerator
) -> None:
    alone = [runner.generate(q, max_new_tokens=20, **SAMPLED).token_ids for q in ("One", "Two")]
    streams = [
        runner.stream("One", max_new_tokens=20, **SAMPLED),
        plain.stream("Two", max_new_tokens=20, **SAMPLED),
    ]
    left = runner.stream("Three")
    next(left)
    got: list[list[int]] = [[], []]
    for _ in range(30):
        for stream, tokens in zip(streams, got, strict=True):
            tokens.extend(next(stream, NOTHING).tokens)
    left.close()
    assert [tuple(tokens) for tokens in got] == alone


NOTHING = Chunk("", "answer", (), None, None)  # type: ignore[arg-type]


def test_a_generator_made_in_one_thread_works_in_another(folders: tuple[Path, Path]) -> None:
    """A lazy array left over from loading could not be evaluated there."""
    made = DFlashGenerator(*folders)
    here = made.generate(QUESTION, max_new_tokens=12).token_ids
    there: list[tuple[int, ...]] = []
    stream = made.stream(QUESTION, max_new_tokens=12)
    begun = list(next(stream).tokens)

    def work() -> None:
        there.append(made.generate(QUESTION, max_new_tokens=12).token_ids)
        there.append(tuple(begun + [t for chunk in stream for t in chunk.tokens]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert there == [here, here]


def test_compare_runs_mlx_lm_beside_the_drafter(runner: DFlashGenerator, plan: Any) -> None:
    plan(QUESTION, [4, 0], max_new_tokens=30, **SAMPLED)
    comparison = runner.compare(QUESTION, max_new_tokens=30, **SAMPLED)
    assert comparison.identical and comparison.first_difference is None
    assert comparison.plain.text == comparison.drafted.text
    assert comparison.plain.stats.draft is None and comparison.plain.stats.rounds == 29
    assert comparison.speedup > 0


def test_compare_reports_where_texts_part_and_by_how_much(
    runner: DFlashGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = runner.target.model.verify
    calls = []

    def wrong_after_a_while(ids: mx.array, *args: Any) -> Any:
        verified = honest(ids, *args)
        calls.append(1)
        return verified._replace(logits=-verified.logits) if len(calls) == 6 else verified

    monkeypatch.setattr(runner.target.model, "verify", wrong_after_a_while)
    difference = runner.compare(QUESTION, max_new_tokens=30).first_difference
    assert difference is not None and difference.index < 30
    assert difference.plain != difference.drafted
    assert difference.logit_gap is not None and difference.logit_gap > 0


def test_comparing_without_a_drafter_is_refused(plain: DFlashGenerator) -> None:
    with pytest.raises(UsageError, match="no drafter"):
        plain.compare(QUESTION)


def test_a_closed_generator_says_so(folders: tuple[Path, Path]) -> None:
    with DFlashGenerator(folders[0], mode="off") as made:
        pass
    with pytest.raises(UsageError, match="closed"):
        made.generate(QUESTION)


@pytest.mark.parametrize("draft_bits", [4, 8, None])
def test_draft_bits_change_speed_and_not_text(
    folders: tuple[Path, Path], runner: DFlashGenerator, draft_bits: int | None
) -> None:
    with DFlashGenerator(runner.target, folders[1], draft_bits=draft_bits) as made:
        assert (
            made.generate(QUESTION, max_new_tokens=16).token_ids
            == runner.generate(QUESTION, max_new_tokens=16).token_ids
        )


@pytest.mark.parametrize("block_size", [2, 5, 8])
def test_the_block_size_asked_for_is_the_one_used(
    folders: tuple[Path, Path], runner: DFlashGenerator, block_size: int
) -> None:
    with DFlashGenerator(runner.target, folders[1], block_size=block_size) as made:
        result = made.generate(QUESTION, max_new_tokens=16)
    assert result.stats.block_size == block_size
    assert result.stats.verified <= (block_size - 1) * result.stats.rounds
    assert result.token_ids == runner.generate(QUESTION, max_new_tokens=16).token_ids


def test_notes_and_names_say_what_ran(runner: DFlashGenerator, folders: tuple[Path, Path]) -> None:
    stats = runner.generate(QUESTION, max_new_tokens=2).stats
    assert (stats.target, stats.draft) == (runner.target_name, runner.draft_name)
    assert str(folders[0].name) in stats.target and str(folders[1].name) in str(stats.draft)
    assert (stats.dtype, stats.device, stats.block_size) == ("float32", "cpu", 8)
