"""Replaying the gated delta rule: the definition against mlx-lm's own, the Metal body against the definition."""

from dataclasses import dataclass, replace
from types import FunctionType, SimpleNamespace

import mlx.core as mx
import pytest
from mlx_lm.models import gated_delta as stock
from mlx_lm.models.gated_delta import gated_delta_ops
from tests import metal_emulator as emulator
from tests.metal_emulator.support import require

from dflash_mlx.kernels.choice import NO_KERNELS, Choices, Chooser
from dflash_mlx.kernels.delta_replay import (
    BOUND,
    contest,
    delta_replay,
    delta_replay_kernel,
    delta_replay_reference,
    shape_class,
    supports,
)


@dataclass(frozen=True)
class Case:
    """The kept inputs of one pass."""

    rows: int = 5
    keep: tuple[int, ...] = (3,)
    key_heads: int = 1
    heads: int = 2
    key_dim: int = 32
    value_dim: int = 8
    taps: int = 3
    vector: bool = False
    dtype: mx.Dtype = mx.float32

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("mlx.core.")
        heads = f"h{self.key_heads}x{self.heads}-d{self.key_dim}x{self.value_dim}"
        keep = ".".join(map(str, self.keep))
        return f"t{self.rows}-k{keep}-{heads}-c{self.taps}-{'vector' if self.vector else 'scalar'}-{kind}"

    def arrays(self, seed: int = 0) -> tuple[mx.array, ...]:
        """As a Qwen3.5 layer makes them: unit keys, decay in fp32, beta in the model's dtype."""
        keys = mx.random.split(mx.random.key(seed), 6)
        batch = len(self.keep)
        key = mx.random.normal((batch, self.rows, self.key_heads, self.key_dim), key=keys[0])
        gate = (batch, self.rows, self.heads) + ((self.key_dim,) if self.vector else ())
        channels = 2 * self.key_heads * self.key_dim + self.heads * self.value_dim
        return (
            (key / mx.linalg.norm(key, axis=-1, keepdims=True)).astype(self.dtype),
            mx.random.normal((batch, self.rows, self.heads, self.value_dim), key=keys[1]).astype(self.dtype),
            mx.random.uniform(0.7, 1.0, gate, key=keys[2]),
            mx.random.uniform(0.0, 1.0, (batch, self.rows, self.heads), key=keys[3]).astype(self.dtype),
            mx.random.normal((batch, self.heads, self.value_dim, self.key_dim), key=keys[4]),
            mx.random.normal((batch, self.taps + self.rows, channels), key=keys[5]).astype(self.dtype),
            mx.array(self.keep, mx.int32),
        )


def emulated(mode: str, seed: int = 0):
    require()
    return emulator.factory(mode=mode, seed=seed)


def stepped(arrays: tuple[mx.array, ...], keep: int, entry: int) -> mx.array:
    """The state that mlx-lm reaches when it is given the first `keep` rows and no others."""
    key, v, decay, beta, state = (array[entry : entry + 1] for array in arrays[:5])
    if keep == 0:
        return state
    key, v, decay, beta = (array[:, :keep] for array in (key, v, decay, beta))
    return gated_delta_ops(mx.zeros_like(key), key, v, decay, beta, state)[1]


