"""Context and block rows: the definition against MLX's own norm and rotation, the Metal body against it."""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.rope_utils import YarnRoPE
from tests import metal_emulator as emulator
from tests.metal_emulator.support import require

from dflash_mlx.kernels.choice import NO_KERNELS, Choices
from dflash_mlx.kernels.context_rows import (
    contest,
    context_rows,
    context_rows_reference,
    inverse_frequencies,
    shape_class,
    supports,
)

# allowed difference to the definition in fp32, against 1 + |expected|
TOLERANCE = {mx.float32: 4e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}


@dataclass(frozen=True)
class Case:
    """One call."""

    rows: int = 5
    heads: int = 2
    head_dim: int = 64
    dtype: mx.Dtype = mx.float16
    norm: mx.Dtype | None = mx.float16
    offset: int = 4321
    amplitude: float = 1.0
    fused: bool = True

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("mlx.core.")
        norm = str(self.norm).removeprefix("mlx.core.")
        return f"s{self.rows}-h{self.heads}-d{self.head_dim}-{kind}-n{norm}-at{self.offset}-x{self.amplitude}"

    def arrays(self, seed: int) -> tuple[mx.array, mx.array]:
        width = self.heads * self.head_dim
        both = mx.random.normal((self.rows, 2 * width), key=mx.random.key(seed)).astype(self.dtype)
        k, v = both[:, :width], both[:, width:]
        return (k, v) if self.fused else (mx.contiguous(k), mx.contiguous(v))

    def options(self, seed: int) -> dict[str, object]:
        weight = mx.random.uniform(0.5, 1.5, (self.head_dim,), key=mx.random.key(seed + 100))
        return {
            "heads": self.heads,
            "norm_weight": None if self.norm is None else weight.astype(self.norm),
            "eps": 1e-6,
            "inverse_frequencies": inverse_frequencies(self.head_dim, 1e6),
            "offset": self.offset,
            "amplitude": self.amplitude,
        }


def emulated(mode: str, seed: int):
    require()
    return emulator.factory(mode=mode, seed=seed)


def check(case: Case, *factories) -> None:
    """Every factory gives the same bits, within the tolerance of the definition."""
    (k, v), options = case.arrays(0), case.options(0)
    (keys, values), *others = [context_rows(k, v, **options, factory=factory) for factory in factories]
    expected, laid_out = context_rows_reference(k.astype(mx.float32), v, **options)
    assert keys.shape == values.shape == (1, case.heads, case.rows, case.head_dim)
    assert keys.dtype == values.dtype == case.dtype
    assert mx.array_equal(values, laid_out)
    assert all(mx.array_equal(keys, other) and mx.array_equal(values, same) for other, same in others)
    error = mx.abs(keys.astype(mx.float32) - expected) / (1 + mx.abs(expected))
    assert float(error.max()) < TOLERANCE[case.dtype], f"{case}: off by {float(error.max()):.2g}"


def odd_cases() -> list[Case]:
    base = Case()
    cases = [replace(base, rows=s) for s in (1, 2, 7, 8, 9, 33)]
    cases += [replace(base, heads=h, fused=False) for h in (1, 3, 8)]
    cases += [replace(base, head_dim=d, dtype=t) for d in (16, 64, 80, 96, 128, 256) for t in TOLERANCE]
    cases += [replace(base, norm=n) for n in (None, mx.float32, mx.bfloat16)]
    cases += [replace(base, offset=o, amplitude=1.4159) for o in (0, 1, 262_000)]
    return cases


def test_the_definition_is_mlx_norm_and_rotation():
    case = Case(rows=9, heads=3, head_dim=128, dtype=mx.float32, norm=mx.float32, offset=700)
    (k, v), options = case.arrays(1), case.options(1)
    keys, values = context_rows_reference(k, v, **options)
    heads = k.reshape(1, 9, 3, 128).swapaxes(1, 2)
    normed = mx.fast.rms_norm(heads, options["norm_weight"], 1e-6)
    rotated = mx.fast.rope(normed, 128, traditional=False, base=1e6, scale=1.0, offset=700)
    assert float(mx.abs(keys - rotated).max()) < 2e-3  # MLX computes the frequencies in fp32
    for head in range(3):
        assert mx.array_equal(values[0, head], v[:, head * 128 : (head + 1) * 128])


def test_yarn_is_given_frequencies_and_an_amplitude():
    yarn = YarnRoPE(64, base=1e6, scaling_factor=32.0, original_max_position_embeddings=8192)
    case = Case(rows=6, dtype=mx.float32, norm=None, offset=77, amplitude=0.1 * np.log(32.0) + 1)
    (k, v), options = case.arrays(2), case.options(2)
    keys, _ = context_rows_reference(k, v, **{**options, "inverse_frequencies": 1 / yarn._freqs})
    expected = yarn(k.reshape(1, 6, 2, 64).swapaxes(1, 2) * 1.0, offset=77)
    assert float(mx.abs(keys - expected).max()) < 1e-4


