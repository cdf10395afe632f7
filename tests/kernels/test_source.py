"""How a `.metal` file becomes a kernel: its name stands for its text, and it is made once."""

from dataclasses import replace

import mlx.core as mx
import pytest

from dflash_mlx import runtime
from dflash_mlx.kernels import source
from dflash_mlx.kernels.source import Kernel, usable

COPY = Kernel("copy", "copy.metal", ("x",), ("y",), header="shared.metal")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A kernels folder of its own, read afresh."""
    monkeypatch.setattr(runtime, "kernels_folder", lambda: tmp_path)
    (tmp_path / "copy.metal").write_text(
        "  y[thread_position_in_grid.x] = same(x[thread_position_in_grid.x]);\n"
    )
    (tmp_path / "shared.metal").write_text("inline float same(float a) { return a; }\n")
    source._read.cache_clear()
    yield tmp_path
    source._read.cache_clear()


class Recording:
    """A factory that notes what it was asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, **options):
        self.asked.append(options)
        return lambda **_: []


def test_the_factory_gets_text_arguments_and_math_mode(folder):
    factory = Recording()
    replace(COPY, math_mode="fast", contiguous=False).build(factory)
    (asked,) = factory.asked
    assert asked["source"] == (folder / "copy.metal").read_text()
    assert asked["header"] == (folder / "shared.metal").read_text()
    assert (asked["input_names"], asked["output_names"]) == (["x"], ["y"])
    assert asked["compile_options"] == {"math_mode": "fast"}
    assert asked["ensure_row_contiguous"] is False and asked["atomic_outputs"] is False


def test_a_kernel_is_made_once_for_each_factory(folder):
    first, second = Recording(), Recording()
    assert COPY.build(first) is replace(COPY).build(first)
    assert COPY.build(second) is not COPY.build(first)
    assert len(first.asked) == len(second.asked) == 1


@pytest.mark.parametrize(
    "other",
    [
        replace(COPY, math_mode="fast"),
        replace(COPY, inputs=("x", "z")),
        replace(COPY, inputs=(), outputs=("x", "y")),
        replace(COPY, header=None),
        replace(COPY, contiguous=False),
        replace(COPY, atomic=True),
    ],
    ids=["math mode", "inputs", "outputs", "header", "contiguous", "atomic"],
)
def test_another_declaration_is_another_name(folder, other):
    """MLX keeps compiled kernels by name: two texts under one name would be mixed up."""
    factory = Recording()
    COPY.build(factory)
    other.build(factory)
    assert len({asked["name"] for asked in factory.asked}) == 2


@pytest.mark.parametrize("file", ["copy.metal", "shared.metal"])
def test_another_text_is_another_name(folder, file):
    before = COPY.digest
    (folder / file).write_text((folder / file).read_text() + "// changed\n")
    source._read.cache_clear()
    assert COPY.digest != before
    assert len(before) == 10


def test_text_that_is_not_ascii_is_refused(folder):
    (folder / "copy.metal").write_text("// \N{GREEK SMALL LETTER THETA}\n", encoding="utf-8")
    source._read.cache_clear()
    with pytest.raises(UnicodeDecodeError):
        COPY.build(Recording())


def test_kernels_are_built_by_the_given_factory_or_by_metal_on_a_gpu():
    factory = Recording()
    assert usable(factory) is factory
    on_gpu = mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu)
    assert usable() is (mx.fast.metal_kernel if on_gpu else None)


def test_a_cpu_default_keeps_kernels_off_a_machine_with_metal(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert usable() is None
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert usable() is mx.fast.metal_kernel
