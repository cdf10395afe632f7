"""Text as it streams is the text of all tokens decoded at once, cut where it should end."""

import functools
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.detokenizer import MAX_OPEN
from dflash_mlx.errors import UsageError
from dflash_mlx.text import Transcript, check_stop_strings
from tests.kit.tokenizers import (
    REPLACEMENT,
    TAGS,
    ByteTokenizer,
    FallbackTokenizer,
    build_bpe,
    build_fallback,
)

PIECES = ("▁the", "▁an", "lo", "▁▁", "STOP", "</thi", "nk>")
FIRST, REST = "日".encode()[:1], "日".encode()[1:]
WORDS = ("é".encode() + FIRST, REST, b" the", b"ST", b"OP\n", b"</thi", b"nk>\n\n")
SAMPLES = ["The quick brown fox, the lazy dog . STOP", "日本語のテキスト 🙂 é"]
PLAIN_TAGS = ("<reason>", "</reason>")


@functools.cache
def tokenizer(name: str) -> Any:
    return {
        "bytes": lambda: ByteTokenizer(WORDS),
        "renumbered": lambda: ByteTokenizer(WORDS, specials_first=True),
        "special tags": lambda: ByteTokenizer(WORDS, special_tags=True),
        "fallback": lambda: FallbackTokenizer(PIECES),
        "real bpe": lambda: build_bpe(SAMPLES),
        "real fallback": lambda: build_fallback(PIECES),
    }[name]()


NAMES = ("bytes", "renumbered", "special tags", "fallback", "real bpe", "real fallback")
every_tokenizer = pytest.mark.parametrize("name", NAMES)


class Outcome(NamedTuple):
    answer: str
    thought: str
    kept: int
    reason: str | None


