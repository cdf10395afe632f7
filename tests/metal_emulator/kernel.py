"""The stand-in for `mx.fast.metal_kernel`.

In: the same keywords, and MLX arrays. Out: MLX arrays, evaluated. MLX itself checks the arguments and generates the
text; this file compiles it for the mode, once per distinct text, and binds arrays to its parameters.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, cast

import mlx.core as mx
import numpy as np

from tests.metal_emulator.export import KernelText, Parameter, cut, exported_text
from tests.metal_emulator.launch import Argument, Counts, launch
from tests.metal_emulator.lint import lint
from tests.metal_emulator.memory import GuardedBuffer
from tests.metal_emulator.report import KernelFault
from tests.metal_emulator.support import require
from tests.metal_emulator.toolchain import check_syntax, shared_object
from tests.metal_emulator.translate import Names, translate

Mode = Literal["check", "fast"]

BODIES = Path(__file__).parents[2] / "kernels_metal"
_THREAD_LIMIT = 1024  # a threadgroup, on every Apple GPU
_POISON = (0xFF, 0x7B)  # what fresh memory holds, by parity of the seed: a NaN or -1; a large number


def factory(
    *, mode: Mode = "check", seed: int = 0, strict_text: bool = True
) -> Callable[..., "EmulatedKernel"]:
    """A drop-in for `mx.fast.metal_kernel`; the same object for the same arguments.

    Args:
        mode: "check" finds races, accesses out of bounds, reads of memory nobody wrote, outputs left unwritten and
            undefined arithmetic. "fast" is optimised code; divergence, guard pages and threadgroup overruns are
            still noticed.
        seed: 0 runs lanes, SIMD-groups and threadgroups in order, any other number shuffles them.
        strict_text: also refuse what only Metal's compiler would (missing or wrong address spaces and the like).
            False for MLX's own headers, which are known to compile there.

    Skips the calling test on a Mac and fails it where the compiler is missing (support.py).
    """
    require()
    return functools.partial(EmulatedKernel, mode=mode, seed=seed, strict_text=strict_text)


class EmulatedKernel:
    """A kernel that runs on the CPU; called as MLX calls its own.

    Attributes:
        counts: what the last launch did, None before it.
    """

    def __init__(
        self,
        *,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: dict[str, str] | None = None,
        mode: Mode,
        seed: int,
        strict_text: bool,
    ):
        self._real = cast(  # MLX types its result as object
            Callable[..., list[mx.array]],
            mx.fast.metal_kernel(
                name=name,
                input_names=list(input_names),
                output_names=list(output_names),
                source=source,
                header=header,
                ensure_row_contiguous=ensure_row_contiguous,
                atomic_outputs=atomic_outputs,
                compile_options=compile_options,
            ),
        )
        self.name = name
        self.counts: Counts | None = None
        self._input_names, self._output_names = tuple(input_names), tuple(output_names)
        self._source, self._header = source, header
        self._row_contiguous = ensure_row_contiguous
        self._mode, self._seed, self._strict_text = mode, seed, strict_text
        self._libraries: dict[str, Path] = {}  # by generated text
        self.names = _file_names(name, header, source)

    def text(self, *, inputs: Sequence[Any], **call: Any) -> KernelText:
        """The text that MLX generates for this call and that the emulator compiles."""
        text = exported_text(self._real, inputs, **call)
        return cut(text, kernel=self.name, header=self._header, source=self._source)

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """Compiles if need be, launches, and returns the outputs. `stream` has no meaning here.

        Raises:
            KernelFault: what this module is for.
            ValueError: MLX's own, for arguments that do not fit, and for a threadgroup that no Apple GPU takes.
        """
        if threadgroup[0] * threadgroup[1] * threadgroup[2] > _THREAD_LIMIT:
            raise ValueError(f"{self.name}: threadgroup {threadgroup} has more than {_THREAD_LIMIT} threads")
        text = self.text(
            inputs=inputs,
            output_shapes=[tuple(shape) for shape in output_shapes],
            output_dtypes=list(output_dtypes),
            grid=grid,
            threadgroup=threadgroup,
            template=list(template or []),
            init_value=init_value,
            verbose=verbose,
        )
        library = self._compiled(text)
        arrays = dict(zip(self._input_names, map(self._storage, inputs), strict=True))
        dtypes = dict(zip(self._output_names, output_dtypes, strict=True))
        shapes = dict(zip(self._output_names, map(tuple, output_shapes), strict=True))
        poison = _POISON[self._seed % 2]
        with ExitStack() as stack:
            arguments, outputs = [], {}
            for parameter in text.parameters:
                if not parameter.attribute.startswith("buffer"):
                    continue
                if parameter.name in dtypes:
                    size = int(np.prod(shapes[parameter.name], dtype=np.int64))
                    argument = _output(parameter.name, size, dtypes[parameter.name], init_value, poison)
                    outputs[parameter.name] = argument.buffer
                else:
                    argument = _input(parameter, arrays, poison)
                stack.enter_context(argument.buffer)
                arguments.append(argument)
            self.counts = launch(
                library,
                arguments,
                kernel=self.name,
                grid=grid,
                threadgroup=threadgroup,
                seed=self._seed,
                poison=poison,
                check=self._mode == "check",
            )
            return [_array(outputs[n].read(), shapes[n], dtypes[n]) for n in self._output_names]

    def _compiled(self, text: KernelText) -> Path:
        if text.whole in self._libraries:
            return self._libraries[text.whole]
        if self._strict_text:
            found = lint(text, self.names)
            if found:
                raise KernelFault(self.name, found)
        unit = translate(text, self.names)
        if self._strict_text:
            check_syntax(unit, self.name)
        self._libraries[text.whole] = shared_object(unit, self._mode, self.name)
        return self._libraries[text.whole]

    def _storage(self, value: Any) -> np.ndarray:
        """An input as NumPy sees its memory; bfloat16 as its bits. Strides survive where the kernel asked for it."""
        array = value if isinstance(value, mx.array) else mx.array(value)
        array = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
        mx.eval(array)
        storage = np.array(array, copy=False)
        return np.ascontiguousarray(storage).reshape(storage.shape) if self._row_contiguous else storage


def _input(parameter: Parameter, arrays: dict[str, np.ndarray], poison: int) -> Argument:
    """The buffer of an input, or of the shape, strides or ndim that MLX passes beside it."""
    content = _content(parameter.name, arrays)
    buffer = GuardedBuffer(content.nbytes, poison, content.tobytes())
    return Argument(parameter.name, buffer, content.itemsize)


def _content(parameter: str, arrays: dict[str, np.ndarray]) -> np.ndarray:
    if parameter in arrays:
        return _extent(arrays[parameter])
    name, _, what = parameter.rpartition("_")
    array = arrays[name]
    if what == "shape":
        return np.array(array.shape, np.int32)
    if what == "strides":
        return np.array([stride // array.itemsize for stride in array.strides], np.int64)
    return np.array([array.ndim], np.int32)


def _extent(array: np.ndarray) -> np.ndarray:
    """All memory from the first element to the last, which is what a kernel may touch of a strided input."""
    if array.flags.c_contiguous:
        return array
    if any(stride < 0 for stride in array.strides):
        raise ValueError(
            "the emulator takes no inputs with negative strides; make the array contiguous first"
        )
    count = 1 + sum((n - 1) * s // array.itemsize for n, s in zip(array.shape, array.strides, strict=True))
    return np.lib.stride_tricks.as_strided(array, shape=(count,), strides=(array.itemsize,))


def _output(name: str, size: int, dtype: mx.Dtype, init_value: float | None, poison: int) -> Argument:
    buffer = GuardedBuffer(size * dtype.size, poison)
    if init_value is not None:
        filled = mx.full((size,), init_value, dtype=dtype).view(mx.uint8)
        buffer.fill(np.array(filled).tobytes())
    return Argument(name, buffer, dtype.size, output=True, initialised=init_value is not None)


def _array(content: bytes, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    raw = mx.array(np.frombuffer(content, np.uint8))
    return raw.view(dtype).reshape(shape)


def _file_names(name: str, header: str, source: str) -> Names:
    """The files that header and body stand in, if they do; else names made from the kernel's."""
    header_name, body_name, body_line = f"{name}.header.metal", f"{name}.metal", 1
    for path in sorted(BODIES.glob("*.metal")):
        text = path.read_text()
        if header and text == header:
            header_name = path.name
        if source in text:
            body_name, body_line = path.name, 1 + text.count("\n", 0, text.index(source))
    return Names(header_name, body_name, body_line)
