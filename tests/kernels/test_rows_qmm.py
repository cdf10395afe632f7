"""Products with quantised weights, dense and gathered by expert: the Metal bodies against the product in fp32."""

import functools
from dataclasses import dataclass, replace

import mlx.core as mx
import pytest
from tests import metal_emulator as emulator
from tests.metal_emulator.support import require

from dflash_mlx.kernels import gathered_qmm, rows_qmm
from dflash_mlx.kernels.choice import NO_KERNELS, Choices, Chooser
from dflash_mlx.kernels.gathered_qmm import gathered_qmm_exact, gathered_qmm_kernel, gathered_qmm_reference
from dflash_mlx.kernels.quantised import BOUNDS, Quantised, plan, random_weight
from dflash_mlx.kernels.rows_qmm import rows_qmm_exact, rows_qmm_kernel, rows_qmm_reference


@dataclass(frozen=True)
class Case:
    """One product; `experts` of them make it a gathered one, with `chosen` for each row."""

    rows: int = 5
    columns: int = 33
    depth: int = 96
    bits: int = 4
    group: int = 32
    dtype: mx.Dtype = mx.float16
    scales: mx.Dtype | None = None
    experts: int = 0
    chosen: int = 2

    def __str__(self) -> str:
        types = "-".join(str(t).removeprefix("mlx.core.") for t in (self.dtype, self.scales) if t)
        gathered = f"-{self.chosen}of{self.experts}" if self.experts else ""
        return f"m{self.rows}-n{self.columns}-k{self.depth}-b{self.bits}-g{self.group}-{types}{gathered}"

    def weight(self, seed: int = 0) -> Quantised:
        leading = (self.experts, self.columns) if self.experts else (self.columns,)
        w = mx.random.normal((*leading, self.depth), key=mx.random.key(seed)).astype(
            self.scales or self.dtype
        )
        return Quantised(*mx.quantize(w, group_size=self.group, bits=self.bits), self.group, self.bits)

    def x(self, seed: int = 0) -> mx.array:
        rows = self.rows * self.chosen if self.experts else self.rows
        return mx.random.normal((rows, self.depth), key=mx.random.key(100 + seed)).astype(self.dtype)

    def ids(self, seed: int = 0) -> mx.array:
        ranks = mx.argsort(
            mx.random.uniform(shape=(self.rows, self.experts), key=mx.random.key(seed)), axis=-1
        )
        return mx.sort(ranks[:, : self.chosen].reshape(-1)).astype(mx.uint32)


def emulated(mode: str, seed: int = 0):
    require()
    return emulator.factory(mode=mode, seed=seed)


def difference(got: mx.array, expected: mx.array) -> float:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    got, expected = got.astype(mx.float32), expected.astype(mx.float32)
    return float(mx.abs(got - expected).max() / mx.abs(expected).max())


def check(case: Case, factory, seed: int = 0) -> None:
    x, weight = case.x(seed), case.weight(seed)
    if case.experts:
        ids = case.ids(seed)
        assert gathered_qmm.supports(x, ids, weight)
        got = gathered_qmm_kernel(x, ids, weight, rows_per_expert=case.rows, factory=factory)
        expected = gathered_qmm_exact(x, ids, weight)
    else:
        assert rows_qmm.supports(x, weight)
        got, expected = rows_qmm_kernel(x, weight, factory=factory), rows_qmm_exact(x, weight)
    assert difference(got, expected) < BOUNDS[expected.dtype], str(case)


def small_cases() -> list[Case]:
    """Tiny odd shapes: a lane's piece is 32 weights of four bits or 16 of eight, a turn four pieces."""
    base = Case()
    cases = [replace(base, rows=m) for m in (2, 3, 7, 8, 9, 16, 17, 24, 25, 31, 32)]
    cases += [replace(base, columns=n) for n in (3, 7, 8, 9, 31, 32, 255, 257)]
    cases += [
        replace(base, rows=11, depth=k, bits=b, group=g, dtype=t)
        for t in (mx.float32, mx.float16, mx.bfloat16)
        for b in (4, 8)
        for g in (32, 64, 128)
        for k in (g, 3 * g, 8 * g)
    ]
    # a depth that is cut into slices, its last turn short
    cases += [
        replace(base, depth=d, bits=b, columns=40) for d, b in ((1056, 4), (2016, 4), (544, 8), (1056, 8))
    ]
    cases += [replace(base, dtype=x, scales=s) for x in BOUNDS for s in BOUNDS if x != s]
    return cases


