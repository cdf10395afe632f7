"""Anchors, positions, labels and masks, held to values worked out by hand."""

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.training.batches import make_batch, plan_epoch, surprise
from dflash_mlx.training.blocks import candidates, draw_anchors, make_blocks, seen_context, slot_weights
from dflash_mlx.training.features import AnswerFeatures
from dflash_mlx.training.loss import choose_candidates, dpace_weights
from dflash_mlx.training.network import sights
from dflash_mlx.training.records import Answer
from tests.training.toys import small_network, some_answers

# Positions:      0   1   2 | 3   4   5   6   7
ANSWER = Answer((10, 11, 12), (13, 14, 15, 16, 17))


def test_anchors_are_answer_tokens_with_a_successor():
    assert list(candidates(ANSWER)) == [3, 4, 5, 6]
    drawn = draw_anchors(ANSWER, 3, np.random.default_rng(0))
    assert len(set(drawn.tolist())) == 3 and set(drawn.tolist()) <= {3, 4, 5, 6}
    assert drawn.tolist() == sorted(drawn.tolist())
    assert draw_anchors(ANSWER, 9, np.random.default_rng(0)).tolist() == [3, 4, 5, 6]


def test_labels_are_the_tokens_at_anchor_plus_slot():
    blocks = make_blocks([ANSWER], [np.array([3, 5, 6], np.int32)], block_size=4, count=4)
    assert blocks.anchors.tolist() == [[3, 5, 6, 3]]  # the fourth fills up
    assert blocks.anchor_ids.tolist() == [[13, 15, 16, 13]]
    assert blocks.labels.tolist() == [[[14, 15, 16], [16, 17, 0], [17, 0, 0], [0, 0, 0]]]
    assert blocks.valid.tolist() == [
        [[True, True, True], [True, True, False], [True, False, False], [False, False, False]]
    ]


def test_a_block_sees_what_lies_before_its_anchor_only():
    seen = seen_context(mx.array([[2, 4]]), 5, 3, None)
    assert np.array(seen).astype(int).tolist() == [[[[1, 1, 0, 0, 0]], [[1, 1, 1, 1, 0]]]]


def test_a_window_counts_from_each_row_of_the_block():
    # Rows at 4, 5 and 6 see what is less than 3 positions back, and nothing from the anchor on.
    seen = seen_context(mx.array([[4]]), 6, 3, 3)
    assert np.array(seen).astype(int).tolist() == [
        [[[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]]]
    ]


def test_only_sliding_layers_are_causal_inside_a_block_unless_the_config_says_otherwise():
    def causal(**changes):
        config = small_network(**changes).config
        return [sight.block is not None for sight in sights(config, mx.array([[3]]), 8, 3)]

    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    assert causal(**kinds) == [True, False]
    assert causal(**kinds, is_causal=False) == [False, False]
    assert causal(is_causal=True) == [True, True]
    (first, _) = sights(small_network(is_causal=True).config, mx.array([[3]]), 8, 3)
    assert (np.array(first.block) == 0).astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert (np.array(first.context) == 0).astype(int).tolist() == [[[[1, 1, 1, 0, 0, 0, 0, 0]]]]


def test_slot_weights_are_those_of_the_paper():
    assert slot_weights(16, 7.0).round(3).tolist() == pytest.approx(
        [1, 0.867, 0.751, 0.651, 0.565, 0.490, 0.424, 0.368, 0.319, 0.276, 0.240, 0.208, 0.180, 0.156, 0.135],
        abs=6e-4,
    )


def test_dpace_weighs_a_slot_by_what_hangs_on_it():
    # q = 1, 1/2, 0 gives c = 1, 3/4, 1/2: products 1, .75, .375, summed from behind 2.125, 1.125, .375.
    weights = dpace_weights(mx.log(mx.array([1.0, 0.5, 1e-30])), mx.ones((3,)))
    assert weights.tolist() == pytest.approx([2.125, 1.125, 0.375])
    assert dpace_weights(
        mx.log(mx.array([1.0, 0.5, 1.0])), mx.array([1.0, 1.0, 0.0])
    ).tolist() == pytest.approx([1.75, 0.75, 0.0])


