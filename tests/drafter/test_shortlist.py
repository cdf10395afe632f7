"""A draft over fewer words: the same numbers for those words, the words of the text among them, the same text."""

from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.core import Cut, SamplingParams
from dflash_mlx.decoding import Decoder, Meter
from dflash_mlx.drafter import Drafter, Shortlist
from dflash_mlx.drafter.shortlist import Words
from dflash_mlx.kernels.table import Table
from dflash_mlx.policy import WholeBlock
from dflash_mlx.sampling import Sampler
from dflash_mlx.target import MLXTarget, plain_tokens
from tests.drafter.test_formats_in_use import network_of
from tests.drafter.toys import MASK, VOCAB, ToyEnds, toy_features, toy_network
from tests.kit.models import tiny_target
from tests.kit.oracle import Oracle


def drafter(ids: list[int], *, network=None, ends=None, bearable: float = 1.0) -> Drafter:
    ends = ends or ToyEnds()
    made = Drafter(
        network or toy_network(), ends, shortlist=Shortlist(Table(ends.rows), ids, bearable=bearable)
    )
    made.inject(toy_features(5), 5)
    return made


def best_of(logits: mx.array, ids: list[int]) -> tuple[list[int], np.ndarray]:
    """The most probable of these words by the logits of all, and its probability among them."""
    some = np.array(logits, dtype=np.float64)[:, ids]
    shares = np.exp(some - some.max(-1, keepdims=True))
    return [ids[i] for i in some.argmax(-1)], (shares / shares.sum(-1, keepdims=True)).max(-1)


ids_of = st.lists(st.integers(0, VOCAB - 1), min_size=1, unique=True)


@settings(max_examples=25)
@given(ids=ids_of, text=st.lists(st.integers(0, VOCAB - 1), max_size=40))
def test_a_draft_over_a_shortlist_is_that_of_all_words_with_the_others_struck_out(ids, text):
    dflash = {"mask_token_id": MASK, "target_layer_ids": [4, 0], "final_logit_softcapping": 3.0}
    network = toy_network(dflash_config={**dflash, "output_multiplier": 0.7})
    short = drafter(ids, network=network)
    short.see(text)
    proposal = short.propose(1, 6)
    whole = Drafter(network, ToyEnds())
    whole.inject(toy_features(5), 5)
    tokens, chances = best_of(whole.logits(1, 6), list(dict.fromkeys([*ids, *text])))
    assert proposal.tokens.dtype == mx.int32
    assert proposal.tokens.tolist() == tokens
    assert np.allclose(np.array(proposal.confidences), chances, atol=1e-5)


@settings(max_examples=20)
@given(ids=ids_of, rows=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8))
def test_packed_rows_are_taken_as_they_are(ids, rows):
    layer = nn.QuantizedLinear.from_linear(nn.Linear(64, VOCAB), group_size=32, bits=4)
    table = Table.of(layer)
    assert table is not None and table.rows == VOCAB
    some = table.take(mx.array(ids))
    assert some.weight.dtype == mx.uint32 and some.nbytes * VOCAB == table.nbytes * len(ids)
    x = mx.random.normal((len(rows), 64), key=mx.random.key(3))
    assert mx.array_equal(some.product(x), layer(x)[:, mx.array(ids)])
    assert mx.array_equal(some.first(1).product(x), layer(x)[:, ids[0] : ids[0] + 1])


@settings(max_examples=25)
@given(
    ids=ids_of,
    text=st.lists(st.integers(0, VOCAB - 1), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=6),
)
def test_words_of_the_text_are_added_once_however_it_comes(ids, text, cuts):
    shortlist = Shortlist(Table(ToyEnds().rows), ids)
    at_once, bit_by_bit = Words(shortlist), Words(shortlist)
    at_once.see(text)
    x = mx.random.normal((3, 16), key=mx.random.key(1))
    for cut in sorted(cuts):
        bit_by_bit.see(text[:cut])
        mx.eval(bit_by_bit.logits(x))
    bit_by_bit.see(text)
    known = list(dict.fromkeys([*ids, *text]))
    assert at_once.ids.tolist() == bit_by_bit.ids.tolist() == known
    assert at_once.covers == bit_by_bit.covers
    exact = (x @ ToyEnds().rows.T)[:, mx.array(known)]
    assert mx.allclose(bit_by_bit.logits(x), exact, atol=1e-5)
    assert len(shortlist) == len(ids), "what one text adds is no other's"


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_room_for_many_words_grows_without_losing_any(monkeypatch, packed):
    monkeypatch.setattr("dflash_mlx.drafter.shortlist._STEP", 4)
    layer = nn.Linear(64, VOCAB)
    table = Table.of(nn.QuantizedLinear.from_linear(layer, group_size=32, bits=8) if packed else layer)
    words, x = Words(Shortlist(table, [7])), mx.random.normal((2, 64), key=mx.random.key(1))
    for end in range(VOCAB):
        words.see(range(end + 1))
        mx.eval(words.logits(x))
    order = [7, *(word for word in range(VOCAB) if word != 7)]
    assert words.ids.tolist() == order
    assert mx.allclose(words.logits(x), table.product(x)[:, mx.array(order)], atol=1e-5)


