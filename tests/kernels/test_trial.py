"""Whole forwards held against each other, and the layers that take a kernel's product."""

import pickle

import mlx.core as mx
import mlx.nn as nn
import pytest

from dflash_mlx.kernels import layers, trial
from dflash_mlx.kernels.choice import Choices
from dflash_mlx.kernels.rows_qmm import ROWS

ROWS_OF = [mx.ones((3, 8)), mx.full((2, 8), 5.0)]
SOME_OTHER_CLASS = Choices(frozenset({(ROWS.name, "of another shape")}), lambda **_: None)


def test_the_same_rows_are_no_difference():
    assert trial.difference(ROWS_OF, lambda: [a * (1 + 1e-5) for a in ROWS_OF], dtype=mx.float32) is None


@pytest.mark.parametrize("bad", [1.1, mx.nan, mx.inf, 0.0])
@pytest.mark.parametrize("where", [0, 1])
def test_one_row_that_differs_is_seen_in_whatever_result(where, bad):
    def forward():
        spoilt = [mx.array(a) for a in ROWS_OF]
        spoilt[where][1] *= bad
        return spoilt

    wrong = trial.difference(ROWS_OF, forward, dtype=mx.float32)
    assert wrong is not None and wrong.startswith("off by ") and wrong.endswith("allowed 0.001")


def test_a_dtype_of_fewer_bits_may_round_more():
    def forward():
        return [a * 1.01 for a in ROWS_OF]

    assert trial.difference(ROWS_OF, forward, dtype=mx.float16) is None
    assert trial.difference(ROWS_OF, forward, dtype=mx.float32) is not None


@pytest.mark.parametrize("failure", [RuntimeError, ValueError])
def test_a_forward_that_fails_is_a_difference(failure):
    def forward():
        raise failure("Unable to build metal library\nmore lines")

    assert trial.difference(ROWS_OF, forward, dtype=mx.float32) == "Unable to build metal library"


@pytest.mark.parametrize("bias", [True, False])
def test_a_class_that_was_not_chosen_gives_the_stock_product_bit_for_bit(bias):
    layer = nn.QuantizedLinear.from_linear(nn.Linear(64, 32, bias=bias), 32, 4)
    if bias:
        layer.bias = mx.arange(32).astype(mx.float32)
    x = mx.random.normal((1, 5, 64), key=mx.random.key(0))
    expected = layer(x)
    layers.give_products(layer, SOME_OTHER_CLASS)
    assert type(layer) is not nn.QuantizedLinear and mx.array_equal(layer(x), expected)
    layers.restore(layer)
    assert type(layer) is nn.QuantizedLinear


def test_an_embedding_gives_its_product_and_still_embeds():
    layer = nn.QuantizedEmbedding.from_embedding(nn.Embedding(40, 64), 32, 8)
    x = mx.random.normal((5, 64), key=mx.random.key(0))
    product, rows = layer.as_linear(x), layer(mx.array([3, 1]))
    layers.give_products(layer, SOME_OTHER_CLASS)
    assert mx.array_equal(layer.as_linear(x), product) and mx.array_equal(layer(mx.array([3, 1])), rows)


def test_other_formats_and_other_classes_of_layers_stay_stock():
    class Own(nn.QuantizedLinear):
        pass

    model = nn.Sequential(
        nn.QuantizedLinear(64, 32, mode="mxfp4"), Own(64, 32, group_size=32, bits=4), nn.Linear(32, 8)
    )
    before = [type(layer) for layer in model.layers]
    layers.give_products(model, SOME_OTHER_CLASS)
    assert [type(layer) for layer in model.layers] == before


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_layer_with_a_kernel_is_pickled_as_a_stock_one(protocol):
    layer = nn.QuantizedLinear(64, 32, group_size=32, bits=4)
    layers.give_products(layer, SOME_OTHER_CLASS)
    copy = pickle.loads(pickle.dumps(layer, protocol))
    assert type(copy) is nn.QuantizedLinear and copy.__dict__ == layer.__dict__
    assert mx.array_equal(copy.weight, layer.weight) and mx.array_equal(copy.scales, layer.scales)
