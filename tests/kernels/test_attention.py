"""Block attention: the definition against plain loops, and the Metal bodies, on the emulator, against it."""

import math
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from tests import metal_emulator as emulator
from tests.metal_emulator.support import require

from dflash_mlx.kernels.attention import (
    block_attention,
    block_attention_reference,
    cached_block_attention,
    cached_block_attention_reference,
    contest,
    shape_class,
    supports,
)
from dflash_mlx.kernels.attention_plan import Form, Plan, plan, raced_rows, register_limit, registers
from dflash_mlx.kernels.choice import NO_KERNELS, Choices

# allowed difference to the definition in fp32, against 1 + |expected|
TOLERANCE = {mx.float32: 4e-6, mx.float16: 1.5e-3, mx.bfloat16: 1e-2}
FORMS: tuple[Form, ...] = ("matrix", "vector")


@dataclass(frozen=True)
class Case:
    """One call; the context buffer holds NaN wherever the kernel has nothing to read."""

    context: int = 40
    rows: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dtype: mx.Dtype = mx.float16
    mode: str = "full"
    window: int | None = None
    splits: int | None = 3

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("mlx.core.")
        return (
            f"c{self.context}-s{self.rows}-h{self.heads}x{self.kv_heads}-d{self.head_dim}-{kind}-{self.mode}"
            f"-w{self.window}-p{self.splits}"
        )

    def arrays(self, seed: int) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        keys = mx.random.split(mx.random.key(seed), 5)
        capacity = self.context + 7
        context = (1, self.kv_heads, capacity, self.head_dim)
        block = (1, self.kv_heads, self.rows, self.head_dim)
        shapes = [(1, self.heads, self.rows, self.head_dim), context, context, block, block]
        q, ck, cv, bk, bv = (
            mx.random.normal(shape, key=key).astype(self.dtype)
            for shape, key in zip(shapes, keys, strict=True)
        )
        row = mx.arange(capacity)[:, None]
        first = 0 if self.window is None else max(0, self.context - self.window + 1)
        read = (row >= first) & (row < self.context)
        return (
            q,
            mx.where(read, ck, mx.nan).astype(self.dtype),
            mx.where(read, cv, mx.nan).astype(self.dtype),
            bk,
            bv,
        )

    def layout(self) -> Plan:
        """In the form that the shape takes by itself."""
        return plan(
            group=self.heads // self.kv_heads,
            rows=self.rows,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            itemsize=self.dtype.size,
            context_length=self.context,
            window=self.window,
        )

    def options(self, seed: int) -> dict[str, object]:
        ancestors = mx.array(random_tree(self.rows, seed), mx.uint32) if self.mode == "ancestors" else None
        return {
            "scale": self.head_dim**-0.5,
            "causal": self.mode == "causal",
            "window": self.window,
            "ancestors": ancestors,
        }


def random_tree(rows: int, seed: int) -> list[int]:
    """Ancestor masks of a tree whose parents come before their children; row 0 is the root."""
    chance = np.random.default_rng(seed)
    masks = [1]
    for row in range(1, rows):
        masks.append(masks[int(chance.integers(row))] | 1 << row)
    return masks


def plain_loops(case: Case, arrays, options) -> np.ndarray:
    """The docstring of `block_attention`, word by word, in float64."""
    q, ck, cv, bk, bv = (np.array(a.astype(mx.float32), np.float64)[0] for a in arrays)
    masks = None if options["ancestors"] is None else options["ancestors"].tolist()
    out = np.zeros(q.shape)
    for head in range(case.heads):
        kv = head // (case.heads // case.kv_heads)
        for row in range(case.rows):
            depth = row if masks is None else bin(masks[row]).count("1") - 1
            position = case.context + depth
            context = [j for j in range(case.context) if case.window is None or position - j < case.window]
            if masks is not None:
                block = [j for j in range(case.rows) if masks[row] >> j & 1]
            else:
                block = list(range(row + 1 if options["causal"] else case.rows))
            k = np.concatenate([ck[kv, context], bk[kv, block]])
            v = np.concatenate([cv[kv, context], bv[kv, block]])
            score = k @ q[head, row] * options["scale"]
            weight = np.exp(score - score.max())
            out[head, row] = weight @ v / weight.sum()
    return out[None]


