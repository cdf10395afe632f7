"""The verifier: taps without a trace, embeddings and heads of every kind, caches that forget what was rejected."""

import json
import math
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import quantize_model

from dflash_mlx.errors import CheckpointError, UnsupportedError
from dflash_mlx.target import MLXTarget, build, load_target, plain_tokens, taps
from dflash_mlx.target import caches as target_caches
from dflash_mlx.target.caches import check_kinds
from tests.kit.models import CONFIGS, LAYOUTS, VOCAB, parameter_names, tiny_target

KINDS = [*CONFIGS, *LAYOUTS]
IDS = mx.array([5, 9, 100, 7, 3, 20, 4, 77, 31])

target_of = cache(tiny_target)


def quantised(kind: str = "qwen3", **changes: Any) -> MLXTarget:
    target = tiny_target(kind, **changes)
    nn.quantize(target.model, group_size=32, bits=4)
    return MLXTarget(target.model, target.config, "quantised")


def stock(target: MLXTarget, ids: mx.array) -> mx.array:
    return target.model(ids[None], cache=make_prompt_cache(target.model))[0]


def layers_of(target: MLXTarget) -> list[nn.Module]:
    return list(target.model.layers)


def traces(target: MLXTarget) -> list[tuple[int, type, list[str]]]:
    """Class, attributes and items of every module of the model."""
    return [
        (id(module), type(module), [*module.__dict__, *module.keys()])
        for _, module in target.model.named_modules()
    ]


def read(target: MLXTarget, *pieces: list[int]) -> Any:
    """A cache that has read the pieces, one pass each."""
    held = target.make_cache()
    for ids in pieces:
        mx.eval(target.verify(mx.array(ids), held, ()).logits)
    return held


def next_logits(target: MLXTarget, held: Any, token: int = 42) -> mx.array:
    logits = target.verify(mx.array([token]), held, ()).logits
    mx.eval(logits)
    return logits


# Taps.


@pytest.mark.parametrize("kind", KINDS)
def test_taps_change_no_bit_and_leave_no_trace(kind: str) -> None:
    target = target_of(kind)
    before, names = traces(target), parameter_names(target)
    taps = range(target.num_layers)
    tapped = target.verify(IDS, target.make_cache(), taps)
    target.embed(IDS)
    target.head(mx.ones((2, target.hidden_size)))
    assert traces(target) == before
    assert parameter_names(target) == names
    assert mx.array_equal(tapped.logits, stock(target, IDS))
    assert tapped.features.shape == (9, target.num_layers * target.hidden_size)


def test_features_are_what_leaves_the_layers_in_the_order_of_the_taps() -> None:
    """Held against a listener of the test's own; a tap named twice comes twice."""
    target = target_of("llama")
    outputs: list[mx.array] = []

    class Loud(type(layers_of(target)[0])):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            outputs.append(super().__call__(*args, **kwargs))
            return outputs[-1]

    plain = type(layers_of(target)[0])
    for layer in layers_of(target):
        layer.__class__ = Loud
    try:
        stock(target, IDS)
    finally:
        for layer in layers_of(target):
            layer.__class__ = plain
    features = target.verify(IDS, target.make_cache(), (3, 0, 3)).features
    assert mx.array_equal(features, mx.concatenate([outputs[i][0] for i in (3, 0, 3)], axis=-1))