def rounds(tokens: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    rest = list(tokens)
    for size in cycle(sizes):
        if not rest:
            return
        yield rest[:size]
        rest = rest[size:]


def transcript(tok: Any, **options: Any) -> Transcript:
    options = {"stop_ids": {tok.eos_token_id}, "max_new_tokens": 10_000, **options}
    return Transcript(tok, **options)


def stream(tok: Any, tokens: Sequence[int], sizes: Sequence[int] = (3,), **options: Any) -> Outcome:
    """Feed rounds as the loop does and drain after each; pieces, totals and cuts must agree."""
    made = transcript(tok, **options)
    got = {"answer": "", "thought": ""}
    kept = 0

    def drain() -> None:
        pieces = made.pieces()
        assert all(piece.text for piece in pieces)
        assert all(a.kind != b.kind for a, b in zip(pieces, pieces[1:], strict=False))
        for piece in pieces:
            got[piece.kind] += piece.text
        assert (made.text, made.thinking) == (got["answer"], got["thought"])

    for block in rounds(tokens, sizes):
        cut = made.cut(block)
        assert cut.keep <= len(block)
        kept += cut.keep
        drain()
        if cut.finish_reason is not None:
            break
    made.finish()
    drain()
    assert made.tokens == list(tokens[:kept])
    return Outcome(got["answer"], got["thought"], kept, made.finish_reason)


class Oracle:
    """The same by brute force: after each token, everything is decoded anew and read letter by letter."""

    def __init__(self, tok, *, stop_strings=(), think_tags=None, inside_thought=False, keep_special=False):
        self.tok, self.stops, self.keep_special = tok, stop_strings, keep_special
        self.start = "thought" if inside_thought else "answer"
        self.tag_ids, self.tag_texts = {}, {}
        for tag, kind in zip(think_tags or (), ("thought", "answer"), strict=False):
            token = tok.convert_tokens_to_ids(tag)
            (self.tag_texts if token is None else self.tag_ids)[tag if token is None else token] = kind

    def run(self, tokens, stop_ids, budget) -> Outcome:
        answer = thought = ""
        for kept in range(1, min(len(tokens), budget) + 1):
            ends = tokens[kept - 1] in stop_ids
            answer, thought, stopped = self.read(tokens[: kept - (ends and not self.keep_special)])
            if ends or stopped:
                return Outcome(answer, thought, kept, "stop")
            if kept == budget:
                return Outcome(answer, thought, kept, "length")
        return Outcome(answer, thought, len(tokens), None)

    def read(self, tokens) -> tuple[str, str, bool]:
        text, kind, fresh = {"answer": "", "thought": ""}, self.start, self.start == "thought"
        segment = ""
        for event in self.events(tokens):
            if len(event) > 1:  # a tag that is a token
                text[kind] += segment
                segment, kind, fresh = "", event, True
                continue
            if fresh and event == "\n":
                continue
            fresh = False
            segment += event
            needles = [*self.tag_texts, *(self.stops if kind == "answer" else ())]
            match = max((n for n in needles if segment.endswith(n)), key=len, default=None)
            if match is not None:
                text[kind] += segment[: -len(match)]
                if match not in self.tag_texts:
                    return text["answer"], text["thought"], True
                segment, kind, fresh = "", self.tag_texts[match], True
        text[kind] += segment
        return text["answer"], text["thought"], False

    def events(self, tokens) -> Iterator[str]:
        added = self.tok.added_tokens_decoder
        hidden = {i for i in added if added[i].special} - set(self.tag_ids)
        seen = [t for t in tokens if self.keep_special or t not in hidden]
        begin = 0
        for at, token in [*((i, t) for i, t in enumerate(seen) if t in self.tag_ids), (len(seen), None)]:
            yield from self.decode(seen[:at])[len(self.decode(seen[:begin])) :]
            if token is not None:
                yield self.tag_ids[token]
            begin = at + 1

    def decode(self, ids) -> str:
        return self.tok.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


FRAGMENTS = [
    "the STOP an", "STO", "S", "ab", " the ", "lo\n", "\n", "日本", "🙂", "é", " ", "  an",
    "<think>", "</think>", "\n\n", "<reason>", "</reason>\n\nx", "</reas", "<", "<|start|>", "<|end|>", "�",
]  # fmt: skip
STOPS = ["STOP", "P", "日本", "\n\n", "OP a", "🙂", "é", "<r", "ab", "b"]


@st.composite
def generations(draw: st.DrawFn, ids: int) -> list[Any]:
    fragments, tags = st.sampled_from(FRAGMENTS), st.sampled_from(TAGS + PLAIN_TAGS)
    part = st.one_of(
        fragments,
        tags,
        st.lists(fragments, min_size=2, max_size=4).map("".join),  # tokens may span two of them
        st.tuples(fragments | tags, st.integers(1, 4)),  # without its last tokens
        st.integers(0, ids + 2),  # any token: bytes without their neighbours, ids without a token
    )
    size = draw(st.integers(0, 14))  # a list of its own choosing is mostly short
    return draw(st.lists(part, min_size=size, max_size=size))


def to_ids(tok: Any, parts: Sequence[Any]) -> list[int]:
    ids: list[int] = []
    for part in parts:
        match part:
            case int():
                ids.append(part)
            case str():
                ids.extend(tok.encode(part, add_special_tokens=False))
            case (text, less):
                ids.extend(tok.encode(text, add_special_tokens=False)[:-less])
    return ids[:MAX_OPEN]


sizes_of_rounds = st.lists(st.integers(1, 16), min_size=1, max_size=6)


@every_tokenizer
@given(st.data(), sizes_of_rounds)
def test_joined_pieces_are_the_full_decode(name, data, sizes):
    tok = tokenizer(name)
    tokens = to_ids(tok, data.draw(generations(len(tok))))
    got = stream(tok, tokens, sizes, stop_ids=set())
    assert got.answer == tok.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert got[1:] == ("", len(tokens), None)


@every_tokenizer
@given(
    data=st.data(),
    sizes=sizes_of_rounds,
    stops=st.lists(st.sampled_from(STOPS), max_size=3),
    tags=st.sampled_from([None, TAGS, PLAIN_TAGS]),
    inside=st.booleans(),
    keep_special=st.booleans(),
    budget=st.integers(1, 80),
)
def test_cut_and_text_are_those_of_reading_everything_again_after_each_token(
    name, data, sizes, stops, tags, inside, keep_special, budget
):
    tok = tokenizer(name)
    tokens = to_ids(tok, data.draw(generations(len(tok))))
    options = {
        "stop_strings": stops,
        "think_tags": tags,
        "inside_thought": inside and tags is not None,
        "keep_special": keep_special,
    }
    stop_ids = {tok.eos_token_id}
    want = Oracle(tok, **options).run(tokens, stop_ids, budget)
    assert stream(tok, tokens, sizes, stop_ids=stop_ids, max_new_tokens=budget, **options) == want


@given(st.lists(st.integers(0, 400), max_size=60), st.booleans())
def test_the_fake_fallback_decodes_as_the_real_one(ids, skip):
    fake, real = tokenizer("fallback"), tokenizer("real fallback")
    # The library calls any added token special or not by its flag alone, and the fake does too.
    assert fake.decode(ids, skip_special_tokens=skip) == real.decode(ids, skip_special_tokens=skip)


@every_tokenizer
@pytest.mark.parametrize("text", ["日本語 🙂🙂 café", " lead", "a  b\n\n c ", "naïve — “quoted”"])
def test_text_comes_back_without_marks_whatever_the_rounds(name, text):
    tok = tokenizer(name)
    tokens = tok.encode(text, add_special_tokens=False)
    for size in range(1, 17):
        assert stream(tok, tokens, (size,)).answer == text


def test_nothing_of_a_character_shows_before_its_last_byte():
    tok = ByteTokenizer()
    made = transcript(tok)
    shown = []
    for token in tok.encode("a🙂"):
        made.cut([token])
        shown.append([piece.text for piece in made.pieces()])
    assert shown == [["a"], [], [], [], ["🙂"]]


@pytest.mark.parametrize("name", ["bytes", "fallback"])
def test_half_a_character_at_the_end_is_what_the_full_decode_says(name):
    tok = tokenizer(name)
    tokens = tok.encode("x🙂")[:-1]
    got = stream(tok, tokens, (2,), max_new_tokens=len(tokens))
    assert got.answer == tok.decode(tokens)
    assert got.answer.startswith("x" + REPLACEMENT) and got.reason == "length"


def test_a_space_after_special_ids_is_kept_in_sentencepiece():
    """A left side of special ids alone decodes to nothing, and the decoder drops the first space."""
    tok = tokenizer("real fallback")
    the, start, gap = (tok.convert_tokens_to_ids(t) for t in ("▁the", "<|start|>", "▁"))
    padded_row = len(tok) + 5
    for between in ([start] * 20, [padded_row] * 20, [start, padded_row] * 10):
        assert stream(tok, [the, *between, the], (1,)).answer == "the the"
    assert stream(tok, [start, gap, the], (1,)).answer == " the"


def test_a_token_without_letters_is_no_left_side():
    tok = FallbackTokenizer(["", "▁the"])
    empty, the = (tok.convert_tokens_to_ids(t) for t in ("", "▁the"))
    for before in range(12):
        tokens = [the] * before + [empty] * 3 + [the]
        assert stream(tok, tokens, (1,)).answer == tok.decode(tokens)


def test_special_ids_mid_block_are_no_text_but_remain_tokens():
    tok = tokenizer("bytes")
    tokens = tok.encode("ab<|start|>cd<|end|>ef")
    made = transcript(tok)
    assert made.cut(tokens) == (6, "stop")
    assert made.text == "abcd" and made.tokens == tokens[:6]
    assert stream(tok, tokens, (4,), keep_special=True).answer == "ab<|start|>cd<|end|>"


@pytest.mark.parametrize("name", ["bytes", "renumbered", "real bpe"])
@pytest.mark.parametrize("at", [0, 1, 3, 7])
def test_nothing_after_the_end_id_is_kept(name, at):
    tok = tokenizer(name)
    tokens = [*tok.encode("x") * at, tok.eos_token_id, *tok.encode("yyy")]
    made = transcript(tok)
    assert made.cut(tokens) == (at + 1, "stop")
    made.finish()
    assert (made.text, len(made.tokens), made.finish_reason) == ("x" * at, at + 1, "stop")


def test_an_end_id_that_is_an_ordinary_token_is_no_text():
    tok = tokenizer("bytes")
    assert stream(tok, tok.encode("ab\ncd"), stop_ids={10}) == ("ab", "", 3, "stop")


@pytest.mark.parametrize("block", [4])
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 8])
def test_budget_is_exact(block, budget):
    tok = tokenizer("bytes")
    got = stream(tok, tok.encode("abcdefghijkl"), (1, block), max_new_tokens=budget)
    assert got == ("abcdefghijkl"[:budget], "", budget, "length")


