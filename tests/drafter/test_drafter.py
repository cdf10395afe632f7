"""What a drafter sees, where, and what it keeps: ours against a plain second reading."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_mlx.drafter import Drafter
from dflash_mlx.errors import PairError, UsageError
from tests.drafter.toys import MASK, ToyEnds, read_plainly, toy_features, toy_network

FULL, SLIDING = "full_attention", "sliding_attention"
CLOSE = 1e-4


def far(ours: mx.array, plain: np.ndarray) -> float:
    assert ours.shape == plain.shape
    return float(np.abs(np.array(ours) - plain).max())


layer_types = st.lists(st.sampled_from([FULL, SLIDING]), min_size=2, max_size=2)


@settings(max_examples=20)
@given(
    types=layer_types,
    window=st.integers(2, 12),
    causal=st.sampled_from([None, False, True]),
    spans=st.lists(st.integers(0, 14), min_size=1, max_size=4),
    block=st.integers(2, 6),
    settled=st.booleans(),
)
def test_incremental_context_drafts_as_all_features_at_once(types, window, causal, spans, block, settled):
    """Each layer by its own type, nothing but committed rows."""
    network = toy_network(layer_types=types, sliding_window=window, is_causal=causal)
    ends, features = ToyEnds(), toy_features(sum(spans))
    drafter, seen = Drafter(network, ends), 0
    for span in spans:
        drafter.inject(mx.concatenate([features[seen : seen + span], mx.full((3, 32), mx.nan)]), span)
        if settled:
            drafter.settle()
        seen += span
        logits = drafter.logits(7, block)
        assert drafter.context_length == seen
        assert far(logits, read_plainly(network, ends, features[:seen], 7, block)) < CLOSE


def test_bias_scale_multiplier_and_soft_cap_are_honoured():
    dflash = {
        "mask_token_id": MASK,
        "target_layer_ids": [4, 0],
        "final_logit_softcapping": 3.0,
        "input_embedding_scale": 2.5,
        "output_multiplier": 0.7,
    }
    network, ends = toy_network(attention_bias=True, dflash_config=dflash), ToyEnds()
    drafter, features = Drafter(network, ends), toy_features(5)
    drafter.inject(features, 5)
    logits = drafter.logits(1, 6)
    assert mx.abs(logits).max().item() > 2.9
    assert far(logits, read_plainly(network, ends, features, 1, 6)) < CLOSE


def test_a_head_that_caps_is_not_capped_again():
    network = toy_network(final_logit_softcapping=3.0)
    plain = Drafter(network, ToyEnds()).logits(1, 6)
    capped = Drafter(network, ToyEnds(logit_softcap=3.0)).logits(1, 6)
    assert mx.allclose(3.0 * mx.tanh(capped / 3.0), plain)
    assert mx.abs(capped).max().item() > 3.0


def test_positions_are_absolute_and_only_their_distances_matter():
    network, ends, features = toy_network(), ToyEnds(), toy_features(9)
    drafter = Drafter(network, ends)
    drafter.inject(features, 9)
    logits = drafter.logits(2, 6)
    assert far(logits, read_plainly(network, ends, features, 2, 6, shift=1000)) < 1e-3
    moved = Drafter(network, ends)
    moved.inject(features, 9)
    moved.settle()
    moved._context.length += 4  # the block stands four places too far, the context where it was
    assert mx.abs(moved.logits(2, 6) - logits).max().item() > 0.1


@pytest.mark.parametrize("types", [[FULL, FULL], [SLIDING, SLIDING]])
def test_the_last_slot_is_seen_by_the_first_in_full_layers_and_not_in_causal_ones(types):
    network, ends = toy_network(layer_types=types, sliding_window=64), ToyEnds()
    features, block = toy_features(4), ends.table[mx.array([3] + [MASK] * 5)]
    other = mx.concatenate([block[:5], block[5:] + 1.0])
    ours, changed = (network(rows, network.fuse(features), network.make_context()) for rows in (block, other))
    difference = mx.abs(ours - changed).max(axis=1).tolist()
    assert difference[-1] > 1e-2
    assert (max(difference[:-1]) > 1e-2) == (types[0] == FULL)


@pytest.mark.parametrize(("causal", "types"), [(True, [FULL, FULL]), (False, [SLIDING, SLIDING])])
def test_is_causal_overrides_the_layer_types(causal, types):
    network, ends = toy_network(layer_types=types, sliding_window=64, is_causal=causal), ToyEnds()
    block = ends.table[mx.array([3] + [MASK] * 5)]
    other = mx.concatenate([block[:5], block[5:] + 1.0])
    ours, changed = (network(rows, None, network.make_context()) for rows in (block, other))
    assert (mx.abs(ours - changed)[:-1].max().item() < 1e-6) == causal


def test_a_window_excludes_the_key_at_its_distance_and_includes_the_one_before():
    network, ends = toy_network(layer_types=[SLIDING], num_hidden_layers=1, sliding_window=5), ToyEnds()

    def logits(features: mx.array) -> mx.array:
        drafter = Drafter(network, ends)
        drafter.inject(features, 12)
        return drafter.logits(1, 2)  # slot 1 stands at 13

    features = toy_features(12)
    base = logits(features)
    for position in range(12):
        changed = mx.array(features)
        changed[position] = features[position] + 1.0
        moved = mx.abs(logits(changed) - base).max().item()
        assert (moved > 1e-4) == (13 - position < 5), position


def test_a_window_longer_than_the_context_changes_nothing():
    features, ends = toy_features(20), ToyEnds()
    logits = []
    for window in (26, 4096):
        drafter = Drafter(toy_network(layer_types=[SLIDING, FULL], sliding_window=window), ends)
        drafter.inject(features, 20)
        logits.append(drafter.logits(1, 6))
    assert mx.array_equal(logits[0], logits[1])


def test_proposals_are_the_most_probable_tokens_and_their_probabilities():
    drafter = Drafter(toy_network(), ToyEnds())
    drafter.inject(toy_features(3), 3)
    empty = drafter.snapshot()
    logits = drafter.logits(5, 6)
    drafter.restore(empty)
    tokens, confidences = drafter.propose(5, 6)
    assert tokens.dtype == mx.int32 and confidences.dtype == mx.float32
    assert tokens.tolist() == mx.argmax(logits, axis=-1).tolist()
    assert mx.allclose(confidences, mx.softmax(logits, axis=-1).max(axis=-1), atol=1e-6)


def test_a_tie_takes_the_lowest_id():
    ends = ToyEnds()
    ends.head = lambda hidden: mx.zeros((hidden.shape[0], 40)) + (mx.arange(40) % 3 == 1)
    assert Drafter(toy_network(), ends).propose(0, 6).tokens.tolist() == [1] * 5


def test_nothing_of_a_block_stays_and_abandoned_proposals_change_nothing():
    network, ends, features = toy_network(), ToyEnds(), toy_features(30)
    drafter, other = Drafter(network, ends), Drafter(network, ends)
    drafter.inject(features, 10)
    for anchor in range(8):
        drafter.propose(anchor, 6)
        assert drafter.context_length == 10
    drafter.inject(features[10:], 2)
    other.inject(features, 12)
    assert mx.allclose(drafter.logits(3, 6), other.logits(3, 6), atol=1e-5)
    assert [layer.visible for layer in drafter._context.layers] == [12, 12]


def test_features_wait_until_they_are_wanted_and_leave_nothing_lazy_behind():
    drafter = Drafter(toy_network(), ToyEnds())
    drafter.inject(toy_features(4), 2)
    drafter.inject(toy_features(4, seed=2), 3)
    drafter.inject(toy_features(4, seed=3), 0)
    assert drafter.context_length == 5
    assert drafter._context.length == 0
    drafter.settle()
    assert (drafter.context_length, drafter._context.length, drafter._waiting) == (5, 5, [])
    # A thread cannot evaluate what another one left lazy.
    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(mx.eval, drafter._context.arrays()).result()


@pytest.mark.parametrize("settled", [False, True])
def test_an_interrupt_between_two_layers_leaves_the_context_as_it_was(settled, monkeypatch):
    network, ends, features = (
        toy_network(layer_types=[SLIDING, FULL], sliding_window=4),
        ToyEnds(),
        toy_features(9),
    )
    drafter = Drafter(network, ends)
    drafter.inject(features, 5)
    drafter.settle()
    drafter.inject(features[5:], 4)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(network.layers[1].self_attn, "_keys_values", interrupted)
        drafter.settle() if settled else drafter.propose(3, 6)
    assert drafter.context_length == 9
    assert far(drafter.logits(3, 6), read_plainly(network, ends, features, 3, 6)) < CLOSE


def test_many_waiting_rows_settle_themselves():
    drafter = Drafter(toy_network(), ToyEnds())
    for _ in range(300):
        drafter.inject(toy_features(4), 4)
    assert drafter.context_length == 1200
    assert sum(waiting.keep for waiting in drafter._waiting) <= 512


def test_a_smaller_block_is_drafted_and_a_larger_one_refused():
    drafter = Drafter(toy_network(), ToyEnds())
    assert [drafter.propose(1, block).tokens.shape for block in (2, 6)] == [(1,), (5,)]
    for block in (1, 0, -1, 7):
        with pytest.raises(UsageError, match=rf"block_size {block}:.*from 2 to 6"):
            drafter.propose(1, block)


def test_a_drafter_for_another_target_is_refused_with_both_names_and_numbers():
    with pytest.raises(PairError, match=r"toy .*16.*toy target has 24"):
        Drafter(toy_network(), ToyEnds(hidden_size=24))
    with pytest.raises(PairError, match=r"mask id 39.*toy target has only 39"):
        Drafter(toy_network(), ToyEnds(vocab_size=39))


@pytest.mark.parametrize("draft", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("target", [mx.float32, mx.bfloat16, mx.float16])
def test_target_and_draft_may_differ_in_dtype(draft, target):
    network, ends = toy_network(), ToyEnds()
    network.set_dtype(draft)
    ends.table, ends.rows = ends.table.astype(target), ends.rows.astype(target)
    drafter = Drafter(network, ends)
    drafter.inject(toy_features(5).astype(target), 5)
    logits = drafter.logits(3, 6)
    assert logits.dtype == target
    assert drafter._context.arrays()[0].dtype == draft
    assert far(logits.astype(mx.float32), read_plainly(network, ends, toy_features(5), 3, 6)) < 0.5


def test_drafting_after_restoring_is_as_if_the_rest_had_not_been():
    network, ends = toy_network(layer_types=[SLIDING, FULL], sliding_window=4), ToyEnds()
    drafter, features, other = Drafter(network, ends), toy_features(12), toy_features(12, seed=5)
    drafter.inject(features, 8)
    before = drafter.snapshot()
    logits = drafter.logits(3, 6)
    drafter.inject(features[8:], 4)
    after = drafter.logits(3, 6)
    later = drafter.snapshot()
    drafter.restore(before)
    drafter.inject(other, 12)
    drafter.logits(3, 6)
    drafter.restore(later)
    assert mx.allclose(drafter.logits(3, 6), after, atol=1e-5)
    drafter.restore(before)
    assert mx.allclose(drafter.logits(3, 6), logits, atol=1e-5)
    assert drafter.context_length == 8
