"""Memory: bounds, values nobody wrote, arithmetic that Metal leaves undefined, in both modes."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import pytest
from tests import metal_emulator as emulator

INDEX = "const uint i = thread_position_in_grid.x;\n"


def run(source: str, *, mode: emulator.Mode = "check", seed: int = 0, **call: Any) -> mx.array:
    kernel = emulator.factory(mode=mode, seed=seed)(
        name="memory", input_names=["x", "n"], output_names=["o"], source=INDEX + source
    )
    defaults: dict[str, Any] = {
        "inputs": [mx.arange(32), 32],
        "grid": (32, 1, 1),
        "threadgroup": (32, 1, 1),
        "output_shapes": [(32,)],
        "output_dtypes": [mx.int32],
    }
    (out,) = kernel(**(defaults | call))
    return out


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "o[i] = x[i + 1];",
            r"out-of-bounds read of 4 bytes at x \+128 \(size 128 bytes\), .* thread \(31,0,0\) \[memory.metal:2\]",
        ),
        ("o[i + 1] = x[i];", r"out-of-bounds write of 4 bytes at o \+128"),
        ("o[i] = x[int(i) - 1];", r"out-of-bounds read of 4 bytes at x -4"),
        (
            "threadgroup int t[32]; t[i + (i == 31)] = 1; o[i] = 0;",
            r"write of 4 bytes at t \+128 \(size 128|array index out",
        ),
        ("int t[4]; t[i] = 1; o[i] = t[0];", "array index out of bounds"),
        ("o[i] = o[i] + 1;", "read of uninitialised output o"),
        ("threadgroup int t[32]; o[i] = t[i];", "read of uninitialised threadgroup memory t"),
        ("if (i < 31) { o[i] = x[i]; }", r"output o: 1 of 32 elements never written \(first: element 31\)"),
        ("((device int*)x)[i] = 1; o[i] = 1;", r"write to input x \+0"),
        ("o[i] = x[i] + 2147483647;", r"signed integer overflow \(add\)"),
        ("o[i] = x[i] / (n - 32);", "division by zero"),
        ("o[i] = 1 << (x[i] + n);", "shift amount out of range"),
        ("o[i] = int(float(x[i]) * 1e10f);", "float to integer conversion out of range"),
        ("o[i] = ((const device int4*)(x + 1))[0].x;", "misaligned"),
        ("int a; if (i > 40) { a = 1; } o[i] = a;", "variable 'a' is used uninitialized"),
        (
            "threadgroup int t[10000]; t[i] = 1; o[i] = 1;",
            "threadgroup memory: 40000 bytes with t exceed the limit of 32768",
        ),
    ],
)
def test_check_mode_says_what_is_wrong(source: str, said: str) -> None:
    with pytest.raises(emulator.KernelFault, match=said):
        run(source)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("o[i] = x[i + 4096];", r"memory fault at buffer x \+16384 \(size 128 bytes\) at memory.metal:2"),
        ("((device int*)x)[i] = 1; o[i] = 1;", r"memory fault at buffer x \+0"),
        ("threadgroup int t[32]; t[i + 4] = 1; o[i] = 1;", "write past the end of threadgroup variable t"),
        ("o[i] = x[i]; if (i == 0) { o[-1] = 3; }", "write just outside buffer o"),
        (
            "int t[100000]; for (int k = 0; k < n * 3000; k++) { t[k] = k + n; } o[i] = t[n];",
            "thread stack overflow",
        ),
    ],
)
def test_fast_mode_notices_what_leaves_a_buffer(source: str, said: str) -> None:
    with pytest.raises(emulator.KernelFault, match=said):
        run(source, mode="fast")


def test_after_a_fault_the_next_launch_is_right() -> None:
    with pytest.raises(emulator.KernelFault):
        run("o[i] = x[i + 4096];", mode="fast")
    assert run("o[i] = x[i] + n;", mode="fast").tolist() == list(range(32, 64))


def test_launches_of_several_threads_do_not_meet() -> None:
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    source = f"threadgroup int t[32]; const uint k = i % 32; t[k] = x[k]; {barrier} o[i] = t[31 - k] + n;"

    def launch(n: int) -> list[int]:
        call = {"grid": (32 * 300, 1, 1), "output_shapes": [(32 * 300,)]}
        return run(source, inputs=[mx.arange(32), n], **call).tolist()

    launch(0)  # compiles
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(launch, range(12)))
    assert outs == [[31 - i + n for i in range(32)] * 300 for n in range(12)]


@pytest.mark.parametrize("mode", ["check", "fast"])
def test_an_initial_value_counts_as_written(mode: emulator.Mode) -> None:
    assert run("if (i < 3) { o[i] = o[i] + x[i]; }", mode=mode, init_value=5).tolist() == [5, 6, 7] + [5] * 29


def test_memory_nobody_wrote_differs_between_even_and_odd_seeds() -> None:
    source = "threadgroup int t[32]; if (i > 40) { t[i] = 1; } o[i] = t[i];"
    assert run(source, mode="fast", seed=0).tolist() != run(source, mode="fast", seed=1).tolist()


@pytest.mark.parametrize("mode", ["check", "fast"])
def test_edge_threadgroups_are_partial_and_empty_grids_do_nothing(mode: emulator.Mode) -> None:
    source = "o[i] = threads_per_threadgroup.x * 100 + dispatch_threads_per_threadgroup.x;"
    out = run(source, mode=mode, grid=(32, 1, 1), threadgroup=(24, 1, 1))
    assert out.tolist() == [2424] * 24 + [824] * 8
    assert run("o[i] = x[i];", mode=mode, grid=(0, 1, 1), init_value=1).tolist() == [1] * 32


def test_a_threadgroup_larger_than_metal_allows_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 1024 threads"):
        run("o[i] = 1;", threadgroup=(64, 32, 1))


def test_strided_inputs_are_read_in_place_when_asked_for() -> None:
    x = mx.arange(48).reshape(6, 8)[1:5, 2:6]
    kernel = emulator.factory()(
        name="strided",
        input_names=["x"],
        output_names=["o"],
        source="uint2 p = thread_position_in_grid.xy; o[p.y * 4 + p.x] = x[p.y * x_strides[0] + p.x * x_strides[1]];",
        ensure_row_contiguous=False,
    )
    for view in (x, x.T, x.astype(mx.bfloat16)[:, ::2]):
        rows, columns = view.shape
        source_shape = (rows, 4)
        (out,) = kernel(
            inputs=[view],
            grid=(columns, rows, 1),
            threadgroup=(columns, 1, 1),
            output_shapes=[source_shape],
            output_dtypes=[view.dtype],
            init_value=0,
        )
        assert mx.array_equal(out[:, :columns], view)


@pytest.mark.parametrize(("contiguous", "strides"), [(True, [4, 1]), (False, [8, 1])])
def test_an_input_is_copied_only_where_the_kernel_wants_rows_without_gaps(
    contiguous: bool, strides: list[int]
) -> None:
    kernel = emulator.factory()(
        name="strides",
        input_names=["x"],
        output_names=["o"],
        source="o[thread_position_in_grid.x] = x_strides[thread_position_in_grid.x];",
        ensure_row_contiguous=contiguous,
    )
    call = {"grid": (2, 1, 1), "threadgroup": (2, 1, 1), "output_shapes": [(2,)], "output_dtypes": [mx.int64]}
    (out,) = kernel(inputs=[mx.arange(48).reshape(6, 8)[1:5, 2:6]], **call)
    assert out.tolist() == strides
