"""From MLX arrays to the buffers of a launch, and back.

In: arrays and the names of the kernel's parameters. Out: arguments, and arrays made of what the kernel wrote. Knows
nothing of text or compilers.
"""

import math
from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from tests.metal_emulator.launch import Argument
from tests.metal_emulator.memory import GuardedBuffer


def as_stored(value: mx.array | float | bool, *, row_contiguous: bool) -> np.ndarray:
    """An input as NumPy sees its memory, bfloat16 as its bits; a copy where the kernel wants rows without gaps."""
    array = value if isinstance(value, mx.array) else mx.array(value)
    array = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(array)
    stored = np.array(array, copy=False)
    return np.array(stored, order="C") if row_contiguous else stored


def input_argument(parameter: str, inputs: Mapping[str, np.ndarray], poison: int) -> Argument:
    """The read-only buffer of an input, or of the shape, strides or ndim that MLX passes beside it."""
    content = _content(parameter, inputs)
    return Argument(parameter, GuardedBuffer(content.nbytes, poison, content.tobytes()), content.itemsize)


def output_argument(
    name: str, shape: Sequence[int], dtype: mx.Dtype, init_value: float | None, poison: int
) -> Argument:
    """The buffer of an output, full of poison or of the initial value."""
    size = math.prod(shape)
    buffer = GuardedBuffer(size * dtype.size, poison)
    if init_value is not None:
        buffer.fill(np.array(mx.full((size,), init_value, dtype=dtype).view(mx.uint8)).tobytes())
    return Argument(name, buffer, dtype.size, output=True, initialised=init_value is not None)


def as_array(content: bytes, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """The array that a buffer's bytes stand for."""
    return mx.array(np.frombuffer(content, np.uint8)).view(dtype).reshape(tuple(shape))


def _content(parameter: str, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    if parameter in inputs:
        return _extent(inputs[parameter])
    name, _, what = parameter.rpartition("_")
    array = inputs[name]
    if what == "shape":
        return np.array(array.shape, np.int32)
    if what == "strides":
        return np.array([stride // array.itemsize for stride in array.strides], np.int64)
    return np.array([array.ndim], np.int32)


def _extent(array: np.ndarray) -> np.ndarray:
    """All memory from the first element to the last: what a kernel may touch of a strided input."""
    if array.flags.c_contiguous:
        return array
    if any(stride < 0 for stride in array.strides):
        raise ValueError("the emulator takes no negative strides; make the array contiguous first")
    count = 1 + sum((n - 1) * s // array.itemsize for n, s in zip(array.shape, array.strides, strict=True))
    return np.lib.stride_tricks.as_strided(array, shape=(count,), strides=(array.itemsize,))
