"""That it learns: from nothing, and from a drafter whose target has changed."""

import pytest

from dflash_mlx.training.loop import Trainer, train
from dflash_mlx.training.options import TrainOptions
from tests.training.learnable import answers_of, changed, new_drafter, new_target, successors, teach

LEARN = TrainOptions(
    steps=140, anchors=8, batch_rows=512, candidates=0, learning_rate=3e-3, soft=0.0, evaluate_answers=24
)


def accepted(target, network):
    """Slot by slot on answers of their own."""
    held = answers_of(target, 24, seed=77)
    trainer = Trainer(target, network, answers_of(target, 4), LEARN, held_out=held)
    return trainer.measure()


@pytest.mark.slow
def test_a_random_drafter_learns_and_follows_a_target_that_changes():
    rules = successors(0)
    target, network = new_target(), new_drafter()
    teach(target, rules, 150)
    assert accepted(target, network).accepted[0] < 0.2
    train(target, network, answers_of(target, 100), LEARN, held_out=answers_of(target, 24, seed=5))
    learned = accepted(target, network)
    assert learned.accepted[0] > 0.8, learned

    teach(target, changed(rules, 0.4), 120)
    lost = accepted(target, network)
    assert lost.accepted[0] < learned.accepted[0] - 0.15, (lost, learned)
    train(target, network, answers_of(target, 100, seed=2), LEARN, held_out=answers_of(target, 24, seed=6))
    regained = accepted(target, network)
    gap = learned.tokens_per_round - lost.tokens_per_round
    assert regained.tokens_per_round > lost.tokens_per_round + 0.6 * gap, (learned, lost, regained)
