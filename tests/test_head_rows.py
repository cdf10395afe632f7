"""A target's logits word by word: the model's own scale and cap after other rows, and no trace left behind."""

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from dflash_mlx.target import MLXTarget
from tests.kit.models import CONFIGS, LAYOUTS, VOCAB, parameter_names, tiny_target

FEW = ("qwen3", "qwen3-tied", "gemma2", "granite", "cohere", "gpt2", "qwen3_vl")  # each kind of head once
KINDS = [pytest.param(kind, marks=[] if kind in FEW else pytest.mark.slow) for kind in (*CONFIGS, *LAYOUTS)]
WORDS = mx.array([3, 100, 7, VOCAB - 1, 0])


@cache
def target_of(kind: str, packed: bool) -> MLXTarget:
    target = tiny_target(kind)
    if not packed:
        return target
    nn.quantize(target.model, group_size=32, bits=4)
    return MLXTarget(target.model, target.config, kind)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_some_words_are_those_of_all_cap_and_scale_included(kind, packed):
    target = target_of(kind, packed)
    table, names = target.head_table(), parameter_names(target)
    assert table is not None and table.rows == VOCAB and (table.scales is not None) == packed
    hidden = 3 * mx.random.normal((5, 64), key=mx.random.key(2))
    some = target.head_by(hidden, table.take(WORDS).product)
    assert mx.allclose(some, target.head(hidden)[:, WORDS], rtol=1e-5, atol=1e-5)
    assert parameter_names(target) == names
    assert all(type(layer).__module__.startswith("mlx") for _, layer in target.model.named_modules())


def test_a_head_that_does_more_than_word_by_word_is_not_taken_apart():
    """Logits that are normed over all words, and a head that multiplies without a layer."""

    def head_of(change: Any) -> Any:
        target = tiny_target("qwen3")
        base = type(target.model)
        # On the instance's class, as another version of mlx-lm would have it.
        target.model.__class__ = type(base.__name__, (base,), {"__call__": change(base)})
        return MLXTarget(target.model, target.config, "odd").head_table()

    def normed(base: Any) -> Any:
        def call(self: Any, ids: mx.array, cache: Any = None) -> mx.array:
            logits = base.__call__(self, ids, cache=cache)
            return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

        return call

    def biased(base: Any) -> Any:
        return lambda self, ids, cache=None: base.__call__(self, ids, cache=cache) + mx.arange(VOCAB) / VOCAB

    def bare(base: Any) -> Any:
        return lambda self, ids, cache=None: self.model(ids, cache) @ self.lm_head.weight.T

    assert head_of(lambda base: base.__call__) is not None
    assert [head_of(change) for change in (normed, biased, bare)] == [None, None, None]
