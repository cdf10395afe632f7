"""Runs Metal kernels on a Linux CPU, so that tests prove them on machines without a Mac.

In: what `mx.fast.metal_kernel` takes. Out: what it gives, or a `KernelFault` that names the line in the `.metal`
file. The text that is compiled is the one that the installed MLX generates; bodies are not changed for the
emulator and know nothing of it. Not shipped with the package.

    kernel = emulator.factory(mode="check", seed=1)(name=..., input_names=..., output_names=..., source=...)
    (out,) = kernel(inputs=[x], grid=(n, 1, 1), threadgroup=(32, 1, 1), output_shapes=[x.shape], ...)

docs/kernels.md says what is checked and what a CPU cannot show.
"""

from tests.metal_emulator.kernel import EmulatedKernel, Mode, factory
from tests.metal_emulator.report import KernelFault

__all__ = ["EmulatedKernel", "KernelFault", "Mode", "factory"]