@pytest.mark.parametrize("layer", [0, 2])
def test_a_forward_that_fails_leaves_neither_taps_nor_rows(
    layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers below the one that fails have taken the rows, those above have not."""
    target = tiny_target("qwen3")
    held = read(target, [5, 9, 100])
    before = traces(target)
    attention, times = type(layers_of(target)[layer].self_attn), iter(range(99))
    stock_call = attention.__call__

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(times) == layer:
            raise KeyboardInterrupt
        return stock_call(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(attention, "__call__", failing)
        with pytest.raises(KeyboardInterrupt):
            target.verify(mx.array([1, 2, 3]), held, (0, 1, 2, 3))
    assert traces(target) == before
    assert {c.offset for c in held} == {3}
    expected = next_logits(target, read(target, [5, 9, 100]))
    assert mx.allclose(next_logits(target, held), expected, atol=1e-5)


def test_two_targets_of_one_model_take_turns_with_different_taps() -> None:
    one = tiny_target("qwen3")
    two = MLXTarget(one.model, one.config, "two")
    a, b = one.make_cache(), two.make_cache()
    got = []
    for j in range(0, 9, 3):
        got.append(one.verify(IDS[j : j + 3], a, (0, 2)))
        got.append(two.verify(IDS[j : j + 3], b, (3,)))
    whole = one.verify(IDS, one.make_cache(), (0, 2, 3)).features
    wide, narrow = (mx.concatenate([p.features for p in got[i::2]]) for i in (0, 1))
    assert mx.allclose(mx.concatenate([wide, narrow], axis=-1), whole, atol=1e-3)


def test_two_threads_share_one_model() -> None:
    """Each has taps, a cache and texts of its own; classes are swapped under one lock."""
    shared = tiny_target("qwen3")
    targets = [shared, MLXTarget(shared.model, shared.config, "other")]
    jobs = [((0, 2), IDS), ((1, 3, 2), IDS[::-1])]
    alone = [shared.verify(ids, shared.make_cache(), taps).features.tolist() for taps, ids in jobs]
    wrong: list[str] = []

    def work(
        target: MLXTarget, taps: tuple[int, ...], ids: mx.array, expected: list[Any], at: list[int]
    ) -> None:
        try:
            for _ in range(20):
                if target.verify(mx.array(at), target.make_cache(), taps).features.tolist() != expected:
                    wrong.append("features differ")
                target.embed(mx.array(at)).tolist()
                target.head(mx.ones((1, target.hidden_size))).tolist()
        except BaseException as error:
            wrong.append(repr(error))

    threads = [
        threading.Thread(target=work, args=(target, taps, ids, expected, ids.tolist()))
        for target, (taps, ids), expected in zip(targets, jobs, alone, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_plain_decoding_never_runs_into_the_taps_of_another_thread() -> None:
    """A shared model whose first layer is set to stop: mlx-lm's loop and a new target wait until it is not."""
    target = tiny_target("qwen3")
    wrong: list[str] = []

    def draw(logits: mx.array, position: int, history: mx.array) -> mx.array:
        return logits.argmax(-1)

    def plain() -> None:
        try:
            ids = plain_tokens(
                target, [1, 2, 3], max_new_tokens=3, draw=draw, draw_whole=draw, prefill_chunk=2
            )
            assert len(list(ids)) == 3
        except BaseException as error:
            wrong.append(repr(error))

    def share() -> None:
        try:
            MLXTarget(target.model, target.config, "another")
        except BaseException as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=plain), threading.Thread(target=share)]
    with target._lock, taps.stopping(layers_of(target)[0]):
        for thread in threads:
            thread.start()
        threads[0].join(0.3)
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {},
    ],
    ids=["llama3", "yarn", "plain"],
)
def test_a_target_made_in_one_thread_works_in_another(changes: dict[str, Any]) -> None:
    """Weights and rotation tables are evaluated when the target is made: a lazy array stays in its thread."""
    made: list[Any] = []

    def use() -> None:
        try:
            held = made[0].make_cache()
            made.append(made[0].verify(mx.array([1, 2, 3, 4]), held, (0,)).logits.tolist())
        except BaseException as error:
            made.append(error)

    for work in (lambda: made.append(tiny_target("llama", **changes)), use):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert isinstance(made[1], list), made[1]


# Embedding and head.


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("qwen3", 1.0), ("qwen3-tied", 1.0), ("granite", 3.0), ("gemma2", 8.0), ("mistral3", 1.0)],
)
def test_embed_gives_what_enters_layer_0(kind: str, factor: float) -> None:
    """Scaled where the model scales it: Gemma by the root of its width, Granite by a number of its config."""
    target = target_of(kind)
    model = getattr(target.model, "language_model", target.model).model
    expected = factor * model.embed_tokens.weight[IDS]
    assert mx.allclose(target.embed(IDS), expected, rtol=1e-5)
    assert target.dtype == mx.float32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["fp32", "4-bit"])
def test_the_head_makes_the_stock_logits_of_the_last_hidden_rows(kind: str, how: str) -> None:
    """Tied, untied, quantised, scaled and soft-capped heads: final norm of the last layer's rows in, logits out."""
    target = target_of(kind) if how == "fp32" else quantised(kind)
    inner = getattr(target.model, "language_model", target.model)
    trunk = inner.transformer if kind == "gpt2" and hasattr(inner, "transformer") else inner.model
    norm = next(trunk[n] for n in ("norm", "ln_f") if n in trunk)
    logits = stock(target, IDS)
    last = target.verify(IDS, target.make_cache(), (target.num_layers - 1,)).features
    assert mx.allclose(target.head(norm(last)), logits, atol=1e-4)
    assert logits.shape == (9, target.vocab_size)
    assert target.vocab_size == VOCAB


