import numpy as np
import pytest

from dflash_mlx.drafter import Drafter
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.records import Answer
from dflash_mlx.training.simulate import measure, walk
from dflash_mlx.training.step import Stepper
from tests.training.toys import as_features, features_of, small_network, small_target, some_answers


def walked_by_the_engines_drafter(target, network, answer, features):
    """Accepted tokens by round, one answer at a time, with the drafter that generation uses."""
    drafter, accepted = Drafter(network, target), []
    place, given = len(answer.prompt_ids), 0
    while place < len(answer.ids) - 1:
        drafter.inject(features[given:place], place - given)
        given = place
        draft = drafter.propose(answer.ids[place], network.config.block_size).tokens.tolist()
        true = answer.ids[place + 1 :][: len(draft)]
        same = int(np.cumprod([a == b for a, b in zip(draft, true, strict=False)]).sum())
        accepted.append(same)
        place += same + 1
    return accepted


def planned(target, network, answers):
    """Answers changed so that the drafter is often right: its own drafts are taken over, now and then."""
    changed = []
    for answer in answers:
        ids, first = list(answer.ids), len(answer.prompt_ids)
        for place in range(first, len(ids) - 1, 3):
            (features,) = features_of(target, network, [Answer(answer.prompt_ids, tuple(ids[first:]))])
            drafter = Drafter(network, target)
            drafter.inject(as_features(features), place)
            drafts = drafter.propose(ids[place], network.config.block_size).tokens.tolist()
            count = min(place % 5, len(ids) - place - 1, len(drafts))
            ids[place + 1 : place + 1 + count] = drafts[:count]
        changed.append(Answer(answer.prompt_ids, tuple(ids[first:])))
    return changed


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_simulated_rounds_are_those_of_the_engines_drafter(kind):
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    target, network = small_target(), small_network(**(sliding if kind == "sliding" else {}))
    answers = planned(target, network, some_answers(4, longest=18))
    features = features_of(target, network, answers)
    stepper = Stepper(network, target, TrainOptions(compiled=False))
    found = [walk(stepper, [a], [f]) for a, f in zip(answers, features, strict=True)]
    expected = [
        walked_by_the_engines_drafter(target, network, a, as_features(f))
        for a, f in zip(answers, features, strict=True)
    ]
    assert found == expected
    lengths = {count for of in found for count in of}
    assert {0, 1} <= lengths and max(lengths) > 2, "the test needs rounds of several lengths"
    assert sorted(walk(stepper, answers, features)) == sorted(sum(expected, []))
    measured = measure(stepper, answers, features)
    emitted = sum(len(a.answer_ids) - 1 for a in answers)
    assert measured.tokens_per_round == pytest.approx(emitted / sum(map(len, expected)))
    assert measured.rounds == sum(map(len, expected))
