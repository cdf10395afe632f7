"""For every family: passes of several rows with quick exponentials, as on a CPU, say what mlx-lm's forward says."""

from functools import cache

import mlx.core as mx
import pytest

from dflash_mlx.kernels import fastmath
from dflash_mlx.target import MLXTarget
from tests.families.support import GREEDY, PROMPT, SAMPLED, drafted, first_fast, truth_of
from tests.kit.families import FAMILIES, family


@cache
def quickened(name: str) -> MLXTarget:
    target = family(name)
    assert target.quicken(worth=0) is None and target.is_quick  # the texts of the tests are short
    return target


def logits_of(target: MLXTarget, *pieces: list[int]) -> list[mx.array]:
    held = target.make_cache()
    found = [target.verify(mx.array(piece), held).logits for piece in pieces]
    mx.eval(found)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_passes_of_several_rows_are_stock_within_rounding_and_those_of_one_row_exactly(name):
    target, stock = quickened(name), family(name)
    kinds = [type(module) for _, module in target.model.named_modules()]
    pieces = [PROMPT, PROMPT[:1], PROMPT[:8]]
    for got, plain in zip(logits_of(target, *pieces), logits_of(stock, *pieces), strict=True):
        assert mx.allclose(got, plain, rtol=1e-3, atol=1e-4)
    assert mx.array_equal(logits_of(target, PROMPT[:1])[0], logits_of(stock, PROMPT[:1])[0])
    assert [type(module) for _, module in target.model.named_modules()] == kinds


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("params", first_fast(SAMPLED, GREEDY), ids=["sampled", "greedy"])
def test_drafted_text_is_plain_text(name, params):
    truth = truth_of(name, params, 60)
    assert drafted(quickened(name), truth, [2, 7, 7, 0, 5, 1], params) == truth


def test_some_families_do_become_quick():
    """Were nothing rebound, the tests above would compare the stock forward with itself."""
    for name in ("qwen3", "llama", "gemma3", "qwen3_5"):
        target, stock = quickened(name), family(name)
        pair = logits_of(target, PROMPT)[0], logits_of(stock, PROMPT)[0]
        assert not mx.array_equal(*pair), name


def test_exponentials_that_are_wrong_here_are_told_and_not_used(monkeypatch):
    target = family("llama")
    monkeypatch.setattr(fastmath, "softmax_parts", lambda scores: (scores, mx.ones((1,)), scores))
    assert "MLX's own exponentials are used" in (target.quicken() or "") and not target.is_quick
    assert mx.array_equal(logits_of(target, PROMPT)[0], logits_of(family("llama"), PROMPT)[0])


def test_other_types_stay_stock():
    target = family("llama")
    target.model.set_dtype(mx.bfloat16)
    assert target.quicken() is None and not target.is_quick