def test_an_end_at_the_last_token_of_the_budget_is_an_end():
    tok = tokenizer("bytes")
    assert stream(tok, tok.encode("ab<|end|>cd"), (16,), max_new_tokens=3) == ("ab", "", 3, "stop")
    assert stream(tok, tok.encode("abEND"), (16,), max_new_tokens=5, stop_strings=["END"]).reason == "stop"
    assert stream(tok, tok.encode("abEND"), (16,), max_new_tokens=4, stop_strings=["END"]) == (
        "abEN", "", 4, "length",
    )  # fmt: skip


@every_tokenizer
@pytest.mark.parametrize("stop", ["STOP", "OP a", "終わり", "🙂"])
def test_stop_string_over_tokens_and_rounds(name, stop):
    tok = tokenizer(name)
    before = tok.encode("it goes", add_special_tokens=False)
    tokens = before + tok.encode(f" STOP a 終わり 🙂", add_special_tokens=False)  # noqa: F541
    whole = tok.decode(tokens)
    outcomes = {stream(tok, tokens, (size,), stop_strings=[stop]) for size in range(1, 17)}
    (got,) = outcomes
    assert got.answer == whole[: whole.index(stop)] and got.reason == "stop"
    assert stop in tok.decode(tokens[: got.kept]) and stop not in tok.decode(tokens[: got.kept - 1])