def emulated(mode: str, seed: int):
    require()
    return emulator.factory(mode=mode, seed=seed)


def check(case: Case, form: Form | None, *factories) -> None:
    """Every factory gives the same bits, within the tolerance of the definition."""
    arrays, options = case.arrays(0), case.options(0)
    got, *others = [
        block_attention(
            *arrays[:3], case.context, *arrays[3:], **options, form=form, splits=case.splits, factory=f
        )
        for f in factories
    ]
    assert got.dtype == case.dtype and got.shape == arrays[0].shape
    assert all(mx.array_equal(got, other) for other in others), f"{case}, {form}: depends on the schedule"
    wide = [a.astype(mx.float32) for a in arrays]
    expected = block_attention_reference(*wide[:3], case.context, *wide[3:], **options)
    error = mx.abs(got.astype(mx.float32) - expected) / (1 + mx.abs(expected))
    assert float(error.max()) < TOLERANCE[case.dtype], f"{case}, {form}: off by {float(error.max()):.2g}"


def small_cases() -> list[Case]:
    """Tiny odd shapes; the tile of the matrix form is 32 keys for 64 half-precision elements."""
    base = Case()
    cases = [replace(base, context=c, mode=m) for c in (0, 1, 31, 32, 33) for m in ("full", "causal")]
    cases += [replace(base, rows=s, mode="causal") for s in (1, 2, 3, 7, 8, 9, 16, 31, 32)]
    cases += [replace(base, rows=s, mode="ancestors", window=12) for s in (2, 7, 8, 16, 32)]
    # window edges: itself, less than the block, all but one, all, more than all
    cases += [replace(base, mode=m, window=w) for w in (1, 3, 40, 41, 45, 50) for m in ("full", "causal")]
    cases += [replace(base, context=4, window=9), replace(base, context=0, window=2, mode="causal")]
    cases += [replace(base, heads=g, kv_heads=1, rows=6, splits=2) for g in range(1, 9)]
    cases += [replace(base, heads=8, kv_heads=1, rows=32, splits=1)]  # more than a threadgroup's rows
    cases += [replace(base, heads=8, kv_heads=1, rows=16, splits=2)]  # as many as a threadgroup takes
    cases += [replace(base, splits=s) for s in (1, 2, 9, 50)]  # more splits than tiles, and than keys
    dims = {mx.float16: (64, 80, 96, 128, 256), mx.bfloat16: (64, 256), mx.float32: (80, 128, 256)}
    cases += [replace(base, head_dim=d, dtype=t, mode="causal") for t, ds in dims.items() for d in ds]
    return cases


@pytest.mark.parametrize(
    "case",
    [
        Case(mode=m, window=w, context=c, dtype=mx.float32)
        for m in ("full", "causal", "ancestors")
        for w in (None, 1, 3, 20, 99)
        for c in (0, 1, 33)
    ],
    ids=str,
)
def test_the_definition_is_what_its_docstring_says(case):
    arrays, options = case.arrays(3), case.options(3)
    got = block_attention_reference(*arrays[:3], case.context, *arrays[3:], **options)
    assert np.abs(np.array(got) - plain_loops(case, arrays, options)).max() < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_kernel_equals_the_definition_under_checks(form):
    """The fast case of the long list below: a window that cuts, a tree, tails everywhere."""
    check(Case(context=37, rows=5, mode="ancestors", window=20), form, emulated("check", 1))


def test_kernel_that_reads_its_queries_again_equals_the_definition_under_checks():
    """The fast case of `reread_cases`: in float32 few rows suffice."""
    check(reread_cases()[2], "matrix", emulated("check", 1))


@pytest.mark.parametrize("rows", (1, 16))
def test_kernel_equals_the_definition_on_a_drafters_shape(rows):
    """One row takes the vector form, sixteen the matrix form."""
    check(Case(context=301, rows=rows, heads=8, head_dim=128, splits=None), None, emulated("fast", 0))