def test_candidates_hold_what_is_wanted_and_count_for_what_is_left_out():
    wanted, frequent = np.array([7, 3, 3, 90], np.int32), np.arange(40, dtype=np.int32)
    chosen = choose_candidates(wanted, frequent, vocab=5000, count=1024, rng=np.random.default_rng(0))
    assert len(set(chosen.ids.tolist())) == len(chosen.ids) == 1024
    assert {3, 7, 90, *range(40)} <= set(chosen.ids.tolist())
    # Each random id stands for so many that all together are the vocabulary.
    assert np.exp(chosen.bias).sum() == pytest.approx(5000, rel=1e-4)
    assert (chosen.bias[:41] == 0).all()
    every = choose_candidates(wanted, frequent, vocab=100, count=1024, rng=np.random.default_rng(0))
    assert every.ids.tolist() == list(range(100)) and not every.bias.any()
    many = choose_candidates(np.arange(2000), frequent, vocab=5000, count=1024, rng=np.random.default_rng(0))
    assert len(many.ids) == 3072 and set(range(2000)) <= set(many.ids.tolist())


def test_each_label_has_its_own_soft_target():
    tops = len(ANSWER.answer_ids) - 1
    features = AnswerFeatures(
        np.zeros((7, 2), np.uint16),
        np.arange(tops * 3, dtype=np.int32).reshape(tops, 3),  # rows are about the tokens 14, 15, 16 and 17
        np.log(np.array([[0.2, 0.6, 0.1]] * tops)).astype(np.float16),
    )
    (plan,) = plan_epoch([ANSWER], seed=0, epoch=0, anchors=8, block_size=3, batch_rows=99)
    batch = make_batch(plan, [ANSWER], [features], block_size=3, rng=np.random.default_rng(0), soft_top=2)
    assert batch.blocks.anchors[0, :4].tolist() == [3, 4, 5, 6]
    assert batch.soft_rows[0, :4].tolist() == [[0, 1], [1, 2], [2, 3], [3, 0]]
    assert batch.soft_ids[:4].tolist() == [
        [1, 0],
        [4, 3],
        [7, 6],
        [10, 9],
    ]  # the two likeliest, likeliest first
    assert batch.soft_weights[0].tolist() == pytest.approx([0.75, 0.25], abs=1e-3)
    assert batch.features.shape == (1, 32, 2)


def test_anchors_may_go_where_the_target_was_surprised():
    tops = len(ANSWER.answer_ids) - 1
    ids = np.array([[14, 1], [15, 1], [2, 1], [17, 1]], np.int32)  # the token 16 is not among the likeliest
    logprobs = np.log(np.array([[0.9, 0.1], [1.0, 1e-9], [0.6, 0.4], [0.5, 0.5]])).astype(np.float16)
    features = AnswerFeatures(np.zeros((7, 2), np.uint16), ids, logprobs)
    # Candidates are 13, of which nothing is known, 14, 15 and 16.
    assert surprise(ANSWER, features).tolist() == pytest.approx([1, 0.1, 0, 1], abs=2e-3)
    (plan,) = plan_epoch([ANSWER], seed=0, epoch=0, anchors=2, block_size=3, batch_rows=99)
    plan = plan._replace(anchors=2)
    rng = np.random.default_rng(0)
    drawn = [
        make_batch(plan, [ANSWER], [features], block_size=3, rng=rng, soft_top=2, surprising=0.99)
        for _ in range(20)
    ]
    anchors = np.concatenate([batch.blocks.anchors[0] for batch in drawn])
    assert np.isin(anchors, [3, 6]).mean() > 0.8
    assert len(features.top_ids) == tops


def test_an_epoch_holds_every_answer_once_within_its_budget():
    answers = some_answers(40, longest=60)
    plans = plan_epoch(answers, seed=3, epoch=1, anchors=16, block_size=6, batch_rows=600)
    assert sorted(i for plan in plans for i in plan.members) == list(range(40))
    for plan in plans:
        assert len(plan.members) * plan.anchors * 6 <= 600
        assert all(len(answers[i].ids) - 2 <= plan.context for i in plan.members)
    assert plans == plan_epoch(answers, seed=3, epoch=1, anchors=16, block_size=6, batch_rows=600)
    assert plans != plan_epoch(answers, seed=3, epoch=2, anchors=16, block_size=6, batch_rows=600)
    assert len({(plan.anchors, plan.context) for plan in plans}) <= 6  # few shapes to compile
