"""The counts of benchmarks/kernel_counts.py: near the least bytes, and true to what kernels do on the emulator."""

import importlib.util
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from tests import metal_emulator as emulator
from tests.metal_emulator.support import require

from dflash_mlx.kernels import attention, gathered_qmm, rows_qmm
from dflash_mlx.kernels.quantised import random_weight

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernel_counts.py"


@pytest.fixture(scope="module")
def counts():
    spec = importlib.util.spec_from_file_location("kernel_counts", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    del sys.modules[spec.name], sys.modules["kernel_shapes"]


@pytest.mark.parametrize("rows", [2, 5, 8, 12, 16])
def test_products_and_attention_stay_near_the_least_bytes(counts, rows):
    checked = set()
    for case in counts.cases(rows):
        row = counts.count(case)
        assert 1 <= row.ratio + 1e-9 < 1.1, f"{case.model} {case.kernel_name} {case.part}: {row.ratio:.3f}"
        assert row.issued >= row.moved
        checked.add(case.kernel_name)
    products = {"rows_qmm", "rows_qmm_gathered"}
    assert checked == products | {"block_attention", "delta_replay", "greedy_walk", "context_rows"}


def test_only_more_rows_than_a_threadgroup_holds_read_their_keys_twice(counts):
    for case in counts.cases(32):
        if case.kernel_name == "block_attention":
            heads, rows = case.arrays[0].shape[1:3]
            twice = heads // case.arrays[1].shape[1] * rows > 128
            assert counts.count(case).ratio < (2.1 if twice else 1.1), f"{case.model} {case.part}"


class Counted:
    """The emulator, with what each launch did."""

    def __init__(self) -> None:
        require()
        self.kernels: list = []

    def __call__(self, **keywords):
        kernel = emulator.factory(mode="fast")(**keywords)
        self.kernels.append(kernel)
        return kernel


def product(factory):
    weight = random_weight((100,), 352, group_size=32, bits=4, dtype=mx.float16, key=mx.random.key(0))
    return rows_qmm.rows_qmm_kernel(mx.ones((11, 352), mx.float16), weight, factory=factory)


def gathered(factory):
    weight = random_weight((3, 40), 96, group_size=32, bits=8, dtype=mx.float16, key=mx.random.key(0))
    ids = mx.array([0] * 11 + [2] * 3, mx.uint32)
    x = mx.ones((14, 96), mx.float16)
    return gathered_qmm.gathered_qmm_kernel(x, ids, weight, rows_per_expert=8, factory=factory)


@pytest.mark.parametrize("call", [product, gathered])
def test_matrix_products_and_memory_are_those_the_emulator_sees(counts, call):
    recorder, emulated = counts.Recorder(), Counted()
    call(recorder)
    mx.eval(call(emulated))
    counted = counts.COUNTS[recorder.launches[0].kernel](recorder.launches[0])
    seen = emulated.kernels[0].counts
    assert (
        counted.flops == seen.simd_operations * 2 * 8**3
    )  # every SIMD operation of it multiplies 8x8 by 8x8
    assert counted.threadgroup_bytes == seen.threadgroup_bytes


@pytest.mark.parametrize("head_dim", [64, 256])
def test_attention_counts_the_memory_that_the_emulator_sees(counts, head_dim):
    def call(factory):
        q, k, block = (mx.ones((1, *shape, head_dim)) for shape in ((4, 6), (2, 90), (2, 6)))
        return attention.block_attention(q, k, k, 80, block, block, scale=1.0, causal=True, factory=factory)

    recorder, emulated = counts.Recorder(), Counted()
    call(recorder)
    mx.eval(call(emulated))
    counted = counts.COUNTS[recorder.launches[0].kernel](recorder.launches[0])
    assert counted.threadgroup_bytes == emulated.kernels[0].counts.threadgroup_bytes


def test_the_command_prints_a_table_and_needs_metal_only_for_times(counts, capsys):
    assert counts.main(["--rows", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == "model kernel part least MB moved ratio issued GFLOP groups SIMD/core".split()
    assert sum("Qwen3.5-27B" in line for line in lines) > 15
    with pytest.raises(SystemExit, match="2"):
        counts.main(["--rows", "40"])
    assert "2 to 32" in capsys.readouterr().err
    if not mx.metal.is_available():
        assert counts.main(["--time"]) == 1
        printed = capsys.readouterr()
        assert printed.out == "" and "Metal" in printed.err