def small_gathered_cases() -> list[Case]:
    base = Case(rows=5, experts=4)
    cases = [replace(base, rows=m, chosen=c) for m in (1, 2, 7, 8, 9, 17, 32) for c in (1, 2, 4)]
    cases += [replace(base, experts=1, chosen=1, rows=r) for r in (2, 16, 32)]
    cases += [replace(base, columns=n, bits=8, depth=d) for n in (7, 33) for d in (32, 160)]
    cases += [replace(base, dtype=t, group=64, depth=192) for t in BOUNDS]
    return cases


REALISTIC = [
    Case(rows=16, columns=2048, depth=2560, group=64, dtype=mx.bfloat16),
    Case(rows=5, columns=4096, depth=1024, group=64, dtype=mx.float16),
    Case(rows=16, columns=1024, depth=4096, group=64, bits=8, dtype=mx.float16),
    Case(rows=32, columns=1031, depth=2048, group=128, dtype=mx.bfloat16, scales=mx.float16),
    Case(rows=16, columns=512, depth=2048, group=64, dtype=mx.bfloat16, experts=12, chosen=8),
    Case(rows=4, columns=2048, depth=512, group=64, bits=8, dtype=mx.float16, experts=16, chosen=8),
]


def test_the_kernel_equals_the_product_in_fp32_under_checks():
    """The fast case of the long list below: rows, columns and depth all end inside a tile."""
    check(Case(rows=11, columns=41, depth=544, bits=8), emulated("check", seed=1))


def test_the_gathered_kernel_equals_the_product_in_fp32_under_checks():
    check(Case(rows=9, experts=3, columns=9), emulated("check", seed=1))


def test_the_kernel_equals_the_product_in_fp32_on_a_real_shape():
    check(Case(rows=16, columns=2080, depth=1024, group=64, dtype=mx.bfloat16), emulated("fast"))