def test_sizes_come_from_the_model_whatever_the_config_calls_them() -> None:
    gpt2 = target_of("gpt2")
    assert (gpt2.hidden_size, gpt2.vocab_size, gpt2.num_layers, gpt2.max_positions) == (64, VOCAB, 3, 512)
    vision = target_of("qwen3_vl")
    assert (vision.hidden_size, vision.num_layers, vision.max_positions) == (64, 4, 512)
    assert target_of("gemma2").logit_softcap == 30.0 and target_of("qwen3").logit_softcap is None
    weights = sum(w.nbytes for _, w in tree_flatten(gpt2.model.parameters()))
    assert gpt2.nbytes == weights > 0


# Caches.


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_kept_of_a_pass_the_cache_is_that_of_a_fresh_read(kind: str) -> None:
    """And it may be changed again until the next pass, upwards as well."""
    target = target_of(kind)
    prompt, block = IDS[:4].tolist(), IDS[4:].tolist()
    for keep in range(len(block) + 1):
        held = read(target, prompt)
        tape = target.verify(mx.array(block), held, ()).tape
        for wrong in (0, len(block), keep):
            target.commit(held, tape, wrong)
        expected = next_logits(target, read(target, prompt + block[:keep]))
        assert mx.allclose(next_logits(target, held), expected, atol=2e-4)
        assert target_caches.length(held) == len(prompt) + keep + 1


def test_more_rows_than_a_pass_had_cannot_be_kept() -> None:
    target = target_of("qwen3")
    held = read(target, [1, 2])
    tape = target.verify(mx.array([3, 4]), held, ()).tape
    for keep in (-1, 3):
        with pytest.raises(AssertionError, match=f"cannot keep {keep} of 2 rows"):
            target.commit(held, tape, keep)


def test_a_snapshot_stays_valid_whatever_happens_to_the_cache() -> None:
    """mlx-lm's caches assign into their own arrays: two references to one array would both see it."""
    target = target_of("qwen3")
    held = read(target, [1, 2, 3])
    short = target.snapshot(held)
    target.verify(mx.array([4, 5, 6]), held, ())
    long = target.snapshot(held)
    expected = next_logits(target, read(target, [1, 2, 3, 4, 5, 6]))
    for other in ([9, 9, 9, 9], [8] * 300, [7]):
        target.restore(held, short)
        # Overwrites the rows of `long`, and with 300 tokens makes the buffers grow.
        assert mx.allclose(next_logits(target, held), next_logits(target, read(target, [1, 2, 3])), atol=1e-4)
        target.restore(held, short)
        mx.eval(target.verify(mx.array(other), held, ()).logits)
        target.restore(held, long)
        assert mx.allclose(next_logits(target, held), expected, atol=1e-4)
    fresh = target.make_cache()
    target.restore(fresh, long)
    assert mx.allclose(next_logits(target, fresh), expected, atol=1e-4)


def test_a_quantised_cache_forgets_and_comes_back_too() -> None:
    """Its buffers are lists of three arrays, and its own `trim` is never called."""
    target = tiny_target("qwen3", head_dim=32)

    def quantised_read(*pieces: list[int]) -> Any:
        held = [QuantizedKVCache(group_size=32, bits=8) for _ in range(4)]
        for ids in pieces:
            mx.eval(target.verify(mx.array(ids), held, ()).logits)
        return held

    held = quantised_read([5, 9, 100])
    tape = target.verify(mx.array([7, 3, 20, 4]), held, ()).tape
    target.commit(held, tape, 2)
    target.settle(held)
    saved = target.snapshot(held)
    expected = next_logits(target, quantised_read([5, 9, 100, 7, 3]))
    assert mx.allclose(next_logits(target, held), expected, atol=1e-3)
    target.commit(held, tape, 0)
    mx.eval(target.verify(mx.array([1] * 9), held, ()).logits)
    target.restore(held, saved)
    assert mx.allclose(next_logits(target, held), expected, atol=1e-3)
    exact = next_logits(target, read(target, [5, 9, 100, 7, 3]))
    assert not mx.array_equal(exact, expected), "8 bits are seen in the logits"


