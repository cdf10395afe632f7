"""A grouped dynamic convolution around a sublayer (DFlash2): block rows in, block rows out.

One projection of the sublayer's normed input gives the kernels of both its sides. A row sees itself and the block
rows before it; slot 0 sees zeros there, and no row of the context takes part.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.drafter.parts import Convolution


class GroupedConvolution(nn.Module):
    """Kernels of one sublayer: a fixed one for each channel plus a dynamic one for each group of channels."""

    def __init__(self, config: Convolution, hidden_size: int) -> None:
        super().__init__()
        self._group_size = config.group_size
        groups = hidden_size // config.group_size
        self.base_kernel = mx.zeros((2, config.taps, hidden_size))  # input or output side, tap, channel
        self.kernel_projection = nn.Linear(hidden_size, 2 * config.taps * groups, bias=False)

    def kernels(self, rows: mx.array) -> mx.array:
        """Normed rows [1, B, D] to kernels [2, B, taps, D] in float32: input side, output side."""
        sides, taps, hidden = self.base_kernel.shape
        dynamic = self.kernel_projection(rows)[0].astype(mx.float32)
        dynamic = dynamic.reshape(-1, sides, taps, hidden // self._group_size)
        dynamic = mx.repeat(dynamic, self._group_size, axis=-1)  # [B, 2, taps, D]
        return self.base_kernel[:, None].astype(mx.float32) + dynamic.swapaxes(0, 1)


def around(
    convolution: GroupedConvolution | None, rows: mx.array, sublayer: Callable[[mx.array], mx.array]
) -> mx.array:
    """The sublayer on normed rows [1, B, D], between its two convolutions where it has any."""
    if convolution is None:
        return sublayer(rows)
    before, after = convolution.kernels(rows)
    return _convolved(sublayer(_convolved(rows, before)), after)


def _convolved(rows: mx.array, kernel: mx.array) -> mx.array:
    """y[t] = sum over i of kernel[t, i] * x[t - i], in float32: products of 16-bit rows round too early."""
    x = rows[0].astype(mx.float32)  # [B, D]
    length, taps = x.shape[0], kernel.shape[1]
    padded = mx.pad(x, [(taps - 1, 0), (0, 0)])
    shifted = mx.stack([padded[taps - 1 - i : taps - 1 - i + length] for i in range(taps)], axis=1)
    return (kernel * shifted).sum(axis=1)[None].astype(rows.dtype)
