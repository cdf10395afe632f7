"""Real shapes for the kernels: models, the parts of a verify pass and of a draft, and their calls.

Drafters: their published configs. Targets: public configs (Qwen3-8B, Qwen3.5-27B, Qwen3.5-35B-A3B); 4 bits in
groups of 64, as the common conversions for MLX have them. Arrays are lazy: making a case costs nothing until it
is measured.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dflash_mlx.kernels import attention, context_rows, delta_replay, gathered_qmm, greedy_walk, rows_qmm
from dflash_mlx.kernels.quantised import Quantised, random_weight

# isort: split
import mlx.core as mx  # after dflash_mlx, which puts OpenBLAS in front of MLX's own

BF16 = mx.bfloat16
CONTEXTS = (1024, 8192, 32768)


@dataclass(frozen=True)
class Model:
    """A target and its drafter, as their configs have it."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    draft_heads: tuple[int, int]  # query and key/value heads of 128
    draft_window: int | None
    intermediate: int | None = None
    quantised: bool = True
    gated: bool = True  # a query projection twice as wide, its half a gate
    delta: tuple[int, int, int] | None = None  # key heads, value heads, their width, of the delta-rule layers
    experts: tuple[int, int, int] | None = None  # all, chosen, intermediate


MODELS = (
    Model("Qwen3-8B bf16", 4096, 32, 8, 128, 151936, (32, 8), None, 12288, quantised=False, gated=False),
    Model("Qwen3.5-27B 4-bit", 5120, 24, 4, 256, 248320, (32, 8), 4096, 17408, delta=(16, 48, 128)),
    Model(
        "Qwen3.5-35B-A3B 4-bit",
        2048,
        16,
        2,
        256,
        248320,
        (32, 8),
        4096,
        delta=(16, 32, 128),
        experts=(256, 8, 512),
    ),
)


@dataclass
class Case:
    """One call of one kernel."""

    model: str
    kernel_name: str
    part: str
    least: int  # bytes
    arrays: list[mx.array]
    kernel: Callable[..., Sequence[mx.array]]  # (factory)
    stock: Callable[[], Sequence[mx.array]]


def cases(rows: int) -> Iterator[Case]:
    """Every kernel on every model, `rows` rows to a pass."""
    for model in MODELS:
        for context in CONTEXTS:
            yield attend(model, "verify", rows, model.heads, model.kv_heads, model.head_dim, context, None)
            yield attend(model, "draft", rows, *model.draft_heads, 128, context, None)
        if model.draft_window:
            yield attend(
                model, "draft, window", rows, *model.draft_heads, 128, CONTEXTS[-1], model.draft_window
            )
        yield inject(model, rows)
        if model.quantised:
            for part, columns, depth in projections(model):
                yield product(model, part, rows, columns, depth)
        if model.experts:
            _, _, width = model.experts
            yield gathered(model, "expert gate, up", rows, width, model.hidden)
            yield gathered(model, "expert down", rows, model.hidden, width)
        if model.delta:
            yield replay(model, rows)
        yield walk(model, rows)


def projections(model: Model) -> list[tuple[str, int, int]]:
    """(part, columns, depth) of the quantised products of a target."""
    attended = model.heads * model.head_dim
    parts = [
        ("q", attended * (2 if model.gated else 1), model.hidden),
        ("k, v", model.kv_heads * model.head_dim, model.hidden),
        ("o", model.hidden, attended),
    ]
    if model.delta:
        key_heads, heads, width = model.delta
        parts += [
            ("delta qkv", (2 * key_heads + heads) * width, model.hidden),
            ("delta z", heads * width, model.hidden),
            ("delta a, b", heads, model.hidden),
            ("delta out", model.hidden, heads * width),
        ]
    if model.intermediate:
        parts += [("gate, up", model.intermediate, model.hidden), ("down", model.hidden, model.intermediate)]
    return [*parts, ("head", model.vocabulary, model.hidden)]


def normal(*shape: int, dtype: mx.Dtype = BF16) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(math.prod(shape) % 9973)).astype(dtype)


def attend(
    model: Model, who: str, rows: int, heads: int, kv_heads: int, dim: int, context: int, window: int | None
) -> Case:
    q, block_k, block_v = (normal(1, h, rows, dim) for h in (heads, kv_heads, kv_heads))
    buffer_k, buffer_v = (normal(1, kv_heads, context, dim) for _ in range(2))
    arrays = (q, buffer_k, buffer_v, context, block_k, block_v)
    causal = who != "draft"
    keys = rows + (context if window is None else min(context, window - 1))
    return Case(
        model.name,
        "block_attention",
        f"{who}, {context // 1024}k",
        2 * q.nbytes + 2 * kv_heads * keys * dim * 2,
        [a for a in arrays if isinstance(a, mx.array)],
        lambda factory: [
            attention.block_attention(*arrays, scale=dim**-0.5, causal=causal, window=window, factory=factory)
        ],
        lambda: [attention.block_attention_reference(*arrays, scale=dim**-0.5, causal=causal, window=window)],
    )