def test_rows_after_a_far_context_are_rotated_as_exactly_as_near_ones():
    """fp32 frequencies that are off by one unit turn a key by 0.01 at position 200,000."""
    case = Case(rows=3, dtype=mx.float32, norm=None, offset=200_000)
    (k, v), options = case.arrays(3), case.options(3)
    keys, _ = context_rows_reference(k, v, **options)
    frequencies = np.array(options["inverse_frequencies"])
    angle = (np.arange(200_000, 200_003, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    rows = np.array(k, np.float64).reshape(3, 2, 64).swapaxes(0, 1)
    low, high = rows[..., :32], rows[..., 32:]
    turned = [low * np.cos(angle) - high * np.sin(angle), low * np.sin(angle) + high * np.cos(angle)]
    assert np.abs(np.array(keys)[0] - np.concatenate(turned, -1)).max() < 1e-5


def test_kernel_equals_the_definition_under_checks():
    check(Case(rows=9, head_dim=80), emulated("check", 1))


def test_kernel_equals_the_definition_on_a_drafters_shape():
    check(Case(rows=32, heads=8, head_dim=128, amplitude=1.2), emulated("fast", 0))


@pytest.mark.slow
@pytest.mark.parametrize("case", odd_cases(), ids=str)
def test_kernel_equals_the_definition_on_odd_shapes(case):
    check(case, *(emulated("check", seed) for seed in range(4)))


@pytest.mark.metal
@pytest.mark.skipif(not mx.metal.is_available(), reason="needs a Metal device")
@pytest.mark.parametrize("case", odd_cases(), ids=str)
def test_kernel_equals_the_definition_on_metal(case):
    check(case, mx.fast.metal_kernel)


def refuse(**_):
    """A factory that no call may reach."""
    raise AssertionError("a kernel was built")


def test_outside_its_limits_the_reference_answers():
    for case in (Case(head_dim=8), Case(head_dim=258)):
        (k, v), options = case.arrays(0), case.options(0)
        assert not supports(k, v, case.heads)
        for got, expected in zip(
            context_rows(k, v, **options, factory=refuse),
            context_rows_reference(k, v, **options),
            strict=True,
        ):
            assert mx.array_equal(got, expected)
    k, v = Case().arrays(0)
    assert supports(k, v, 2)
    assert not supports(k, v.astype(mx.float32), 2)
    assert not supports(k[None], v[None], 2)
    assert not supports(k, v, 3)
    assert not supports(k[:0], v[:0], 2)


def test_nothing_chosen_means_the_reference():
    (k, v), options = Case().arrays(0), Case().options(0)
    got, _ = context_rows(k, v, **options, choices=NO_KERNELS, factory=refuse)
    assert mx.array_equal(got, context_rows_reference(k, v, **options)[0])
    chosen = Choices(frozenset({("context_rows", shape_class(k, 2))}), refuse)
    with pytest.raises(AssertionError, match="a kernel was built"):
        context_rows(k, v, **options, choices=chosen)


def test_a_contest_runs_both_arms_and_names_the_class_of_its_calls():
    arm = contest(6, heads=2, head_dim=64, dtype=mx.float32)
    data = arm.inputs(0)
    arms = zip(arm.candidate(emulated("fast", 0), *data), arm.exact(*data), arm.reference(*data), strict=True)
    for got, expected, raced in arms:
        assert float(mx.abs(got - expected).max()) < arm.bound
        assert float(mx.abs(raced - expected).max()) < 10 * arm.bound, "it is raced against the same work"
    assert arm.shape_class == shape_class(data[0], 2)


FAULTS = [  # the line, what it becomes
    ("int(thread_position_in_grid.z) % heads", "int(thread_position_in_grid.z)"),
    ("if (p < HALF) {", "{"),
    ("simd_sum(squares)", "squares"),
    ("p + HALF) * k_strides[1]", "p + HALF - 1) * k_strides[1]"),
    ("T(a * r + b * c)", "T(b * c - a * r)"),
    ("k_out[out + p + HALF] =", "k_out[out + p] ="),
    ("d < D; d += 32", "d < D - 1; d += 32"),
    ("float squares = 0;", "float squares;"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "fault"), FAULTS, ids=range(len(FAULTS)))
def test_a_planted_fault_is_seen(line, fault):
    planted = []

    def factory(*, source: str, **rest):
        planted.append(source.count(line))
        return emulated("check", 1)(source=source.replace(line, fault, 1), **rest)

    with pytest.raises((emulator.KernelFault, AssertionError)):
        check(Case(rows=3, head_dim=80), factory)
    assert planted == [1], "the body no longer has this line"
