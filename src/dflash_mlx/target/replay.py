"""The kernel that runs the kept rows of a delta rule again, in the place of mlx-lm's own recurrence.

In: a recorded call of `gated_delta_update` and what was chosen. Out: the state after the first rows, or None where
mlx-lm's own recurrence is to run; contests. The stock update runs its own code object, gates and all: only what it
calls below is another function.
"""

import inspect
import types
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import gated_delta

from dflash_mlx.kernels.choice import Choices, Contest
from dflash_mlx.kernels.delta_replay import contest, delta_replay, is_chosen

_RECURRENCES = ("gated_delta_kernel", "gated_delta_ops")


class Inputs(NamedTuple):
    """What the recurrence itself takes in for T rows, and the input of the convolution before it."""

    key: mx.array  # [1, T, Hk, Dk]
    v: mx.array  # [1, T, Hv, Dv]
    decay: mx.array  # [1, T, Hv], or [1, T, Hv, Dk]
    beta: mx.array  # [1, T, Hv]
    state: mx.array  # [1, Hv, Dv, Dk], before the pass
    conv: mx.array  # [1, K - 1 + T, C]


def state(call: inspect.BoundArguments, conv: mx.array, rows: int, choices: Choices) -> mx.array | None:
    """The state after the first `rows` rows by the kernel; None where it was not chosen for such a call."""
    given = taken_in(call, conv)
    if given is None:
        return None
    count = mx.array([rows], mx.int32)
    if not is_chosen(*given, count, choices=choices):
        return None
    return delta_replay(*given, count, choices=choices)[0]


def taken_in(call: inspect.BoundArguments, conv: mx.array) -> Inputs | None:
    """What a call of `gated_delta_update` hands to its recurrence; None with a mask, or where it asks for none."""
    caught: list[Inputs | None] = []

    def catch(
        q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: Any = None
    ) -> tuple[mx.array, mx.array]:
        caught.append(Inputs(k, v, g, beta, state, conv) if mask is None else None)
        return v, state

    update = gated_delta.gated_delta_update
    names = {**update.__globals__, **dict.fromkeys(_RECURRENCES, catch)}
    caught_by = types.FunctionType(update.__code__, names, update.__name__, update.__defaults__)
    caught_by.__kwdefaults__ = update.__kwdefaults__
    caught_by(*call.args, **call.kwargs)
    return caught[0] if caught else None


def contests(inputs: Iterable[Inputs], *, block_size: int) -> Iterator[Contest]:
    """What undoing a part of 2 to `block_size` rows could use, held against mlx-lm's own recurrence."""
    seen = set()
    for given in inputs:
        rows = given.key.shape[1]
        for count in range(2, block_size + 1):
            held = contest(
                count,
                given.key.shape[2],
                given.v.shape[2],
                given.key.shape[3],
                given.v.shape[3],
                taps=given.conv.shape[1] - rows,
                channels=given.conv.shape[2],
                dtype=given.v.dtype,
                vector=given.decay.ndim == 4,
            )
            if held is not None and held.shape_class not in seen:
                seen.add(held.shape_class)
                yield replace(held, reference=_own)


def _own(
    key: mx.array,
    v: mx.array,
    decay: mx.array,
    beta: mx.array,
    state: mx.array,
    conv: mx.array,
    count: mx.array,
) -> list[mx.array]:
    """What runs where the kernel does not: mlx-lm's recurrence over half of the rows, as `contest` keeps them."""
    rows = key.shape[1]
    keep = (rows + 1) // 2
    key, v, decay, beta = (array[:, :keep] for array in (key, v, decay, beta))
    on_metal = mx.metal.is_available() and mx.default_device() == mx.gpu
    recurrence = gated_delta.gated_delta_kernel if on_metal else gated_delta.gated_delta_ops
    after: mx.array = recurrence(key, key, v, decay, beta, state)[1]
    return [after, conv[:, keep : keep + conv.shape[1] - rows]]
