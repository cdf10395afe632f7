"""Faults that users of such software met (undoing, pairing, memory), provoked on families that have them."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import can_trim_prompt_cache, load_prompt_cache, save_prompt_cache, trim_prompt_cache

from dflash_mlx.target import MLXTarget, load_target
from dflash_mlx.target import caches as target_caches
from tests.families.support import (
    PROMPT,
    SAMPLED,
    decoder,
    distance,
    drafted,
    family_of,
    first_fast,
    plain,
    planned,
    read,
    run,
    stepped,
    tokens_of,
    truth_of,
)
from tests.kit.families import FAMILIES, WINDOW, family

MIXED = first_fast("qwen3_5", "gpt_oss", "gemma4", "falcon_h1", "kimi_linear")


@pytest.mark.parametrize("name", first_fast("gpt_oss", "gemma3", "gemma4"))
def test_24_a_wrapped_ring_that_mlx_lm_cannot_trim_is_undone(name: str) -> None:
    target = family_of(name)
    held = read(target, PROMPT)
    tape = target.verify(mx.array([1] * 5), held, ()).tape
    assert not can_trim_prompt_cache(held) and trim_prompt_cache(held, 5) == 0, "silently nothing"
    target.commit(held, tape, 0)
    assert distance(held, stepped(target, PROMPT)) < 1e-5


def test_25_a_prompt_beyond_the_window_is_drafted_for() -> None:
    target, prompt = family_of("gemma3_text"), [*PROMPT, *PROMPT, *PROMPT]
    assert len(prompt) > 3 * WINDOW
    truth = plain(target, SAMPLED, 30, prompt)
    drafter = planned(truth, [7, 2, 0])
    drafter.truth = [*prompt, *truth]
    assert tokens_of(run(decoder(target, drafter, SAMPLED, 30), prompt)) == truth


@pytest.mark.parametrize("name", first_fast("qwen3_5", "lfm2", "granitemoehybrid"))
def test_26_recurrent_layers_beside_attention_do_not_stop_drafting(name: str) -> None:
    target, truth = family_of(name), truth_of(name, SAMPLED, 40)
    assert not can_trim_prompt_cache(target.make_cache())
    made = decoder(target, planned(truth, [7]), SAMPLED, 40)
    assert len(run(made)) < 40 / 4, "blocks are accepted"


@pytest.mark.parametrize("name", MIXED)
def test_28_a_cache_after_partial_rejections_is_that_of_a_cold_prefill(name: str) -> None:
    """And a second turn from it says the same."""
    target, truth = family_of(name), truth_of(name, SAMPLED, 40)
    made = decoder(target, planned(truth, [3, 0, 5]), SAMPLED, 40)
    run(made)
    history = [*PROMPT, *truth]
    assert distance(made.cache, read(target, history[:30], history[30:-1])) < 1e-5
    turn = [history[-1], 9, 4, 77]
    second = decoder(target, None, SAMPLED, 20, held=made.cache)
    second.ids = list(history[:-1])
    cold = decoder(target, None, SAMPLED, 20)
    assert tokens_of(run(second, turn)) == tokens_of(run(cold, [*history[:-1], *turn]))


@pytest.mark.parametrize("name", MIXED)
def test_31_a_saved_cache_goes_from_plain_to_drafted_decoding_and_back(name: str, tmp_path: Path) -> None:
    """They are mlx-lm's own cache objects; the drafter's part is not in the file."""
    target, truth = family_of(name), truth_of(name, SAMPLED, 40)
    for first, second in ((None, [3, 7]), ([3, 7], None)):
        begun = decoder(target, planned(truth, first) if first else None, SAMPLED, 20)
        run(begun)
        save_prompt_cache(str(tmp_path / "cache.safetensors"), begun.cache)
        drafter = planned(truth, second) if second else None
        if drafter:
            drafter.context_length = len(PROMPT) + 19
        loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
        again = decoder(target, drafter, SAMPLED, 20, held=loaded)
        again.ids = [*PROMPT, *truth[:20]]
        assert tokens_of(list(again.rounds())) == truth[20:]


@pytest.mark.parametrize("name", first_fast("gemma4", "gemma3", "kimi_k25", "qwen3_5"))
def test_48_layers_below_a_multimodal_wrapper_are_tapped(name: str) -> None:
    """Gemma 4's layers return tuples."""
    target = family_of(name)
    outputs: list[Any] = []
    layer = target.model.layers[1]
    stock = type(layer)

    class Loud(stock):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            outputs.append(super().__call__(*args, **kwargs))
            return outputs[-1]

    layer.__class__ = Loud
    try:
        target.forward(mx.array([PROMPT]))
    finally:
        layer.__class__ = stock
    (output,) = outputs
    assert isinstance(output, tuple) == (name == "gemma4")
    rows = output[0] if isinstance(output, tuple) else output
    features = target.verify(mx.array(PROMPT), target.make_cache(), (1,)).features
    assert mx.array_equal(features, rows[0])


