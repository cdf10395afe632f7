import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from dflash_mlx.training.batches import make_batch, plan_epoch
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.step import Stepper
from tests.kit.models import VOCAB
from tests.training.toys import features_of, small_network, small_target, some_answers

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
STEP = 2e-4  # of the finite difference
FREQUENT = np.arange(20, dtype=np.int32)


def prepared(options, *, kind="qwen3", **changes):
    target, network = small_target(kind), small_network(**changes)
    answers = some_answers(4)
    stepper = Stepper(network, target, options)
    (plan,) = plan_epoch(
        answers, seed=0, epoch=0, anchors=8, block_size=network.config.block_size, batch_rows=4096
    )
    members = [answers[i] for i in plan.members]
    batch = make_batch(
        plan,
        members,
        features_of(target, network, members),
        block_size=network.config.block_size,
        rng=np.random.default_rng(5),
        soft_top=options.kept_top,
    )
    return stepper, batch


OPTIONS = {
    "candidates, soft": (TrainOptions(candidates=64, soft=0.5, compiled=False), {}),
    "candidates, hard": (TrainOptions(candidates=64, soft=0.0, compiled=False), SLIDING),
    "whole vocabulary": (TrainOptions(candidates=0, compiled=False), {}),
    "every token a candidate": (TrainOptions(candidates=4096, soft=0.3, compiled=False), {"is_causal": True}),
    "checkpointed": (TrainOptions(candidates=64, gradient_checkpointing=True, compiled=False), SLIDING),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_gradient_of_the_masked_loss_is_its_slope(name):
    options, changes = OPTIONS[name]
    stepper, batch = prepared(options, **changes)
    inputs = stepper.inputs(batch, FREQUENT, np.random.default_rng(7))
    at = stepper.network.trainable_parameters()
    loss = lambda parameters: stepper._loss(parameters, *inputs)[0]  # noqa: E731
    gradient = dict(tree_flatten(mx.grad(loss)(at)))
    stepper.network.update(at)
    rng = np.random.default_rng(11)
    for _ in range(3):
        way = tree_map(lambda a: mx.array(rng.standard_normal(a.shape), mx.float32), at)
        ahead = loss(tree_map(lambda a, w: a + STEP * w, at, way))
        behind = loss(tree_map(lambda a, w: a - STEP * w, at, way))
        slope = sum(mx.sum(gradient[key] * w).item() for key, w in tree_flatten(way))
        assert (ahead - behind).item() / (2 * STEP) == pytest.approx(slope, rel=0.02, abs=2e-3)


def test_a_loss_over_all_tokens_as_candidates_is_that_of_the_head():
    rng = np.random.default_rng(1)
    whole, batch = prepared(TrainOptions(candidates=0, compiled=False))
    some, _ = prepared(TrainOptions(candidates=4096, soft=0.0, compiled=False))
    expected = whole.loss(batch, FREQUENT, rng)
    assert some.loss(batch, FREQUENT, rng).item() == pytest.approx(expected.item(), rel=1e-4)


def test_candidates_have_little_bias():
    rng = np.random.default_rng(1)
    whole, batch = prepared(TrainOptions(candidates=0, compiled=False))
    some, _ = prepared(TrainOptions(candidates=112, soft=0.0, compiled=False))
    found = [some.loss(batch, FREQUENT, rng).item() for _ in range(40)]
    assert np.mean(found) == pytest.approx(whole.loss(batch, FREQUENT, rng).item(), rel=0.02)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "gemma2", "granite"])
def test_a_step_lowers_the_loss_of_its_own_batch(kind):
    options = TrainOptions(candidates=64, compiled=False)
    stepper, batch = prepared(options, kind=kind)
    assert stepper.by_candidates == (kind != "gemma2")
    losses = [stepper(batch, FREQUENT, 3e-3, np.random.default_rng(7)).loss.item() for _ in range(6)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.slow  # the C++ compiler runs on a CPU
def test_a_compiled_step_does_the_same():
    plain, batch = prepared(TrainOptions(candidates=64, compiled=False))
    compiled, _ = prepared(TrainOptions(candidates=64, compiled=True))
    for _ in range(2):
        for stepper in (plain, compiled):
            stepper(batch, FREQUENT, 1e-3, np.random.default_rng(7))
    for (key, found), (_, expected) in zip(
        tree_flatten(compiled.network.parameters()), tree_flatten(plain.network.parameters()), strict=True
    ):
        assert mx.allclose(found, expected, atol=1e-4).item(), key


def test_slots_are_weighed_by_what_hangs_on_them():
    hard, batch = prepared(TrainOptions(candidates=0, compiled=False, dpace=True))
    decayed = Stepper(hard.network, hard.target, dataclasses.replace(hard.options, dpace=False))
    rng = np.random.default_rng(0)
    assert hard.loss(batch, FREQUENT, rng).item() != decayed.loss(batch, FREQUENT, rng).item()
    assert batch.blocks.labels.max() < VOCAB
