from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.drafter import Drafter
from dflash_mlx.drafter.parts import Parts
from dflash_mlx.errors import UnsupportedError
from dflash_mlx.kernels import fastmath
from dflash_mlx.training.network import check_trainable, context_rows, drafted, sights
from tests.training.toys import as_features, features_of, small_network, small_target, some_answers

KINDS = {
    "full": {},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    "causal": {"is_causal": True},
    "biased": {"attention_bias": True},
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        "max_position_embeddings": 64,
    },
    "one head": {"num_attention_heads": 2, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpoint", [False, True], ids=["kept", "checkpointed"])
def test_a_batch_drafts_what_the_engine_drafts_at_each_of_its_anchors(kind, checkpoint):
    target, network = small_target(), small_network(**KINDS[kind])
    answers = some_answers(3)
    features = [as_features(item) for item in features_of(target, network, answers)]
    longest = max(len(rows) for rows in features)
    laid = mx.stack([mx.pad(rows, [(0, longest - len(rows)), (0, 0)]) for rows in features])
    places = np.array([[len(a.prompt_ids), len(a.ids) // 2, len(a.ids) - 2] for a in answers], np.int32)
    size = network.config.block_size
    masks = [network.config.mask_token_id] * (size - 1)
    ids = [[[a.ids[p], *masks] for p in row] for a, row in zip(answers, places, strict=True)]
    block = target.embed(mx.array(ids).reshape(-1)).reshape(3, 3, size, -1)
    anchors = mx.array(places)
    hidden = drafted(
        network,
        block,
        context_rows(network, laid),
        anchors,
        sights(network.config, anchors, longest, size),
        checkpoint=checkpoint,
    )
    for n, answer in enumerate(answers):
        for a, place in enumerate(places[n].tolist()):
            drafter = Drafter(network, target)
            drafter.inject(features[n], place)
            expected = drafter.logits(answer.ids[place], size)
            assert mx.allclose(target.head(hidden[n, a]), expected, atol=2e-4, rtol=2e-4).item(), (n, a)


def test_parts_beyond_the_first_format_are_refused():
    config = small_network().config
    check_trainable(config, "toy")
    with pytest.raises(UnsupportedError, match="v1"):
        check_trainable(replace(config, parts=Parts(tap_norms=True)), "toy")


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_the_quick_exponential_is_the_exponential(scale):
    x = mx.random.normal((999,), key=mx.random.key(3)) * scale
    assert mx.allclose(
        fastmath.exp(mx.minimum(x, 80.0)), mx.exp(mx.clip(x, -87.0, 80.0)), rtol=2e-6, atol=1e-37
    ).item()
    assert fastmath.exp(mx.array([-1e9, 0.0])).tolist() == pytest.approx([0.0, 1.0], abs=1e-30)


def test_the_quick_gate_and_its_gradient_are_those_of_silu():
    gate, up = mx.random.normal((2, 77), key=mx.random.key(1)) * 4

    def plain(gate, up):
        return mx.sum(gate * mx.sigmoid(gate) * up * up)

    def ours(gate, up):
        return mx.sum(fastmath.swiglu(gate, up) * up)

    assert mx.allclose(ours(gate, up), plain(gate, up), rtol=1e-5).item()
    for found, expected in zip(
        mx.grad(ours, (0, 1))(gate, up), mx.grad(plain, (0, 1))(gate, up), strict=True
    ):
        assert mx.allclose(found, expected, rtol=1e-4, atol=1e-5).item()