def reread_cases() -> list[Case]:
    """Shapes whose queries are read again in every tile: 8 keys in float32, 24 in half precision."""
    wide = Case(head_dim=256, dtype=mx.float32, splits=2)
    cases = [replace(wide, context=c, mode="causal") for c in (0, 3, 4, 20)]
    cases += [replace(wide, context=21, rows=4, mode="ancestors", window=9, splits=5)]
    # more SIMD-groups than run whatever their registers
    tall = Case(head_dim=256, heads=8, kv_heads=1, rows=16, mode="causal")
    cases += [replace(tall, context=31, splits=1), replace(tall, context=33, window=20, splits=2)]
    cases += [replace(tall, context=40, heads=7, rows=15, mode="ancestors", dtype=mx.bfloat16, splits=3)]
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("case", reread_cases(), ids=str)
def test_kernel_equals_the_definition_where_queries_are_read_again(case):
    layout = case.layout()
    assert layout.query_fragments < case.head_dim // 8 and layout.row_groups == 1
    check(case, "matrix", *(emulated("check", seed) for seed in range(4)))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_kernel_equals_the_definition_on_odd_shapes(case, form):
    check(case, form, *(emulated("check", seed) for seed in range(4)))


REAL = [
    Case(
        context=1037,
        rows=16,
        heads=8,
        kv_heads=2,
        head_dim=128,
        dtype=dtype,
        splits=None,
        mode=mode,
        window=window,
    )
    for dtype in TOLERANCE
    for mode, window in (("full", None), ("causal", 512))
] + [
    Case(
        context=2100,
        rows=4,
        heads=12,
        kv_heads=2,
        head_dim=256,
        dtype=mx.bfloat16,
        splits=None,
        mode="causal",
    ),
    Case(
        context=2100,
        rows=32,
        heads=8,
        kv_heads=1,
        head_dim=64,
        dtype=mx.float16,
        splits=None,
        mode="ancestors",
    ),
    Case(
        context=2100,
        rows=16,
        heads=8,
        kv_heads=1,
        head_dim=256,
        dtype=mx.bfloat16,
        splits=None,
        mode="causal",
    ),
    Case(context=999, rows=1, heads=9, kv_heads=3, head_dim=64, dtype=mx.float32, splits=None, mode="causal"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "form"), [(case, None) for case in REAL] + [(case, "vector") for case in REAL[:2]], ids=str
)
def test_kernel_equals_the_definition_on_real_shapes(case, form):
    check(case, form, emulated("fast", 2))


@pytest.mark.metal
@pytest.mark.skipif(not mx.metal.is_available(), reason="needs a Metal device")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", small_cases() + reread_cases() + REAL, ids=str)
def test_kernel_equals_the_definition_on_metal(case, form):
    check(case, form, mx.fast.metal_kernel)


@pytest.mark.parametrize("form", FORMS)
def test_strided_views_are_read_in_place(form):
    """Slices of a larger buffer, transposed queries, values whose last axis is not contiguous."""
    case = Case(context=21, rows=4, splits=2)
    _, buffer_k, buffer_v, _, _ = replace(case, context=60).arrays(5)
    q = mx.random.normal((1, case.rows, case.heads, case.head_dim), key=mx.random.key(6)).astype(case.dtype)
    q = q.transpose(0, 2, 1, 3)
    keys, values = buffer_k[..., :25, :], buffer_v[..., :25, :]
    block_v = mx.contiguous(values[..., 21:, :].swapaxes(2, 3)).swapaxes(2, 3)
    where = (q, keys, values, 21, keys[..., 21:, :], block_v)
    call = {"scale": 0.125, "causal": False, "ancestors": mx.array([1, 3, 5, 13], mx.uint32)}

    def without_copies(*, name: str, ensure_row_contiguous: bool, **rest):
        assert not ensure_row_contiguous or "merge" in name
        return emulated("check", 0)(name=name, ensure_row_contiguous=ensure_row_contiguous, **rest)

    got = block_attention(*where, **call, form=form, splits=2, factory=without_copies)
    expected = block_attention_reference(*where, **call)
    assert float(mx.abs(got - expected).max()) < 2e-3


@pytest.mark.parametrize("mode", ("causal", "ancestors"))
@pytest.mark.parametrize("context", (0, 21))
def test_a_cache_that_holds_the_block_is_attended_alike(context, mode):
    """What a verify pass hands over: the slice that a stock cache returns."""
    case = Case(context=context, rows=4, mode=mode, window=20)
    q, context_k, context_v, block_k, block_v = case.arrays(7)
    options = case.options(7)
    expected = block_attention_reference(q, context_k, context_v, context, block_k, block_v, **options)
    buffers = [
        mx.concatenate([old[..., :context, :], block, old[..., :3, :]], axis=2)
        for old, block in ((context_k, block_k), (context_v, block_v))
    ]
    keys, values = (buffer[..., : context + 4, :] for buffer in buffers)
    assert mx.array_equal(cached_block_attention_reference(q, keys, values, **options), expected)
    got = cached_block_attention(q, keys, values, **options, factory=emulated("check", 0))
    assert float(mx.abs(got - expected).max()) < 2e-3


