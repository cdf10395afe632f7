"""Whether a whole forward says the same with kernels as without: two lists of results in, a sentence out.

The contests have tried every kernel alone; this sees that it was put in the right place.
"""

import math
from collections.abc import Callable, Sequence

import mlx.core as mx

# How far apart the same row may be, relative to its length, by dtype: rounding, multiplied by a deep network.
# What is computed wrongly, or of the wrong inputs, is about 1 apart.
BOUNDS = {mx.float32: 1e-3, mx.float16: 3e-2, mx.bfloat16: 1e-1}


def difference(
    expected: Sequence[mx.array], forward: Callable[[], Sequence[mx.array]], *, dtype: mx.Dtype
) -> str | None:
    """What is wrong with the rows [S, D] that `forward` makes with kernels, None if nothing is."""
    try:
        got = forward()
        mx.eval(got)
    except (RuntimeError, ValueError) as failure:
        return (str(failure).splitlines() or [type(failure).__name__])[0]
    worst = max(_apart(want, have) for want, have in zip(expected, got, strict=True))
    bound = BOUNDS.get(dtype, BOUNDS[mx.bfloat16])
    return None if worst <= bound else f"off by {worst:.2g}, allowed {bound:.2g}"


def _apart(expected: mx.array, got: mx.array) -> float:
    want, have = expected.astype(mx.float32), got.astype(mx.float32)
    length = mx.maximum(mx.linalg.norm(want, axis=-1), 1e-6)
    worst = float((mx.linalg.norm(want - have, axis=-1) / length).max())
    return worst if math.isfinite(worst) else math.inf