@pytest.mark.slow
@pytest.mark.parametrize("case", small_cases() + small_gathered_cases(), ids=str)
def test_odd_shapes_under_checks(case):
    for seed in range(4):
        check(case, emulated("check", seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize("case", REALISTIC, ids=str)
def test_real_shapes(case):
    check(case, emulated("fast", seed=2))


@pytest.mark.metal
@pytest.mark.skipif(not mx.metal.is_available(), reason="needs a Metal device")
@pytest.mark.parametrize("case", small_cases() + small_gathered_cases() + REALISTIC, ids=str)
def test_on_metal(case):
    check(case, mx.fast.metal_kernel)


def test_sums_are_kept_in_fp32():
    """4096 ones: summed in bf16 they stop at 256, in fp16 they lose the small term of every eighth."""
    depth = 4096
    w = mx.where(mx.arange(depth) % 8 == 0, 1 + 2**-9, 1.0)
    weight = Quantised(*mx.quantize(mx.broadcast_to(w, (8, depth)), group_size=64, bits=8), 64, 8)
    x = mx.ones((2, depth), mx.bfloat16)
    got = rows_qmm_kernel(x, weight, factory=emulated("fast"))
    assert difference(got, mx.broadcast_to(w.sum(), (2, 8))) < 1e-6


def test_unsorted_rows_are_right_too():
    case = Case(rows=3, experts=3)
    x, weight, ids = case.x(), case.weight(), mx.array([2, 0, 0, 2, 1, 0], mx.int32)
    got = gathered_qmm_kernel(x, ids, weight, rows_per_expert=3, factory=emulated("fast"))
    assert difference(got, gathered_qmm_exact(x, ids, weight)) < BOUNDS[mx.float16]


def test_more_rows_for_an_expert_than_promised_are_right_too():
    case = Case(rows=21, experts=1, chosen=1)
    x, weight, ids = case.x(), case.weight(), case.ids()
    got = gathered_qmm_kernel(x, ids, weight, rows_per_expert=2, factory=emulated("fast"))
    assert difference(got, gathered_qmm_exact(x, ids, weight)) < BOUNDS[mx.float16]


def test_leading_dimensions_of_a_pass_are_kept():
    case = Case(rows=6)
    x, weight = case.x(), case.weight()
    got = rows_qmm_kernel(x.reshape(1, 6, -1), weight, factory=emulated("fast"))
    assert got.shape == (1, 6, case.columns)
    assert difference(got[0], rows_qmm_exact(x, weight)) < BOUNDS[mx.float16]


def test_the_references_are_the_layers_own_products():
    case = Case(rows=4, columns=64, depth=128, group=64, dtype=mx.float32)
    weight, x = case.weight(), case.x()
    dense = mx.dequantize(*weight[:3], group_size=64, bits=4)
    assert difference(rows_qmm_reference(x, weight), x @ dense.T) < 1e-5
    case = replace(case, experts=3)
    weight, x, ids = case.weight(), case.x(), case.ids()
    dense = mx.dequantize(*weight[:3], group_size=64, bits=4)
    expected = mx.stack([row @ dense[e].T for row, e in zip(x, ids.tolist(), strict=True)])
    assert difference(gathered_qmm_reference(x, ids, weight), expected) < 1e-5


class Recording:
    """A factory that counts what is built through it."""

    def __init__(self) -> None:
        self.built: list[str] = []

    def __call__(self, **keywords):
        self.built.append(keywords["name"])
        return emulated("fast")(**keywords)


class Everything(frozenset):
    """A choice of every class there is."""

    def __contains__(self, _) -> bool:
        return True


OUTSIDE = {
    "one row": (Case(rows=1), None),
    "too many rows": (Case(rows=33), None),
    "three bits": (Case(bits=3), None),
    "a group of 16 in another mode": (
        Case(depth=64),
        lambda c: Quantised(*mx.quantize(mx.ones((33, 64)), group_size=16, mode="nvfp4"), None, 16, 4),
    ),
    "a weight too small to be a device buffer": (Case(columns=7, depth=32), None),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_outside_the_limits_the_reference_answers_whatever_was_chosen(name):
    case, special = OUTSIDE[name]
    weight = special(case) if special else case.weight()
    x = case.x()
    assert not rows_qmm.supports(x, weight)
    with pytest.raises(ValueError, match="does not take"):
        rows_qmm.shape_class(x, weight)
    if special:
        return  # MLX runs that mode by another name
    factory = Recording()
    got = rows_qmm.rows_qmm(x, weight, choices=Choices(Everything({("any", "class")}), factory))
    assert mx.array_equal(got, rows_qmm_reference(x, weight)) and factory.built == []


def test_gathered_limits_see_the_experts():
    case = Case(experts=3)
    x, weight, ids = case.x(), case.weight(), case.ids()
    assert gathered_qmm.supports(x, ids, weight)
    assert not gathered_qmm.supports(x, ids[:-1], weight)
    assert not gathered_qmm.supports(x, ids.astype(mx.int64), weight)
    assert not gathered_qmm.supports(x[None], ids, weight)
    assert not gathered_qmm.supports(x, ids, Case().weight())


def test_a_call_runs_what_was_chosen_for_its_class_and_no_other():
    case = Case()
    x, weight = case.x(), case.weight()
    factory = Recording()
    choices = Choices(frozenset({("rows_qmm", rows_qmm.shape_class(x, weight))}), factory)
    got = rows_qmm.rows_qmm(x, weight, choices=choices)
    assert difference(got, rows_qmm_exact(x, weight)) < BOUNDS[mx.float16] and len(factory.built) == 1
    for other in (case.x()[:3], replace(case, rows=9).x(), replace(case, dtype=mx.float32).x()):
        assert mx.array_equal(
            rows_qmm.rows_qmm(other, weight, choices=choices), rows_qmm_reference(other, weight)
        )
    assert mx.array_equal(rows_qmm.rows_qmm(x, weight, choices=NO_KERNELS), rows_qmm_reference(x, weight))
    assert len(factory.built) == 1


def test_the_gathered_call_runs_what_was_chosen():
    case = Case(experts=3, rows=4)
    x, weight, ids = case.x(), case.weight(), case.ids()
    factory = Recording()
    choices = Choices(frozenset({("rows_qmm_gathered", gathered_qmm.shape_class(x, weight, 4))}), factory)
    got = gathered_qmm.gathered_qmm(x, ids, weight, rows_per_expert=4, choices=choices)
    assert (
        difference(got, gathered_qmm_exact(x, ids, weight)) < BOUNDS[mx.float16] and len(factory.built) == 1
    )
    for other in ({"rows_per_expert": 4}, {"rows_per_expert": 9, "choices": choices}):
        got = gathered_qmm.gathered_qmm(x, ids, weight, **other)
        assert mx.array_equal(got, gathered_qmm_reference(x, ids, weight)) and len(factory.built) == 1


@pytest.mark.parametrize("gathered", [False, True])
def test_a_contest_passes_the_kernel_and_refuses_a_broken_one(gathered):
    case = Case(experts=4) if gathered else Case()
    weight = case.weight()
    contest = (
        gathered_qmm.contest(5, 2, weight, case.dtype)
        if gathered
        else rows_qmm.contest(5, weight, case.dtype)
    )
    expected = (
        gathered_qmm.shape_class(case.x(), weight, 5) if gathered else rows_qmm.shape_class(case.x(), weight)
    )
    assert contest.shape_class == expected
    chooser = Chooser(None, mode="on", factory=emulated("fast"))
    assert chooser.prepare([contest]).factory_for(contest.kernel, contest.shape_class) and not chooser.notes

    def broken(**keywords):
        require()
        header = keywords["header"].replace("(4 * step)) & 15", "(4 * step)) & 7")
        assert header != keywords["header"]
        return emulator.factory(mode="fast")(**{**keywords, "header": header})

    chooser = Chooser(None, mode="on", factory=broken)
    assert chooser.prepare([contest]) is NO_KERNELS
    assert len(chooser.notes) == 1 and "wrong" in chooser.notes[0]


def test_random_weights_are_those_of_their_seed_and_spread_about_zero():
    make = functools.partial(random_weight, (64,), 256, group_size=64, bits=4, dtype=mx.float32)
    first, again, other = make(key=mx.random.key(1)), make(key=mx.random.key(1)), make(key=mx.random.key(2))
    assert mx.array_equal(first.words, again.words) and not mx.array_equal(first.words, other.words)
    dense = mx.dequantize(*first[:3], group_size=64, bits=4)
    assert abs(float(dense.mean())) < 0.1 * float(mx.sqrt(mx.var(dense)))


@pytest.mark.parametrize("rows", (2, 8, 9, 16, 32))
@pytest.mark.parametrize("columns", (7, 256, 1024, 5120, 151936))
@pytest.mark.parametrize("bits", (4, 8))
def test_every_plan_keeps_the_limits_of_a_threadgroup(rows, columns, bits):
    for depth in (32, 512, 4096, 17408):
        cut = plan(rows, columns, depth, bits)
        assert 8 * cut.row_tiles >= rows and cut.threads in (128, 256)
        assert (
            4 * cut.slices * 8 * cut.row_tiles * cut.width <= 16 << 10
        )  # two threadgroups fit a core's 32 KiB


FAULTS = [
    ("min(first_n + 8 * t + at.row, N - 1)", "(first_n + 8 * t + at.row)"),
    ("if (k_weight < K) {", "if (true) {"),
    ("k_row < K && row < rows", "k_row < K"),
    ("k_row < K && row + 1 < rows", "row + 1 < rows"),
    ("biases[n * groups + k_weight / GS]", "biases[n * groups + k0 / GS]"),
    ("k0 += SK * CHUNK", "k0 += CHUNK"),
    ("piece[2 * octet + 1]", "piece[2 * octet]"),
    ("4 * (at.row % 2)", "4 * (at.row / 4)"),
    ("fma(scale[t], pair[1], bias[t])", "fma(scale[t], pair[1], 0.0f)"),
    ("slice[(8 * m + at.col + 1) * width", "slice[(8 * m + at.col) * width"),
    ("threadgroup_barrier(mem_flags::mem_threadgroup);", ""),
    ("threadgroup_barrier(mem_flags::mem_threadgroup);", "threadgroup_barrier(mem_flags::mem_device);"),
    ("m < M && n < N", "m < M"),
    ("s = 1; s < SK", "s = 2; s < SK"),
    ("float partial[SK * MT * 8 * WIDTH]", "float partial[SK * MT * 8 * WIDTH - 1]"),
    ("i += 32 * SK * SN", "i += 32 * SK * SN + 1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "fault"), FAULTS, ids=range(len(FAULTS)))
def test_a_planted_fault_is_seen(line, fault):
    planted = []

    def factory(*, source: str, header: str, **rest):
        planted.append(source.count(line) + header.count(line))
        return emulated("check", 1)(
            source=source.replace(line, fault), header=header.replace(line, fault), **rest
        )

    with pytest.raises((emulator.KernelFault, AssertionError)):
        check(Case(rows=12, columns=41, depth=544, bits=8), factory)
    assert sum(planted) >= 1, "the body no longer has this line"