def test_an_empty_cache_can_be_settled_saved_and_brought_back() -> None:
    target = target_of("llama")
    held = target.make_cache()
    target.settle(held)
    empty = target.snapshot(held)
    mx.eval(target.verify(IDS, held, ()).logits)
    target.restore(held, empty)
    assert mx.allclose(target.verify(IDS, held, ()).logits, stock(target, IDS), atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("width", [2, 3, 5, 8, 16])
def test_a_block_says_what_single_steps_say(kind: str, width: int) -> None:
    """In fp32 the same argmax in every row, and logits apart by rounding only."""
    target = target_of(kind)
    prompt, block = [11, 4, 90], [(37 * j + 5) % VOCAB for j in range(width)]
    held = read(target, prompt)
    together = target.verify(mx.array(block), read(target, prompt), ()).logits
    single = mx.concatenate([next_logits(target, held, token) for token in block])
    assert mx.array_equal(together.argmax(-1), single.argmax(-1))
    assert mx.max(mx.abs(together - single)).item() < 1e-3


def test_rejections_across_the_growth_of_the_buffers() -> None:
    """mlx-lm's buffers grow in steps of 256 rows; blocks that cross the step are undone all the same."""
    target = target_of("qwen3")
    ids = [(31 * j * j + 7 * j) % VOCAB for j in range(300)]
    held = read(target, ids[:250])
    at = 250
    for keep in (0, 3, 1, 8, 0, 5, 8, 8):
        wrong = [*ids[at : at + keep], *[1] * (8 - keep)]
        tape = target.verify(mx.array(wrong), held, ()).tape
        target.commit(held, tape, keep)
        at += keep
    assert at == 283 and target_caches.length(held) == at
    expected = next_logits(target, read(target, ids[:at]))
    assert mx.allclose(next_logits(target, held), expected, atol=1e-3)


def recurrent() -> MLXTarget:
    """Its state is written by a loop of its own, which nothing can be heard of."""
    config = {
        "model_type": "mamba",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 8,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    }
    return MLXTarget(build(config), config, "mamba")


def unheard() -> MLXTarget:
    """Attention beside a selective scan."""
    config = {
        **CONFIGS["llama"],
        "model_type": "jamba",
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "num_experts": 1,
        "num_experts_per_tok": 1,
    }
    return MLXTarget(build(config), config, "jamba")


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (recurrent, "'mamba' keeps its state in ArraysCache only"),
        (unheard, "'jamba' keeps its state in 4 arrays of ArraysCache; only the 2 that"),
    ],
)
def test_a_state_that_cannot_be_undone_is_refused_by_name(make: Callable[[], MLXTarget], found: str) -> None:
    with pytest.raises(UnsupportedError, match=f"type {found}"):
        make()


