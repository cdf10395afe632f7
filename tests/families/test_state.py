"""For every family: the state after undoing is that of stepping through what was kept."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from dflash_mlx.errors import UnsupportedError
from dflash_mlx.target import MLXTarget
from dflash_mlx.target import caches as target_caches
from tests.families.support import PROMPT, distance, family_of, first_fast, read, stepped, visible
from tests.kit.families import FAMILIES, family
from tests.kit.models import VOCAB

ALL = list(FAMILIES)
IDS = [(37 * j * j + 11 * j + 5) % VOCAB for j in range(96)]


def check_undoing(target: MLXTarget, history: list[int], keeps: list[int], rows: int) -> None:
    """Run a pass of `rows` rows for each entry, right for `keep` rows and wrong after, beside a stepped cache."""
    held, beside, at = read(target, history), stepped(target, history), 0
    for keep in keeps:
        right = IDS[at : at + keep]
        tape = target.verify(mx.array([*right, *[1] * (rows - keep)]), held, ()).tape
        for wrong in (rows, 0, keep):
            target.commit(held, tape, wrong)
        stepped(target, right, beside)
        at += keep
        if history or at:
            assert distance(held, beside) < 1e-5, f"after {keep} of {rows} rows at {len(history) + at}"
    assert at


@pytest.mark.parametrize(
    "name", ["qwen3", "gpt_oss", "qwen3_5", "nemotron_h", "kimi_linear", "lfm2", "llama4"]
)
def test_after_undoing_the_state_is_that_of_stepping(name: str) -> None:
    """From the start, with a part, nothing and all of a pass kept, and changed again before the next pass."""
    check_undoing(family_of(name, gain=1.0), PROMPT[:4], [3, 0, 6], rows=6)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 8, 20])
@pytest.mark.parametrize("name", ALL)
def test_after_any_undoing_the_state_is_that_of_stepping(name: str, rows: int) -> None:
    """From an empty cache, before and past the windows, with passes longer than a window."""
    for before in (0, 12, 21):
        check_undoing(
            family_of(name, gain=1.0), PROMPT[:before], [0, 1, rows, rows // 2, 0, rows - 1, rows], rows
        )


@pytest.mark.parametrize(
    "name", first_fast("falcon_h1", "gpt_oss", "qwen3_5", "kimi_linear", "gemma4-shared", "llama4")
)
def test_a_snapshot_brings_the_state_back(name: str) -> None:
    """Whatever came after it, in the same cache and in another one."""
    target = family_of(name)
    held = read(target, PROMPT)
    saved, shown = target.snapshot(held), [mx.array(array) for array in visible(held)]
    for other in ([9], [8] * 6, [7, 7], [6] * 30):
        mx.eval(target.verify(mx.array(other), held, ()).logits)
        target.restore(held, saved)
        assert all(mx.array_equal(a, b) for a, b in zip(visible(held), shown, strict=True))
    fresh = target.make_cache()
    target.restore(fresh, saved)
    expected = target.verify(mx.array([42]), read(target, PROMPT), ()).logits
    assert mx.allclose(target.verify(mx.array([42]), fresh, ()).logits, expected, atol=1e-4)


def state_types(held: object) -> list[mx.Dtype]:
    return [layer.cache[-1].dtype for layer in target_caches.parts(held) if isinstance(layer, ArraysCache)]


@pytest.mark.parametrize("name", first_fast("qwen3_5", "olmo_hybrid", "nemotron_h", "falcon_h1"))
def test_a_recurrent_state_keeps_its_type_in_a_half_precision_model(name: str) -> None:
    """Fp32 by the delta rule, whatever mlx-lm gives a scan; through prefill, undoing and replay."""
    target = family_of(name, dtype=mx.bfloat16)
    assert target.dtype == mx.bfloat16
    held = read(target, PROMPT)
    stock = state_types(stepped(target, PROMPT[:2]))
    assert state_types(held) == stock
    assert name in ("nemotron_h", "falcon_h1") or set(stock) == {mx.float32}
    tape = target.verify(mx.array(IDS[:6]), held, ()).tape
    for keep in (6, 0, 4, 1):
        target.commit(held, tape, keep)
        assert state_types(held) == stock


def test_the_decay_of_a_recurrence_is_not_cast() -> None:
    """As in mlx-lm's own conversion: rounded to 8 bits it would be another model."""
    target = family_of("qwen3_5", dtype=mx.bfloat16)
    mixer = target.model.layers[0].linear_attn
    assert mixer.A_log.dtype == mx.float32 and mixer.dt_bias.dtype == mx.bfloat16


def test_a_recurrence_that_cannot_be_run_again_is_refused_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a new mlx-lm did more to the state than its update function does."""

    def more(self: ArraysCache, count: int) -> None:
        self[1] = 0.5 * self[1]

    monkeypatch.setattr(ArraysCache, "advance", more)
    with pytest.raises(UnsupportedError, match="'qwen3_5' model does not keep its caches in the way"):
        family("qwen3_5")