@pytest.fixture
def uncompiled():
    """mlx-lm compiles its step; on a CPU each new shape of it would cost seconds of C++."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def check(case: Case, factory, seed: int = 0) -> None:
    arrays = case.arrays(seed)
    assert supports(*arrays)
    state, window = delta_replay_kernel(*arrays, factory=factory)
    expected, expected_window = delta_replay_reference(*arrays)
    assert state.dtype == mx.float32 and window.dtype == case.dtype
    assert mx.array_equal(window, expected_window), str(case)
    assert float(mx.abs(state - expected).max() / mx.abs(expected).max()) < 1e-6, str(case)


def small_cases() -> list[Case]:
    base = Case()
    cases = [replace(base, rows=t, keep=(k,)) for t in (1, 2, 5, 7, 16) for k in {0, 1, t // 2, t - 1, t}]
    cases += [replace(base, key_heads=k, heads=h) for k, h in ((1, 1), (1, 5), (2, 4), (3, 3), (2, 6))]
    cases += [replace(base, key_dim=d, value_dim=v) for d in (32, 64, 96, 128, 256) for v in (1, 7, 8, 9, 17)]
    cases += [replace(base, keep=keep) for keep in ((0, 5), (1, 2, 3), tuple(range(6)) * 2)]
    cases += [replace(base, vector=True, key_dim=d, keep=(4, 1)) for d in (32, 64)]
    cases += [replace(base, taps=c, dtype=t) for c in (1, 3, 7) for t in (mx.float16, mx.bfloat16)]
    return cases


REALISTIC = [
    Case(16, (11,), key_heads=16, heads=32, key_dim=128, value_dim=128, dtype=mx.bfloat16),
    Case(9, (5,), key_heads=16, heads=48, key_dim=128, value_dim=128, dtype=mx.float16),
]


@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_the_definition_is_mlx_lms_recurrence_over_the_first_rows(case, uncompiled):
    arrays = case.arrays()
    state, window = delta_replay_reference(*arrays)
    for entry, keep in enumerate(case.keep):
        assert mx.array_equal(state[entry], stepped(arrays, keep, entry)[0])
        assert mx.array_equal(window[entry], arrays[5][entry, keep : keep + case.taps])


@pytest.mark.parametrize("vector", [False, True])
def test_the_kernel_equals_the_definition_under_checks(vector):
    """The fast case of the long list below: odd everything, two entries that keep different counts."""
    case = Case(7, (4, 0), key_heads=2, heads=4, key_dim=64, value_dim=11, vector=vector, dtype=mx.float16)
    check(case, emulated("check", 1))


def test_the_kernel_equals_the_definition_on_a_layer():
    check(
        Case(16, (11,), key_heads=2, heads=6, key_dim=128, value_dim=128, dtype=mx.bfloat16), emulated("fast")
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", small_cases(), ids=str)
def test_odd_shapes_under_checks(case):
    for seed in range(4):
        check(case, emulated("check", seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize("case", REALISTIC, ids=str)
def test_real_layers(case):
    check(case, emulated("fast", seed=2))


@pytest.mark.metal
@pytest.mark.skipif(not mx.metal.is_available(), reason="needs a Metal device")
@pytest.mark.parametrize("case", small_cases() + REALISTIC, ids=str)
def test_on_metal(case):
    check(case, mx.fast.metal_kernel)


@pytest.mark.parametrize("steps", [64, pytest.param(512, marks=pytest.mark.slow)])
def test_many_replays_do_not_drift_from_stepping(steps, uncompiled):
    """Passes of 1 to 16 rows, some of them rejected: the state stays that of the kept rows, one by one."""
    case = Case(rows=steps, keep=(steps,), key_heads=1, heads=2, key_dim=64, value_dim=16)
    key, v, decay, beta, state, conv, _ = case.arrays(7)
    decay = 0.98 + 0.02 * decay  # a long memory, so that errors would add up
    replayed, window, at, turn = state, conv[:, : case.taps], 0, 0
    factory = emulated("fast")
    while at < steps:
        rows = min(1 + turn * 7 % 16, steps - at)
        keep = max(1, rows - turn % 4)
        taken = (array[:, at : at + rows] for array in (key, v, decay, beta))
        entered = mx.concatenate([window, conv[:, case.taps + at : case.taps + at + rows]], axis=1)
        replayed, window = delta_replay_kernel(
            *taken, replayed, entered, mx.array([keep], mx.int32), factory=factory
        )
        at, turn = at + keep, turn + 1
    expected = gated_delta_ops(mx.zeros_like(key), key, v, decay, beta, state)[1]
    assert mx.array_equal(window, conv[:, steps:])
    assert float(mx.abs(replayed - expected).max() / mx.abs(expected).max()) < 1e-5


def test_the_count_is_read_when_it_runs_and_kept_within_the_pass():
    case = Case(keep=(-1, 9))
    arrays = case.arrays()
    clamped = (*arrays[:6], mx.array([0, 5], mx.int32))
    for run in (delta_replay_reference, lambda *a: delta_replay_kernel(*a, factory=emulated("check"))):
        for got, expected in zip(run(*arrays), run(*clamped), strict=True):
            assert mx.array_equal(got, expected)


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_state_is_bit_for_bit_that_of_mlx_lms_own_kernel(packed):
    """What a verify pass of the kept rows alone would have left, so that a replay leaves no trace in the text."""
    require()
    make = stock._make_gated_delta_packed_kernel if packed else stock._make_gated_delta_kernel
    emulate = emulator.factory(mode="fast", strict_text=False)
    here = SimpleNamespace(
        metal=SimpleNamespace(is_available=lambda: True), fast=SimpleNamespace(metal_kernel=emulate)
    )
    kernel = FunctionType(make.__code__, {**make.__globals__, "mx": here}, make.__name__, make.__defaults__)()
    case = Case(6, (4,), key_heads=1, heads=2, key_dim=128, value_dim=16, dtype=mx.bfloat16)
    arrays = case.arrays()
    key, v, decay, beta = (array[:, :4] for array in arrays[:4])
    sizes = [("Dk", 128), ("Dv", 16), ("Hk", 1), ("Hv", 2)]
    _, expected = kernel(
        inputs=[mx.zeros_like(key), key, v, decay, beta, arrays[4], 4],
        template=[("InT", case.dtype), ("StT", mx.float32), *sizes],
        grid=(32, 16 // 8 if packed else 16, 2),
        threadgroup=(32, 2 if packed else 4, 1),
        output_shapes=[v.shape, arrays[4].shape],
        output_dtypes=[case.dtype, mx.float32],
    )
    state, _ = delta_replay_kernel(*arrays, factory=emulated("fast"))
    assert mx.array_equal(state, expected)


class Refusing:
    """A factory that no call may reach."""

    def __call__(self, **_):
        raise AssertionError("a kernel was built")


OUTSIDE = {
    "key dimension": Case(key_dim=48),
    "key dimension too large": Case(key_dim=288),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_outside_the_limits_the_reference_answers(name):
    arrays = OUTSIDE[name].arrays()
    assert not supports(*arrays)
    choices = Choices(frozenset({("delta_replay", shape_class(*arrays[:3], arrays[5]))}), Refusing())
    for got, expected in zip(
        delta_replay(*arrays, choices=choices), delta_replay_reference(*arrays), strict=True
    ):
        assert mx.array_equal(got, expected)


def test_limits_see_the_state_the_count_and_the_heads():
    arrays = Case(heads=4).arrays()
    assert supports(*arrays)
    assert not supports(*arrays[:4], arrays[4].astype(mx.float16), *arrays[5:])
    assert not supports(*arrays[:6], arrays[6].astype(mx.int64))
    assert not supports(*arrays[:6], mx.array([1, 1], mx.int32))
    assert not supports(mx.repeat(arrays[0], 3, axis=2), *arrays[1:])


def test_a_call_runs_what_was_chosen_for_its_class():
    arrays = Case().arrays()
    choices = Choices(frozenset({("delta_replay", shape_class(*arrays[:3], arrays[5]))}), Refusing())
    with pytest.raises(AssertionError, match="a kernel was built"):
        delta_replay(*arrays, choices=choices)
    other = Case(rows=9).arrays()
    assert mx.array_equal(delta_replay(*other, choices=choices)[0], delta_replay_reference(*other)[0])
    assert mx.array_equal(delta_replay(*arrays, choices=NO_KERNELS)[0], delta_replay_reference(*arrays)[0])


def test_a_contest_passes_the_kernel():
    case = contest(6, 1, 2, 32, 12, taps=3, channels=88, dtype=mx.bfloat16)
    arrays = Case(rows=6, value_dim=12, dtype=mx.bfloat16).arrays()
    assert case and case.shape_class == shape_class(*arrays[:3], arrays[5]) and case.bound == BOUND
    chooser = Chooser(None, mode="on", factory=emulated("fast"))
    assert chooser.prepare([case]).factory_for("delta_replay", case.shape_class) and not chooser.notes


FAULTS = [
    ("t < rows", "t < T"),
    ("hv / (Hv / Hk)", "hv % Hk"),
    ("min(row, DV - 1)", "row"),
    ("if (row < DV) {", "{"),
    ("simd_shuffle_xor(recalled, ushort(2))", "simd_shuffle_xor(recalled, ushort(4))"),
    ("* float(beta[head_at])", ""),
    ("decay[head_at * DK + part * PER + i]", "decay[head_at * DK + i]"),
    ("s[i] += float(key[key_at + i]) * change", "s[i] = float(key[key_at + i]) * change"),
    ("(b * (taps + T) + rows) * C", "(b * (taps + T)) * C"),
    ("i < taps * C", "i < taps * C - 1"),
    ("float s[PER]", "float s[PER - 1]"),
    ("count[b]", "count[0]"),
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
        check(
            Case(7, (4, 2), key_heads=2, heads=4, key_dim=64, value_dim=11, vector=True, dtype=mx.float16),
            factory,
        )
    assert sum(planted) >= 1, "the body no longer has this line"