def test_what_may_begin_a_stop_string_waits_and_is_released_when_it_does_not():
    tok = tokenizer("bytes")
    made = transcript(tok, stop_strings=["\n\nUser:"])
    seen = []
    for token in tok.encode("a\n\nUse it"):
        made.cut([token])
        seen.append("".join(piece.text for piece in made.pieces()))
    assert seen == ["a", "", "", "", "", "", "\n\nUse ", "i", "t"]
    made = transcript(tok, stop_strings=["\n\nUser:"])
    made.cut(tok.encode("a\n\nUse"))
    assert made.text == "a"
    made.finish()
    assert made.text == "a\n\nUse" and made.finish_reason is None


def test_the_stop_string_that_completes_first_counts_and_then_the_longest():
    tok = ByteTokenizer([b"xabcd"])
    tokens = [256]
    assert tok.decode(tokens) == "xabcd"
    assert stream(tok, tokens, stop_strings=["abcd", "bc"]).answer == "xa"
    assert stream(tok, tokens, stop_strings=["c", "abc"]).answer == "x"


def test_stop_strings_do_not_reach_into_or_across_thoughts():
    tok = tokenizer("bytes")
    tokens = tok.encode("aE<think>END\n\nE</think>\n\nND E\n\nND END!")
    got = stream(tok, tokens, (2,), stop_strings=["END"], think_tags=TAGS)
    assert got == ("aEND E\n\nND ", "END\n\nE", len(tokens) - 1, "stop")
    options = {"stop_strings": ["\n\n"], "think_tags": TAGS, "inside_thought": True}
    again = stream(tok, tok.encode("x</think>\n\nhi\n\nho"), **options)
    assert (again.answer, again.thought, again.reason) == ("hi", "x", "stop")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tags", [TAGS, PLAIN_TAGS])
