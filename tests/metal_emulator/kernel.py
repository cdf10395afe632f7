"""The stand-in for `mx.fast.metal_kernel`.

In: the same keywords, and MLX arrays. Out: MLX arrays, evaluated. MLX itself checks the arguments and generates the
text; this file takes it through lint, translation, compiler and launch.
"""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, cast

import mlx.core as mx

from tests.metal_emulator.binding import as_array, as_stored, input_argument, output_argument
from tests.metal_emulator.export import KernelText, cut, exported_text
from tests.metal_emulator.launch import Counts, launch
from tests.metal_emulator.lint import lint
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
        arrays = [as_stored(x, row_contiguous=self._row_contiguous) for x in inputs]
        inputs_by_name = dict(zip(self._input_names, arrays, strict=True))
        outputs = dict(zip(self._output_names, zip(output_shapes, output_dtypes, strict=True), strict=True))
        poison = _POISON[self._seed % 2]
        with ExitStack() as stack:
            arguments = []
            for parameter in text.parameters:
                if not parameter.is_buffer:
                    continue
                if parameter.name in outputs:
                    argument = output_argument(parameter.name, *outputs[parameter.name], init_value, poison)
                else:
                    argument = input_argument(parameter.name, inputs_by_name, poison)
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
            written = {a.name: a.buffer.read() for a in arguments if a.output}
        return [as_array(written[name], *outputs[name]) for name in self._output_names]

    def _compiled(self, text: KernelText) -> Path:
        if text.whole in self._libraries:
            return self._libraries[text.whole]
        if self._strict_text:
            found = lint(text, self.names)
            if found:
                raise KernelFault(self.name, found)
        unit = translate(text, self.names)
        with ThreadPoolExecutor(2) as pool:
            syntax = pool.submit(check_syntax, unit, self.name) if self._strict_text else None
            library = pool.submit(shared_object, unit, self._mode, self.name)
        if syntax:
            syntax.result()  # first: its messages know address spaces
        self._libraries[text.whole] = library.result()
        return self._libraries[text.whole]


def _file_names(name: str, header: str, source: str) -> Names:
    """The files of kernels_metal/ that hold these texts; names made from the kernel's for texts from elsewhere."""
    files = {path.read_text(): path.name for path in BODIES.glob("*.metal")}
    return Names(files.get(header, f"{name}.header.metal"), files.get(source, f"{name}.metal"))
