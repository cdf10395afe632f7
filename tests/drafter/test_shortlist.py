"""A draft over fewer words: the same numbers for those words, the words of the text among them, the same text."""

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.drafter import Drafter, Shortlist
from dflash_mlx.kernels.table import Table
from tests.drafter.toys import MASK, VOCAB, ToyEnds, toy_features, toy_network


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