def test_thought_that_the_prompt_opened(name, tags):
    tok = tokenizer(name)
    tokens = tok.encode(f"a{tags[1]}\n\nb", add_special_tokens=False)
    for size in range(1, 9):
        got = stream(tok, tokens, (size,), think_tags=tags, inside_thought=True)
        assert (got.answer.strip(), got.thought.strip()) == ("b", "a")


@pytest.mark.parametrize("tags", [TAGS, PLAIN_TAGS])
def test_generation_that_ends_inside_a_thought_has_no_answer(tags):
    tok = tokenizer("bytes")
    tokens = tok.encode(f"{tags[0]}\nlong thoughts </rea")
    got = stream(tok, tokens, (3,), think_tags=tags, max_new_tokens=len(tokens))
    assert got == ("", "long thoughts </rea", len(tokens), "length")


def test_empty_thought_leaves_no_trace():
    tok = tokenizer("real bpe")
    for tags in (TAGS, PLAIN_TAGS):
        tokens = tok.encode(f"{tags[0]}\n\n{tags[1]}\n\nHi\n", add_special_tokens=False)
        assert stream(tok, tokens, (1,), think_tags=tags)[:2] == ("Hi\n", "")


def test_a_tag_token_spelled_by_other_tokens_is_text():
    tok = tokenizer("bytes")
    spelled = list(b"say </think> or <think>")
    got = stream(tok, spelled, think_tags=TAGS)
    assert got[:2] == ("say </think> or <think>", "")


@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_tags_of_special_tokens_and_text(size):
    """Gemma opens a thought by a special token and a word, and closes it by a special token."""
    tok = build_bpe(SAMPLES, extra_special_tokens=["<|channel>", "<channel|>"])
    tags = ("<|channel>thought", "<channel|>")
    text = "a<|channel>thought\nhm the<channel|>\n\nb <|channel>thirst<|channel>"
    tokens = tok.encode(text, add_special_tokens=False)
    options = {"think_tags": tags, "stop_ids": set()}
    assert stream(tok, tokens, (size,), **options) == ("ab thirst", "hm the", len(tokens), None)
    shown = stream(tok, tokens, (size,), keep_special=True, **options)
    assert (shown.answer, shown.thought) == ("ab <|channel>thirst<|channel>", "hm the")


def test_a_tag_that_the_vocabulary_lacks_is_not_the_unknown_token():
    tok = build_bpe(SAMPLES, unk_token="<|bos|>")
    assert tok.convert_tokens_to_ids(PLAIN_TAGS[0]) == tok.bos_token_id
    tokens = tok.encode("<reason>a<|bos|></reason>b", add_special_tokens=False)
    assert stream(tok, tokens, think_tags=PLAIN_TAGS)[:2] == ("b", "a")


def test_tags_that_change_nothing_are_no_text():
    tok = tokenizer("bytes")
    got = stream(tok, tok.encode("<think>a<think>\nb</think>\nc</think>\nd"), think_tags=TAGS)
    assert got[:2] == ("cd", "ab")


def test_without_tags_everything_is_answer():
    tok = tokenizer("bytes")
    assert stream(tok, tok.encode("<think>a</think>b")).answer == "<think>a</think>b"


def test_spaces_are_not_cleaned_up():
    """Llama's tokenizer files ask for a clean-up that removes spaces the model wrote, and not additively."""
    tok = build_bpe(
        SAMPLES,
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )
    text = "Well , it is n't so . Really ?"
    tokens = tok.encode(text, add_special_tokens=False)
    assert tok.decode(tokens) != text
    assert {stream(tok, tokens, (size,)).answer for size in range(1, 17)} == {text}