def test_a_cache_of_an_unknown_kind_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where it comes from a known one: `trim` of some caches does nothing, silently, once it matters."""

    class SpiralKVCache(RotatingKVCache):
        pass

    model = tiny_target("qwen3").model
    kinds = [CacheList(KVCache(), SpiralKVCache(8)), KVCache(), KVCache(), KVCache()]
    monkeypatch.setattr(type(model), "make_cache", lambda self: kinds, raising=False)
    with pytest.raises(
        UnsupportedError, match="type 'qwen3' keeps its state in SpiralKVCache; rejected .* in KV"
    ):
        MLXTarget(model, CONFIGS["qwen3"], "spiral")


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'odd' keeps its state in no cache"):
        check_kinds([], "odd")


def test_a_model_that_keeps_its_layers_next_to_its_head_is_refused() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(4, 4)]

    with pytest.raises(UnsupportedError, match="'flat' model keeps its layers where they cannot be told"):
        MLXTarget(Flat(), {"model_type": "flat"}, "flat")


def test_a_forward_that_taps_would_misread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a new mlx-lm put the final norm into the model above the trunk: `head` would not see a factor."""
    target = tiny_target("llama")
    stock_call = type(target.model).__call__

    class Normed(type(target.model)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            logits = stock_call(self, *args, **kwargs)
            return logits / mx.linalg.norm(logits, axis=-1, keepdims=True)

    target.model.__class__ = Normed
    with pytest.raises(
        UnsupportedError, match="'llama' model is not one that hidden states can be read from"
    ):
        MLXTarget(target.model, target.config, "normed")


# Types.


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_a_half_precision_target_stays_half_precision(dtype: mx.Dtype) -> None:
    target = tiny_target("qwen3", dtype=dtype)
    assert target.dtype == dtype
    made = target.verify(IDS, held := target.make_cache(), (0, 3))
    assert made.logits.dtype == made.features.dtype == held[0].keys.dtype == dtype
    block, single = made.logits, stock(target, IDS)
    assert mx.array_equal(block, single)
    steps = mx.concatenate(
        [next_logits(target, fresh, i) for fresh in [target.make_cache()] for i in IDS.tolist()]
    )
    spread = mx.max(mx.abs(block)).item()
    assert mx.max(mx.abs(block - steps)).item() < 0.1 * spread
    # A drafter in fp32 may hand its rows to a head in half precision.
    assert target.head(mx.ones((2, 64), mx.float32)).shape == (2, VOCAB)


# Folders.


def folder_of(target: MLXTarget, path: Path, config: dict[str, Any] | None = None, **extra: mx.array) -> Path:
    weights = dict(tree_flatten(target.model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), {**weights, **extra}, metadata={"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config or target.config))
    return path


def test_a_folder_becomes_the_model_it_was_written_from(tmp_path: Path) -> None:
    made = tiny_target("qwen3-tied")
    loaded = load_target(folder_of(made, tmp_path), dtype=None, name="a folder")
    assert loaded.name == "a folder" and loaded.model_type == "qwen3"
    assert mx.array_equal(stock(loaded, IDS), stock(made, IDS))


@pytest.mark.parametrize(("dtype", "expected"), [(None, mx.float32), (mx.bfloat16, mx.bfloat16)])
def test_weights_become_the_type_asked_for(
    tmp_path: Path, dtype: mx.Dtype | None, expected: mx.Dtype
) -> None:
    loaded = load_target(folder_of(tiny_target("llama"), tmp_path), dtype=dtype, name="t")
    assert {w.dtype for _, w in tree_flatten(loaded.model.parameters())} == {expected}
    assert loaded.dtype == expected


@pytest.mark.parametrize("dtype", [None, mx.float32], ids=["kept", "expanded"])
def test_a_quantised_folder_is_kept_or_expanded_to_fp32(tmp_path: Path, dtype: mx.Dtype | None) -> None:
    """Expanded on a CPU, where quantised products are slow: the same numbers, other products."""
    made = tiny_target("qwen3")
    model, config = quantize_model(made.model, dict(made.config), group_size=32, bits=4)
    source = MLXTarget(model, config, "4-bit")
    loaded = load_target(folder_of(source, tmp_path, config), dtype=dtype, name="4-bit")
    quantised_left = [m for _, m in loaded.model.named_modules() if isinstance(m, nn.QuantizedLinear)]
    assert bool(quantised_left) == (dtype is None)
    assert loaded.dtype == mx.float32
    assert mx.allclose(stock(loaded, IDS), stock(source, IDS), atol=1e-3)
    assert loaded.nbytes > 3 * source.nbytes if dtype else loaded.nbytes == source.nbytes


def test_tensors_for_multi_token_prediction_are_left_out_as_mlx_lm_leaves_them_out(tmp_path: Path) -> None:
    made = tiny_target("mimo")
    extra = {"model.mtp_layers.0.input_proj.weight": mx.zeros((64, 128))}
    loaded = load_target(folder_of(made, tmp_path, **extra), dtype=None, name="mimo")
    assert mx.array_equal(stock(loaded, IDS), stock(made, IDS))


def test_a_vision_checkpoint_becomes_its_language_model(tmp_path: Path) -> None:
    made = tiny_target("mistral3")
    extra = {"vision_tower.patch_conv.weight": mx.zeros((4, 4))}
    loaded = load_target(folder_of(made, tmp_path, **extra), dtype=None, name="mistral3")
    assert mx.array_equal(loaded.verify(IDS, loaded.make_cache(), (1,)).logits, stock(made, IDS))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "no_such_thing"}, UnsupportedError, "t: mlx-lm knows no model of this type"),
        ({"num_hidden_layers": 5}, CheckpointError, "t: the weights in .* do not fit .*layers.4"),
        ({"num_hidden_layers": 3}, CheckpointError, "t: the weights in .* do not fit .*layers.3"),
        ({"hidden_size": 32}, CheckpointError, "t: the weights in .* do not fit "),
        ({"hidden_size": None}, CheckpointError, "t: config.json in .* missing .*'hidden_size'"),
        ({"model_type": None}, CheckpointError, "t: config.json in .* lacks 'model_type'"),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused_in_one_sentence(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    made = target_of("qwen3")
    config = {k: v for k, v in {**made.config, **change}.items() if v is not None}
    with pytest.raises(error, match=message):
        load_target(folder_of(made, tmp_path, config), dtype=None, name="t")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3"]))
    with pytest.raises(CheckpointError, match="t: .* has no config.json with model.*safetensors"):
        load_target(tmp_path, dtype=None, name="t")


def test_gemma_s_factor_is_the_root_of_its_width() -> None:
    """The number the embedding test relies on."""
    assert math.sqrt(target_of("gemma2").hidden_size) == 8.0
