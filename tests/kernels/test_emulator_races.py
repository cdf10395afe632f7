"""The race detector: which barriers order which accesses, on kernels of a few lines."""

from typing import Any

import mlx.core as mx
import pytest
from tests import metal_emulator as emulator

BOTH = "mem_flags::mem_device | mem_flags::mem_threadgroup"
# thread i writes its element, then reads its neighbour's; `%s` is what lies between
NEIGHBOUR = """
threadgroup float tile[64];
const uint i = thread_index_in_threadgroup;
tile[i] = x[i];
%s
o[i] = tile[i %% {period} == {period} - 1 ? i + 1 - {period} : i + 1];
"""


def run(
    source: str, *, threads: int = 64, groups: int = 1, size: int = 64, seed: int = 0, **options: Any
) -> list[float]:
    dtype = options.pop("dtype", mx.float32)
    kernel = emulator.factory(mode="check", seed=seed)(
        name="race",
        input_names=["x"],
        output_names=["o"],
        source=source,
        atomic_outputs=options.pop("atomic_outputs", False),
    )
    (out,) = kernel(
        inputs=[mx.arange(64).astype(dtype)],
        grid=(threads * groups, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(size,)],
        output_dtypes=[dtype],
        **options,
    )
    return out.tolist()


def rotated(period: int) -> list[float]:
    return [float(i // period * period + (i + 1) % period) for i in range(64)]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("flags", ["mem_flags::mem_threadgroup", BOTH])
def test_a_threadgroup_barrier_orders_threadgroup_memory(flags: str, seed: int) -> None:
    assert run(NEIGHBOUR.format(period=64) % f"threadgroup_barrier({flags});", seed=seed) == rotated(64)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_simdgroup_barrier_orders_the_lanes_of_a_simdgroup(seed: int) -> None:
    source = NEIGHBOUR.format(period=32) % "simdgroup_barrier(mem_flags::mem_threadgroup);"
    assert run(source, seed=seed) == rotated(32)


@pytest.mark.parametrize(
    ("period", "between"),
    [
        (64, ""),
        (64, "threadgroup_barrier(mem_flags::mem_none);"),
        (64, "threadgroup_barrier(mem_flags::mem_device);"),
        (64, "simdgroup_barrier(mem_flags::mem_threadgroup);"),
        (32, "simdgroup_barrier(mem_flags::mem_device);"),
        (32, "float s = simd_sum(x[i]); if (s < 0) { return; }"),  # meeting is not ordering
    ],
)
def test_a_read_that_no_barrier_orders_is_a_race(period: int, between: str) -> None:
    with pytest.raises(emulator.KernelFault, match="data race on tile|uninitialised threadgroup memory tile"):
        run(NEIGHBOUR.format(period=period) % between)


@pytest.mark.parametrize("writer", [0, 32])
def test_a_write_after_others_have_read_needs_a_barrier_too(writer: int) -> None:
    """A barrier of the writer's SIMD-group does not order the reads of the other one."""
    source = f"""
    threadgroup float tile[1];
    const uint i = thread_index_in_threadgroup;
    if (i == 0) {{ tile[0] = 1; }}
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = tile[0];
    %s
    if (i == {writer}) {{ tile[0] = 2; }}
    """
    assert run(source % "threadgroup_barrier(mem_flags::mem_threadgroup);") == [1.0] * 64
    for between in (
        "simdgroup_barrier(mem_flags::mem_device);",
        "simdgroup_barrier(mem_flags::mem_threadgroup);",
    ):
        with pytest.raises(
            emulator.KernelFault, match=r"data race on tile \+0: .* after unsynchronised (read|write)"
        ):
            run(source % between)


def test_threads_may_write_the_same_value_only_when_ordered() -> None:
    with pytest.raises(
        emulator.KernelFault, match=r"data race on o \+0: write .* after unsynchronised write by thread 0"
    ):
        run("o[0] = x_shape[0] + thread_index_in_threadgroup * 0;", size=1)


def test_threadgroups_are_never_ordered() -> None:
    source = """
    const uint i = thread_position_in_grid.x;
    o[i] = x[i];
    threadgroup_barrier(mem_flags::mem_device);
    if (i == 40) { o[i] = o[8]; }
    """
    assert run(source)[40] == 8.0
    with pytest.raises(emulator.KernelFault, match="of another threadgroup"):
        run(source, threads=32, groups=2)


def test_atomics_do_not_race_with_atomics() -> None:
    source = "atomic_fetch_add_explicit(&o[0], int(thread_index_in_threadgroup > 0), memory_order_relaxed);"
    assert run(source, groups=2, size=1, dtype=mx.int32, atomic_outputs=True, init_value=0) == [126]


def test_an_atomic_races_with_a_plain_write() -> None:
    source = """
    threadgroup atomic_int count[1];
    const uint i = thread_index_in_threadgroup;
    if (i == 0) { *(threadgroup int*)count = 0; }
    %s
    atomic_fetch_add_explicit(&count[0], 1, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = atomic_load_explicit(&count[0], memory_order_relaxed);
    """
    assert run(source % "threadgroup_barrier(mem_flags::mem_threadgroup);", dtype=mx.int32) == [64] * 64
    with pytest.raises(emulator.KernelFault, match="data race on count"):
        run(source % "", dtype=mx.int32)


def test_a_fault_names_both_lines_of_a_race() -> None:
    source = NEIGHBOUR.format(period=64) % ""
    with pytest.raises(emulator.KernelFault) as caught:
        run(source.replace("tile[i] = x[i];", "tile[i] = x[i]; tile[63 - i] = 0;"))
    text = str(caught.value)
    assert "[race.metal:4, other access race.metal:4]" in text


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("if (i < 8) { o[i] = simd_sum(x[i]); }", r"simd_sum at race.metal:2 reached by 8 of 32 lanes"),
        (
            "if (i == 0) { return; } o[i] = simd_max(x[i]);",
            r"simd_max at race.metal:2 reached by 31 of 32 lanes .*1 exited",
        ),
        (
            "if (i < 32) { threadgroup_barrier(mem_flags::mem_none); } o[i] = 0;",
            "reached by 32 of 64 threads",
        ),
        (
            "using M = mem_flags; o[i] = 0;"
            "if (i < 32) { threadgroup_barrier(M::mem_none); } else { threadgroup_barrier(M::mem_none); }",
            "threads wait at different barriers, race.metal:2 and race.metal:2",
        ),
        ("o[i] = simd_shuffle(x[i], ushort(32));", "shuffle from a lane index >= 32 at race.metal:2"),
    ],
)
def test_meetings_that_not_all_threads_reach_are_faults(source: str, said: str) -> None:
    with pytest.raises(emulator.KernelFault, match=said):
        run("const uint i = thread_index_in_threadgroup;\n" + source)


def order_of_threads(seed: int) -> list[float]:
    """The order in which 64 threads in two groups come to an atomic counter."""
    source = """
    const int turn = atomic_fetch_add_explicit(&o[64], 1, memory_order_relaxed);
    atomic_store_explicit(&o[turn], int(thread_position_in_grid.x), memory_order_relaxed);
    """
    return run(
        source, threads=32, groups=2, seed=seed, size=65, dtype=mx.int32, atomic_outputs=True, init_value=0
    )[:64]


def test_seed_zero_runs_in_order_and_others_shuffle_the_same_way_every_time() -> None:
    assert order_of_threads(0) == list(range(64))
    orders = [order_of_threads(seed) for seed in (0, 1, 2, 3)]
    assert [sorted(order) for order in orders] == [list(range(64))] * 4
    assert len({tuple(order) for order in orders}) == 4
    assert len({order[0] // 32 for order in orders}) == 2, "threadgroups are shuffled too"
    assert order_of_threads(1) == orders[1]
