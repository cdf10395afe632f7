"""Quantised keys and values: the text of plain decoding with the same `kv_bits`, or a refusal with the reason."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from dflash_mlx.errors import UnsupportedError, UsageError
from dflash_mlx.target import MLXTarget
from dflash_mlx.target import caches as target_caches
from tests.families.support import GREEDY, PROMPT, SAMPLED, drafted, first_fast, plain, read
from tests.kit.families import FAMILIES, WINDOW, family

WIDE = {"head_dim": 32}
REFUSED = {
    "gpt_oss": "gpt_oss does not read a quantised cache .*sinks",
    "gemma4-shared": "gemma4-shared does not read a quantised cache",
    "deepseek_v3": "deepseek_v3 does not read a quantised cache",
    "kimi_k25": "kimi_k25 does not read a quantised cache",
    "kimi_linear": "kimi_linear does not read a quantised cache",
    "minimax-16": r"multiple of 32; those of tiny-minimax are \[16\] wide",
}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 32}


def wide(name: str) -> dict[str, int]:
    """Some families take the width of a head from the number of heads, or have a latent one."""
    more = LATENT if name in ("deepseek_v3", "kimi_k25", "kimi_linear") else {}
    heads = {"num_attention_heads": 2} if name in ("granitemoehybrid", "lfm2") else {}
    return {**WIDE, **more, **heads}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", first_fast("qwen3_5", "qwen3"))
def test_text_with_quantised_keys_is_plain_text_with_quantised_keys(name: str, bits: int) -> None:
    """Partial rejections too."""
    target = family(name, kv_bits=bits, **WIDE)
    truth = plain(target, SAMPLED, 40)
    assert drafted(target, truth, [1, 7, 0, 5], SAMPLED) == truth
    exact = family(name, **WIDE)
    logits = [t.verify(mx.array([42]), read(t, PROMPT), ()).logits for t in (target, exact)]
    assert 1e-4 < mx.abs(logits[0] - logits[1]).max().item(), "quantised all along"


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REFUSED])
def test_every_family_either_reads_quantised_keys(name: str, bits: int) -> None:
    """Or is among the refused, below."""
    target = family(name, kv_bits=bits, **wide(name))
    kinds = {type(layer) for layer in target_caches.parts(target.make_cache())}
    assert QuantizedKVCache in kinds and KVCache not in kinds
    truth = plain(target, SAMPLED, 40)
    assert drafted(target, truth, [3, 7, 7, 0], SAMPLED) == truth


@pytest.mark.parametrize("name", first_fast(*REFUSED))
def test_or_is_refused_at_load_with_the_reason(name: str) -> None:
    family_name = name.removesuffix("-16")
    changes = {} if name.endswith("-16") else wide(family_name)
    with pytest.raises(UnsupportedError, match=REFUSED[name]):
        family(family_name, kv_bits=8, **changes)


def test_a_model_of_rings_has_nothing_to_quantise(monkeypatch: pytest.MonkeyPatch) -> None:
    model = family("qwen3", **WIDE).model
    monkeypatch.setattr(
        type(model), "make_cache", lambda self: [RotatingKVCache(WINDOW) for _ in range(4)], raising=False
    )
    with pytest.raises(UnsupportedError, match="rings keeps no cache that kv_bits could quantise"):
        MLXTarget(model, FAMILIES["qwen3"], "rings", kv_bits=8)


def test_a_window_stays_as_it_is() -> None:
    held = family("gemma3_text", kv_bits=8, **WIDE).make_cache()
    assert [type(layer) for layer in held] == [RotatingKVCache, QuantizedKVCache] * 2


@pytest.mark.parametrize("bits", [0, 2, 3, 16])
def test_other_widths_are_refused(bits: int) -> None:
    with pytest.raises(UsageError, match=f"kv_bits {bits}: 4, 8 or none"):
        family("qwen3", kv_bits=bits)


def test_quantised_keys_take_less_memory() -> None:
    sizes = []
    for bits in (None, 8, 4):
        target = family("qwen3", kv_bits=bits, head_dim=64)
        sizes.append(sum(layer.nbytes for layer in read(target, PROMPT)))
    assert sizes[1] < 0.3 * sizes[0] and sizes[2] < 0.6 * sizes[1], (
        "of fp32, with scales and offsets of 64 numbers"
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", first_fast("qwen3", "qwen3_5", "llama", "nemotron_h", "lfm2"))
def test_text_is_that_of_mlx_lm_s_own_kv_bits(name: str, bits: int) -> None:
    """mlx-lm quantises after the first pass that reaches `quantized_kv_start`, its `kv_group_size` is 64 unless set.

    Begun before the first pass, as ours, with the group that the heads allow, it is one text.
    """
    target = family(name, kv_bits=bits, **wide(name))
    held = [KVCache() if type(c) is QuantizedKVCache else c for c in target.make_cache()]
    maybe_quantize_kv_cache(held, 0, 32, bits)
    steps = generate_step(
        mx.array(PROMPT),
        target.model,
        max_tokens=40,
        prompt_cache=held,
        prefill_step_size=5,
        kv_bits=bits,
        kv_group_size=32,
        quantized_kv_start=0,
    )
    truth = [token for token, _ in steps]
    assert {type(c) for c in held} >= {QuantizedKVCache} and all(type(c) is not KVCache for c in held)
    assert plain(target, GREEDY, 40) == truth
    assert drafted(target, truth, [2, 7, 7, 0], GREEDY) == truth


def test_the_group_is_the_largest_that_the_heads_allow() -> None:
    groups = {}
    for width in (32, 64, 96, 128):
        [first, *_] = family("qwen3", kv_bits=8, head_dim=width).make_cache()
        groups[width] = first.group_size
    assert groups == {32: 32, 64: 64, 96: 32, 128: 64}
