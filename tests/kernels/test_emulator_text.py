"""The text that is compiled is MLX's own, and what MLX or Metal would refuse in it is refused."""

from typing import Any

import mlx.core as mx
import pytest
from tests import metal_emulator as emulator
from tests.metal_emulator.kernel import EmulatedKernel
from tests.metal_emulator.samples import FIRST_PASS
from tests.metal_emulator.translate import Names, translate

FLOAT_CALL: dict[str, Any] = {
    "grid": (32, 1, 1),
    "threadgroup": (32, 1, 1),
    "output_shapes": [(32,)],
    "output_dtypes": [mx.float32],
}


def kernel(
    source: str, *, header: str = "", outputs: tuple[str, ...] = ("o",), **options: Any
) -> EmulatedKernel:
    return emulator.factory(mode="fast")(
        name="text", input_names=["x"], output_names=list(outputs), source=source, header=header, **options
    )


def fault(source: str, *, x: mx.array | None = None, **options: Any) -> str:
    with pytest.raises(emulator.KernelFault) as caught:
        kernel(source, **options)(inputs=[mx.ones(32) if x is None else x], **FLOAT_CALL)
    return str(caught.value)


@pytest.mark.parametrize(
    ("x", "template"),
    [
        (mx.ones((4, 8)), []),
        (mx.ones(7, mx.bfloat16), [("T", mx.float16), ("N", -3), ("FLAG", True)]),
        (2.0, [("N", 1)]),
        (3, []),
    ],
    ids=["plain", "small and templated", "float scalar", "int scalar"],
)
def test_the_text_is_what_mlx_prints(x: Any, template: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    """`verbose` makes MLX print the text that it generates: a second way to it, which shares no code with ours."""
    k = kernel(
        "o[thread_position_in_grid.x] = 1; // x_shape x_strides\n",
        header="#include <metal_math>\n#define A 1\n",
    )
    text = k.text(inputs=[x], template=template, verbose=True, **FLOAT_CALL)
    printed = capfd.readouterr().out
    assert "custom_kernel_text" in printed
    assert text.whole.strip() in printed
    assert text.whole == text.header + text.signature + text.body + text.tail


def test_translation_keeps_every_line_of_header_and_body() -> None:
    """But for threadgroup variables the unit repeats MLX's text line by line, under the numbers of the files."""
    sample = FIRST_PASS["matrix"]
    k = sample.build(emulator.factory())
    q, kv = mx.ones((4, 16, 64)), mx.ones((2, 16, 64))
    text = k.text(
        inputs=[q, kv, kv, kv, kv, mx.array([1, 2, 3]), 1.0],
        template=[("T", mx.float32), ("D", 64), ("G", 2), ("L", 16), ("NSG", 4), ("BK", 32)],
        grid=(128, 2, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[(64, 1, 64), (64, 1), (64, 1)],
        output_dtypes=[mx.float32] * 3,
    )
    unit = translate(text, Names("tiles.metal", "attention.metal"))
    header, body = unit.split('#line 1 "<signature>"\n')
    assert header == f'#line 1 "tiles.metal"\n{text.header}\n'
    body_lines = body.split('#line 1 "attention.metal"\n')[1].split('\n#line 1 "<instance>"')[0].splitlines()
    source_lines = sample.source.splitlines()
    changed = [(a, b) for a, b in zip(source_lines, body_lines, strict=False) if a != b]
    assert [a.split()[0] for a, _ in changed] == ["threadgroup"] * 4
    assert len(body_lines) == len(source_lines)
    assert text.signature in unit


def test_small_arrays_live_in_constant_memory() -> None:
    """MLX passes arrays of fewer than eight elements as `constant`: a helper has to take both kinds of pointer."""
    helper = "inline float first(const device float* p) { return p[0]; }\n"
    source = "o[thread_position_in_grid.x] = first(x);"
    (out,) = kernel(source, header=helper)(inputs=[mx.ones(8)], **FLOAT_CALL)
    assert out[0].item() == 1.0
    assert "no matching function for call to 'first'" in fault(source, header=helper, x=mx.ones(7))
    either = "template <typename P> inline float first(P p) { return p[0]; }\n"
    (out,) = kernel(source, header=either)(inputs=[mx.ones(7)], **FLOAT_CALL)
    assert out[0].item() == 1.0


def test_a_signature_that_mlx_closes_early_is_reported() -> None:
    """MLX 0.32: several outputs and shape arguments, but no thread attribute."""
    k = kernel("o[0] = x_shape[0]; p[0] = 1;", outputs=("o", "p"))
    with pytest.raises(emulator.KernelFault, match="name at least one thread attribute"):
        k(
            inputs=[mx.ones(8)],
            **(FLOAT_CALL | {"output_shapes": [(1,)] * 2, "output_dtypes": [mx.float32] * 2}),
        )


def test_wrong_arguments_are_refused_by_mlx_itself() -> None:
    with pytest.raises(ValueError, match="inputs"):
        kernel("o[0] = x[0];")(inputs=[mx.ones(8), 1], **FLOAT_CALL)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("uint grid_size = 3; o[0] = grid_size;", "text.metal:1: a local variable `grid_size` collides"),
        (
            "\nconst float* p = x; o[0] = p[0];",
            "text.metal:2: `float* p`: a pointer or reference needs an address space",
        ),
        ("o[0] = std::max(x[0], x[1]);", "std:: does not exist"),
        ("o[0] = (float4)(x[0]).x;", "C-style vector cast"),
        ("static int calls = 0; o[0] = calls++;", "static local variable"),
        ("#include <vector>\no[0] = 0;", "only metal_* headers exist"),
        ("o[0] = 1.0; // caf\u00e9", "text.metal:1: non-ASCII character"),
        ("threadgroup float t[4] = {0}; o[0] = t[0];", "threadgroup variables take no initialiser"),
        (
            "device float* p = o; threadgroup float* q = p; o[0] = q[0];",
            "cannot initialize a variable of type",
        ),
        ("thread float* p = x; o[0] = p[0];", "cannot initialize a variable of type"),
        ("x[0] = 1;", "not assignable"),
        ("o[0] = y;", "text.metal:1:8: error: use of undeclared identifier 'y'"),
        ("threadgroup float\n  t[4];\no[0] = y;", "text.metal:3:8: error: use of undeclared identifier 'y'"),
    ],
)
def test_text_that_metal_refuses_is_refused(source: str, said: str) -> None:
    assert said in fault(source)


