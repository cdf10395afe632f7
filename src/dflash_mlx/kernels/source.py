"""From a `.metal` file to a callable kernel: text, content hash, math mode, factory.

In: the declaration of a kernel (file names, argument names). Out: what `mx.fast.metal_kernel`, or whatever
factory the caller hands in, makes of it. Knows no shapes and launches nothing.

A file in the kernels folder holds one kernel body and nothing else: plain ASCII, its limits in the comment at
the top. What several bodies share stands in a header file (functions and includes, no kernel). Two things
follow from how MLX wraps a body: naming a thread attribute anywhere in it, comments included, adds a kernel
parameter of that name; and `x_shape`, `x_strides` or `x_ndim` of an input `x` does the same.
"""

import functools
import hashlib
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import mlx.core as mx

from dflash_mlx import runtime


class Launch(Protocol):
    """A built kernel, called as MLX calls its own: all by keyword, outputs as a list."""

    def __call__(
        self,
        *,
        inputs: list[mx.array | int | float],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: list[tuple[str, mx.Dtype | int | bool]] | None = None,
        init_value: float | None = None,
    ) -> list[mx.array]:
        """Run over `grid` threads in groups of `threadgroup`."""


class Factory(Protocol):
    """`mx.fast.metal_kernel`, or a stand-in with its keywords."""

    def __call__(
        self,
        *,
        name: str,
        input_names: list[str],
        output_names: list[str],
        source: str,
        header: str,
        ensure_row_contiguous: bool,
        atomic_outputs: bool,
        compile_options: dict[str, str],
    ) -> Launch:
        """Make a kernel of its text."""

    def __hash__(self) -> int:
        """Built kernels are kept by factory."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """The declaration of one kernel; hashable, compared by value, holds no text."""

    name: str
    file: str  # the body, e.g. "block_attention.metal"
    inputs: tuple[str, ...]  # argument names as the body uses them, in call order
    outputs: tuple[str, ...]
    header: str | None = None  # a shared header file of the same folder, e.g. "block_attention_common.metal"
    math_mode: Literal["safe", "relaxed", "fast"] = "safe"
    contiguous: bool = True  # MLX copies strided inputs first; False: the body reads `x_strides`
    atomic: bool = False  # every output is `device atomic<T>*`

    @property
    def source(self) -> str:
        """The kernel body."""
        return _read(self.file)

    @property
    def header_text(self) -> str:
        """The shared header, or nothing."""
        return _read(self.header) if self.header else ""

    @property
    def digest(self) -> str:
        """Ten hex digits over all that decides the compiled kernel; measurements are filed under it."""
        arguments = "|".join((*self.inputs, ">", *self.outputs, str(self.contiguous), str(self.atomic)))
        text = "\0".join((self.header_text, self.source, arguments, self.math_mode))
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def build(self, factory: Factory | None = None) -> Launch:
        """The callable kernel, made once per declaration and factory.

        Metal compiles at the first launch, so errors of the Metal compiler come from there, not from here.

        Args:
            factory: stands in for `mx.fast.metal_kernel`; must be hashable (any function is).

        Raises:
            FileNotFoundError: the package was installed without its kernels folder.
            UnicodeDecodeError: the text is not ASCII.
        """
        return _build(self, factory or _metal())


def usable(factory: Factory | None = None) -> Factory | None:
    """The factory that kernels are to be built with here: the given one, else Metal's on a GPU, else None."""
    if factory is not None:
        return factory
    if mx.metal.is_available() and mx.default_device() == mx.Device(mx.gpu):
        return _metal()
    return None


def _metal() -> Factory:
    return cast(Factory, mx.fast.metal_kernel)  # MLX types its result as object


@functools.lru_cache(maxsize=256)
def _build(kernel: Kernel, factory: Factory) -> Launch:
    return factory(
        # one name with two texts collides inside MLX: the text is part of the name
        name=f"{kernel.name}_{kernel.digest}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.source,
        header=kernel.header_text,
        ensure_row_contiguous=kernel.contiguous,
        atomic_outputs=kernel.atomic,
        compile_options={"math_mode": kernel.math_mode},
    )


@functools.lru_cache(maxsize=64)
def _read(file: str) -> str:
    return (runtime.kernels_folder() / file).read_text(encoding="ascii")