def test_a_text_of_other_words_is_drafted_over_all_of_them_and_comes_back():
    """A list of English words, and an answer in another language: missed words cost more than the head."""
    words = Words(Shortlist(Table(mx.zeros((400, 4))), range(100), bearable=0.1))
    text = [*range(50)]
    words.see(text)
    assert words.covers
    text += range(100, 112)  # all new
    words.see(text)
    assert not words.covers
    text += range(100, 112)  # known by now, and few of the last fifty
    words.see(text)
    assert not words.covers, "just below what can be borne is not enough to come back"
    text += [3] * 60
    words.see(text)
    assert words.covers


def test_the_whole_head_is_used_while_the_list_does_not_cover_the_text():
    network = toy_network()
    short, whole = drafter([2, 4], network=network, bearable=0.05), Drafter(network, ToyEnds())
    whole.inject(toy_features(5), 5)
    short.see([10, 11, 12, 13])
    assert short.propose(1, 6).tokens.tolist() == whole.propose(1, 6).tokens.tolist()


def test_a_shorter_list_shares_its_rows_with_the_longer():
    long = Shortlist(Table(ToyEnds().rows), [5, 3, 9, 1], bearable=0.2)
    short, free = long.first(2), long.bearing(1.0)
    assert (short.words, short.ids.tolist(), len(short), short.bearable) == ((5, 3), [5, 3], 2, 0.2)
    assert [word for word in range(VOCAB) if short.listed[word]] == [3, 5]
    assert mx.array_equal(short.rows.weight, long.rows.weight[:2])
    assert (free.bearable, long.bearable, free.words) == (1.0, 0.2, long.words)


@pytest.mark.parametrize("kind", ["dflash2", "muse", "laguna"])
def test_formats_without_words_of_their_own_walk_through_the_list(kind):
    """DFlash2's selector chooses among the best of the list; a list of all words is no list at all."""
    network, ends = network_of(kind), ToyEnds(320, 64)
    features = mx.random.normal((7, 128), key=mx.random.key(4))
    order = [*range(319, -1, -1)]
    proposals = []
    for shortlist in (None, Shortlist(Table(ends.rows), order), Shortlist(Table(ends.rows), order[::3])):
        made = Drafter(network, ends, shortlist=shortlist)
        made.inject(features, 7)
        proposals.append(made.propose(3, 8))
    whole, all_listed, third = proposals
    assert whole.tokens.tolist() == all_listed.tokens.tolist()
    assert mx.allclose(whole.confidences, all_listed.confidences, atol=1e-5)
    assert set(third.tokens.tolist()) <= set(order[::3])


TARGETS = {"plain": cache(tiny_target), "packed": cache(lambda: packed(tiny_target()))}
PROMPT = [5, 9, 100, 7, 3, 20, 4]
GREEDY, DRAWN = SamplingParams(), SamplingParams(temperature=0.9, top_k=40, seed=11)


def packed(target: MLXTarget) -> MLXTarget:
    nn.quantize(target.model, group_size=32, bits=4)
    return MLXTarget(target.model, target.config, "packed")


@cache
def truth(kind: str, params: SamplingParams) -> tuple[int, ...]:
    """Forty tokens of plain decoding, and as many again for the last blocks."""
    target, sampler = TARGETS[kind](), Sampler(params)
    drawn = plain_tokens(
        target,
        PROMPT,
        max_new_tokens=56,
        draw=sampler.draw,
        draw_whole=sampler.draw_whole,
        prefill_chunk=4,
    )
    return tuple(drawn)


@cache
def told(kind: str, params: SamplingParams) -> tuple[list[int], Oracle, mx.array]:
    """The text, a network that knows it, and the logits that this network would have for each next token."""
    target, text = TARGETS[kind](), [*PROMPT, *truth(kind, params)]
    return text, Oracle(target, text), target.forward(mx.array([text]))[0]


@settings(max_examples=6)
@given(ids=st.sets(st.integers(0, 127), min_size=1, max_size=120), params=st.sampled_from([GREEDY, DRAWN]))
@pytest.mark.parametrize("kind", TARGETS)
def test_text_is_the_same_and_only_words_outside_list_and_text_are_lost(kind, ids, params):
    target, (text, network, logits) = TARGETS[kind](), told(kind, params)
    shortlist = Shortlist(target.head_table(), sorted(ids), through=target.head_by)
    decoder = Decoder(
        target=target,
        cache=target.make_cache(),
        drafter=Drafter(network, target, shortlist=shortlist),
        sampler=Sampler(params),
        cut=lambda tokens: Cut(len(tokens), None),
        policy=WholeBlock(),
        max_new_tokens=40,
        block_size=8,
        prefill_chunk=4,
        meter=Meter(),
        ids=[],
    )
    for _ in decoder.prefill(PROMPT):
        pass
    rounds = decoder.rounds()
    next(rounds)
    while decoder.new_tokens < 40:
        before = len(decoder.ids)
        done = next(rounds)
        assert decoder.ids == text[: len(decoder.ids)]
        known = ids | set(text[:before])
        proposed = best_of(logits[before - 1 : before + 6], sorted(known))[0]
        wanted = text[before : before + done.verified]
        right = next(
            (i for i, (a, b) in enumerate(zip(proposed, wanted, strict=False)) if a != b), done.verified
        )
        assert done.accepted == right