def test_what_stands_in_comments_is_not_refused() -> None:
    source = "// std::double (float4)(x) static int a = 1; float* p = 0;\no[thread_position_in_grid.x] = 1;"
    (out,) = kernel(source)(inputs=[mx.ones(8)], **FLOAT_CALL)
    assert out.tolist() == [1.0] * 32


def test_faults_name_the_file_that_a_body_stands_in() -> None:
    """A body out of kernels_metal/ is found there; others are called by the kernel's name."""
    k = emulator.factory(mode="fast")
    body = (emulator.kernel.BODIES / "greedy_walk.metal").read_text()
    known = k(name="walk_0123456789", input_names=["x"], output_names=["o"], source=body)
    assert known.names == Names("walk_0123456789.header.metal", "greedy_walk.metal")
    other = k(name="mine", input_names=["x"], output_names=["o"], source="o[0] = 1;")
    assert other.names.body == "mine.metal"


def test_more_buffers_than_metal_takes_are_refused() -> None:
    names = [f"x{i}" for i in range(31)]
    k = emulator.factory()(name="many", input_names=names, output_names=["o"], source="o[grid_size.x] = 1;")
    with pytest.raises(emulator.KernelFault, match="32 buffer arguments: Metal takes 31"):
        k(inputs=[mx.ones(8)] * 31, **FLOAT_CALL)