def test_54_tensors_for_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    made = family("qwen3_5")
    weights = dict(tree_flatten(made.model.parameters()))
    extra = {
        "language_model.mtp.fc.weight": mx.zeros((64, 128)),
        "vision_tower.patch.weight": mx.zeros((4, 4)),
    }
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {**weights, **extra}, metadata={"format": "mlx"})
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["qwen3_5"]))
    loaded = load_target(tmp_path, dtype=None, name="t")
    logits = [t.verify(mx.array(PROMPT), t.make_cache(), ()).logits for t in (loaded, made)]
    assert mx.array_equal(*logits)


def test_96_a_second_generator_on_a_target_takes_no_second_target() -> None:
    target = family("qwen3_5", hidden_size=256)
    mx.eval(target.model.parameters())
    before = mx.get_active_memory()
    other = MLXTarget(target.model, target.config, "other")
    run(decoder(other, None, SAMPLED, 4))
    mx.clear_cache()
    assert mx.get_active_memory() - before < 0.2 * target.nbytes


@pytest.mark.parametrize("name", first_fast("qwen3_5", "gpt_oss", "nemotron_h"))
def test_98_memory_grows_by_the_caches_alone(name: str) -> None:
    """Rounds with rejections leave no graph behind."""
    target, truth = family_of(name), truth_of(name, SAMPLED, 100)
    made = decoder(target, planned(truth, [3, 7, 0]), SAMPLED, 100)
    list(made.prefill(PROMPT))
    sizes = []
    for one in made.rounds():
        made.drafter.features.clear()  # type: ignore[union-attr]  # the planned one keeps what it gets
        if one.finish_reason is None and made.new_tokens > 20 * (len(sizes) + 1):
            caches = sum(layer.nbytes for layer in target_caches.parts(made.cache))
            sizes.append(mx.get_active_memory() - caches)
    assert len(sizes) == 4
    assert max(sizes[1:]) - sizes[0] < 150_000, "a graph kept alive holds megabytes after 60 tokens"


@pytest.mark.parametrize("name", first_fast("gpt_oss", "qwen3_5", "falcon_h1"))
def test_99_a_pass_that_finds_no_memory_has_not_happened(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever layer it is that fails, the next request works on the same cache."""
    target, truth = family(name), truth_of(name, SAMPLED, 20)
    held = read(target, PROMPT)
    expected = target.verify(mx.array([42]), read(target, PROMPT), ()).logits
    for broken in range(target.num_layers):
        layer = target.model.layers[broken]
        stock = type(layer)

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise MemoryError("no room")

        layer.__class__ = type("Broken", (stock,), {"__call__": fail})
        for ids in ([3], [3, 4, 5, 6]):
            with pytest.raises(MemoryError):
                target.verify(mx.array(ids), held, (0, 2))
        layer.__class__ = stock
    assert mx.allclose(target.verify(mx.array([42]), held, ()).logits, expected, atol=1e-4)
    assert drafted(target, truth, [3], SAMPLED) == truth