def inject(model: Model, rows: int) -> Case:
    heads = model.draft_heads[1]
    k, v = normal(2 * rows, heads * 128), normal(2 * rows, heads * 128)
    call = {
        "heads": heads,
        "norm_weight": mx.ones(128, BF16),
        "eps": 1e-6,
        "inverse_frequencies": context_rows.inverse_frequencies(128, 1e6),
        "offset": 8192,
    }
    return Case(
        model.name,
        "context_rows",
        f"{rows} context and {rows} block rows",
        4 * k.nbytes,
        [k, v],
        lambda factory: context_rows.context_rows(k, v, **call, factory=factory),
        lambda: context_rows.context_rows_reference(k, v, **call),
    )


def weight_of(columns: tuple[int, ...], depth: int) -> Quantised:
    return random_weight(columns, depth, group_size=64, bits=4, dtype=BF16, key=mx.random.key(depth))


def weight_bytes(columns: int, depth: int) -> int:
    return columns * (depth // 2 + depth // 64 * 4)


def product(model: Model, part: str, rows: int, columns: int, depth: int) -> Case:
    x, weight = normal(rows, depth), weight_of((columns,), depth)
    return Case(
        model.name,
        "rows_qmm",
        f"{part} {columns} x {depth}",
        weight_bytes(columns, depth) + 2 * rows * (depth + columns),
        [x, *weight[:3]],
        lambda factory: [rows_qmm.rows_qmm_kernel(x, weight, factory=factory)],
        lambda: [rows_qmm.rows_qmm_reference(x, weight)],
    )


def gathered(model: Model, part: str, rows: int, columns: int, depth: int) -> Case:
    total, chosen, _ = model.experts
    x, weight = normal(rows * chosen, depth), weight_of((total, columns), depth)
    ranks = mx.argsort(mx.random.uniform(shape=(rows, total), key=mx.random.key(rows)), axis=-1)
    ids = mx.sort(ranks[:, :chosen].reshape(-1)).astype(mx.uint32)
    touched = len(set(ids.tolist()))
    return Case(
        model.name,
        "rows_qmm_gathered",
        f"{part} {columns} x {depth}, {touched} of {total}",
        touched * weight_bytes(columns, depth) + 2 * rows * chosen * (depth + columns),
        [x, ids, *weight[:3]],
        lambda factory: [
            gathered_qmm.gathered_qmm_kernel(x, ids, weight, rows_per_expert=rows, factory=factory)
        ],
        lambda: [gathered_qmm.gathered_qmm_reference(x, ids, weight)],
    )


def replay(model: Model, rows: int) -> Case:
    key_heads, heads, dim = model.delta
    kept, taps, channels = rows // 2, 3, (2 * key_heads + heads) * dim
    key = normal(1, rows, key_heads, dim) * (dim**-0.5)
    v, state = normal(1, rows, heads, dim), normal(1, heads, dim, dim, dtype=mx.float32)
    decay, beta = mx.full((1, rows, heads), 0.9), mx.full((1, rows, heads), 0.5, BF16)
    conv, count = normal(1, taps + rows, channels), mx.array([kept], mx.int32)
    arrays = [key, v, decay, beta, state, conv, count]
    inputs = kept * (2 * key_heads * dim + 2 * heads * dim + 6 * heads)
    return Case(
        model.name,
        "delta_replay",
        f"{kept} of {rows} rows, {heads} heads",
        2 * state.nbytes + inputs + 2 * taps * channels * 2,
        arrays,
        lambda factory: delta_replay.delta_replay_kernel(*arrays, factory=factory),
        lambda: delta_replay.delta_replay_reference(*arrays),
    )


def walk(model: Model, rows: int) -> Case:
    logits, proposal = normal(rows, model.vocabulary), mx.zeros(rows - 1, mx.int32)
    return Case(
        model.name,
        "greedy_walk",
        f"{rows} x {model.vocabulary}",
        logits.nbytes + 4 * (2 * rows),
        [logits, proposal],
        lambda factory: [greedy_walk.greedy_walk_kernel(logits, proposal, factory=factory)],
        lambda: [greedy_walk.greedy_walk_reference(logits, proposal)],
    )