class Refusing:
    """A factory that no call may reach."""

    def __call__(self, **_):
        raise AssertionError("a kernel was built")


def unsupported() -> dict[str, Case]:
    return {
        "head dimension": Case(head_dim=72),
        "too many rows": Case(rows=33),
        "too many query heads": Case(heads=9, kv_heads=1),
    }


@pytest.mark.parametrize("case", unsupported().values(), ids=unsupported().keys())
def test_outside_its_limits_the_reference_answers(case):
    arrays, options = case.arrays(0), case.options(0)
    assert not supports(*arrays)
    got = block_attention(*arrays[:3], case.context, *arrays[3:], **options, factory=Refusing())
    assert mx.array_equal(got, block_attention_reference(*arrays[:3], case.context, *arrays[3:], **options))


def test_limits_see_dtypes_batches_and_an_empty_buffer():
    arrays = Case().arrays(0)
    assert supports(*arrays)
    assert not supports(arrays[0].astype(mx.float32), *arrays[1:])
    assert not supports(*(mx.concatenate([a, a]) for a in arrays))
    assert not supports(mx.concatenate([arrays[0], arrays[0]]), *arrays[1:])
    assert not supports(*(a.astype(mx.float64) for a in arrays))
    assert not supports(arrays[0], arrays[1][:, :, :0], arrays[2][:, :, :0], *arrays[3:])
    assert not supports(*arrays[:4], arrays[4][..., :32])


def test_nothing_chosen_means_the_reference():
    case = Case()
    arrays, options = case.arrays(0), case.options(0)
    where = (*arrays[:3], case.context, *arrays[3:])
    got = block_attention(*where, **options, choices=NO_KERNELS, factory=Refusing())
    assert mx.array_equal(got, block_attention_reference(*where, **options))
    chosen = Choices(
        frozenset({("block_attention", shape_class(arrays[0], arrays[1], case.context, None))}), Refusing()
    )
    with pytest.raises(AssertionError, match="a kernel was built"):
        block_attention(*where, **options, choices=chosen)


def test_a_contest_runs_both_arms_and_stands_for_every_call_of_its_class():
    arm = contest(5, heads=4, kv_heads=2, head_dim=64, keys=30, dtype=mx.float32)
    q, keys, values = arm.inputs(0)
    (expected,) = arm.reference(q, keys, values)
    (got,) = arm.candidate(emulated("fast", 0), q, keys, values)
    assert float(mx.abs(got - expected).max()) < arm.bound
    for rows, context in ((5, 25), (8, 800), (q.shape[2], keys.shape[2] - q.shape[2])):
        assert arm.shape_class == shape_class(mx.zeros((1, 4, rows, 64)), keys, context, None)
    assert arm.shape_class != shape_class(mx.zeros((1, 4, 9, 64)), keys, 25, None)


@pytest.mark.parametrize("form", (None, "vector"))
@pytest.mark.parametrize("itemsize", (2, 4))
@pytest.mark.parametrize("head_dim", (64, 80, 96, 128, 256))
def test_every_plan_stays_within_what_any_apple_gpu_runs(head_dim, itemsize, form):
    for rows in range(1, 33):
        for group in range(1, 9):
            for context, window in ((0, None), (300, None), (40_000, None), (40_000, 2048)):
                layout = plan(
                    group=group,
                    rows=rows,
                    kv_heads=2,
                    head_dim=head_dim,
                    itemsize=itemsize,
                    context_length=context,
                    window=window,
                    form=form,
                )
                assert 1 <= layout.simdgroups <= 16 and layout.splits >= 1
                if layout.form == "matrix":
                    held = layout.query_fragments
                    assert layout.tile % 8 == 0 and head_dim // 8 % held == 0
                    memory = 2 * layout.tile * (head_dim * itemsize + 16)
                    assert memory <= (20 if held * 8 == head_dim else 25) * 1024
                    taken = registers(head_dim, itemsize, held, layout.tile)
                    assert taken <= register_limit(layout.simdgroups)
                    covered = layout.row_groups * layout.simdgroups * 8
                    assert group * rows <= covered < group * rows + 8 * layout.row_groups + 8
                    assert layout.row_groups == 1 or group * rows > 128
                else:
                    assert layout.simdgroups == 8
                assert layout.keys == rows + (context if window is None else min(context, window - 1))
                assert layout.keys < 256 or math.ceil(layout.keys / layout.splits) >= 64