def test_mlx_lm_wrapper_is_a_tokenizer_here():
    wrapped = TokenizerWrapper(tokenizer("real bpe"))
    tokens = wrapped.encode("<think>\nhm</think>\n\nyes 🙂<|end|>no", add_special_tokens=False)
    tags = (wrapped.think_start, wrapped.think_end)
    got = stream(wrapped, tokens, (5,), stop_ids=wrapped.eos_token_ids, think_tags=tags)
    assert (got.answer, got.thought, got.reason) == ("yes 🙂", "hm", "stop")


@pytest.mark.parametrize("make", [ByteTokenizer, FallbackTokenizer])
@pytest.mark.parametrize("stops", [(), ("STOP", "\n\n")])
def test_work_is_linear_in_the_tokens(make, stops):
    text = "plain words and 日本語 on <one line without end "

    def decoded_ids(repeats: int) -> float:
        tok = make()
        tokens = list(islice(cycle(tok.encode(text)), repeats))
        stream(tok, tokens, (7,), stop_strings=stops, think_tags=PLAIN_TAGS)
        return tok.decoded_ids / repeats

    assert decoded_ids(4000) < 1.1 * decoded_ids(1000)
    assert decoded_ids(4000) < 16


@pytest.mark.parametrize("garbage", [[0xFF], [0xE3], [0x80], [0xE3, 0x81]])
@pytest.mark.parametrize("make", [ByteTokenizer, FallbackTokenizer])
def test_endless_garbage_is_linear_too_and_loses_nothing_after_it(make, garbage):
    tok = make()
    first_byte = 0 if make is ByteTokenizer else tok.convert_tokens_to_ids("<0x00>")
    ids = [first_byte + b for b in garbage]
    made = transcript(tok)
    tokens = list(islice(cycle(ids), 2000))
    for block in rounds(tokens, (8,)):
        made.cut(block)
    assert tok.decoded_ids < 2000 * 3 * MAX_OPEN
    assert len(made.text) > 500 and set(made.text) == {REPLACEMENT}
    made.cut(tok.encode("fine 日本 again"))
    made.finish()
    assert made.text.lstrip(REPLACEMENT).strip() == "fine 日本 again"


def test_a_long_run_of_byte_tokens_does_not_wait_for_its_end():
    tok = tokenizer("fallback")
    made = transcript(tok)
    text = "ក្រុងភ្នំពេញ" * 8
    tokens = tok.encode(text)
    made.cut(tokens)
    assert len(tokens) > 4 * MAX_OPEN and len(made.text) > len(text) - MAX_OPEN
    made.finish()
    assert made.text == text


def test_a_wrong_byte_late_in_a_long_run_spoils_only_what_was_not_settled():
    tok = tokenizer("fallback")
    tokens = [*tok.encode("x" + "ក" * 26), tok.convert_tokens_to_ids("<0xFF>"), *tok.encode("y")]
    settled = -(-MAX_OPEN // 3)  # characters of three bytes
    spoiled = 26 * 3 + 1 - settled * 3
    assert stream(tok, tokens, (5,)).answer == "x" + "ក" * settled + REPLACEMENT * spoiled + " y"


def test_stop_strings_are_checked():
    assert check_stop_strings(None) == ()
    assert check_stop_strings("END") == ("END",)
    assert check_stop_strings(["a", "\n"]) == ("a", "\n")
    for wrong in ("", ["a", ""]):
        with pytest.raises(UsageError, match="empty"):
            check_stop_strings(wrong)
    with pytest.raises(UsageError, match="3"):
        check_stop_strings([3])


def test_an_empty_round_keeps_nothing():
    made = transcript(tokenizer("bytes"))
    assert made.cut([]) == (0, None) and made.pieces() == []