def test_registers_are_those_of_an_apple_core():
    """208 KiB a core, and no thread takes more than 128; a threadgroup runs on one core."""
    for simdgroups in range(1, 17):
        assert register_limit(simdgroups) <= min(128, 208 * 1024 // (4 * 32 * simdgroups))


def test_a_class_is_tried_on_its_largest_threadgroup():
    """What 288 threads may take says nothing of 512: the rows that need them are the ones to try."""
    assert raced_rows(16, 4) == 9  # 64 stacked rows at most
    assert raced_rows(16, 8) == 16
    assert raced_rows(32, 6) == 21  # 126 stacked rows; from 129 on there are two smaller threadgroups
    arm = contest(16, heads=8, kv_heads=1, head_dim=256, keys=1000, dtype=mx.bfloat16)
    assert arm.inputs(0)[0].shape[2] == 16


FAULTS = [  # case, the line, what it becomes
    ("matrix", "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    for (int e", "    for (int e"),
    ("matrix", "    threadgroup_barrier(mem_flags::mem_threadgroup);\n\n", "\n"),
    ("matrix", "} else if (key < total) {", "} else {"),
    ("matrix", "row < rows;", "row <= rows;"),
    ("matrix", "(lane / 2) % 4", "(lane / 4) % 4"),
    ("matrix", "tile_best = max(tile_best, simd_shuffle_xor(tile_best, ushort(8)));", ""),
    ("matrix", "LD, ulong2(0, 0), true)", "LD, ulong2(0, 0), false)"),
    ("matrix", "sum = sum * factor + tile_sum;", "sum = sum + tile_sum;"),
    ("matrix", "(tiles + splits - 1) / splits", "max(1, tiles / splits)"),
    ("reread", "load_queries(qf, q_row, i0 * 8 +", "load_queries(qf, q_row, "),
    ("reread", "i0 += QF", "i0 += QF + 1"),
    ("reread", "if (QF < ND) {", "if (QF < ND && t == split * share) {"),
    ("reread", "(i0 + i) * 8", "i * 8"),
    ("reread", "    threadgroup_barrier(mem_flags::mem_threadgroup);\n\n", "\n"),
    ("vector", "key += NSG", "key += NSG + 1"),
    ("vector", "if (lane == 0) {", "{"),
    ("vector", "    threadgroup_barrier(mem_flags::mem_threadgroup);\n  }\n", "  }\n"),
    ("vector", "mem_flags::mem_threadgroup", "mem_flags::mem_none"),
    ("vector", "min(row0 + r, rows - 1)", "row0 + r"),
    ("vector", "sum[r] = 0;", ""),
]


FAULT_CASES: dict[str, tuple[Form, Case]] = {
    "matrix": ("matrix", Case(context=75, rows=5, heads=3, kv_heads=1, splits=2, mode="causal")),
    "reread": (
        "matrix",
        Case(context=29, rows=5, heads=3, kv_heads=1, head_dim=256, dtype=mx.float32, splits=2),
    ),
    "vector": ("vector", Case(context=75, rows=5, heads=3, kv_heads=1, splits=2, mode="causal")),
}


@pytest.mark.slow
@pytest.mark.parametrize(("form", "line", "fault"), FAULTS, ids=range(len(FAULTS)))
def test_a_planted_fault_is_seen(form, line, fault):
    planted = []

    def factory(*, source: str, **rest):
        planted.append(source.count(line))
        return emulated("check", 1)(source=source.replace(line, fault, 1), **rest)

    with pytest.raises((emulator.KernelFault, AssertionError)):
        check(FAULT_CASES[form][1], FAULT_CASES[form][0], factory)
    assert planted[0] >= 1, "the body no longer has this line"
