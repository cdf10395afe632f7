"""The recurrent state of a gated-delta layer after the first rows of a pass, from the inputs kept during it.

In: the state before the pass, the inputs of its T rows, the convolution input, and how many rows to keep, as
an array, since it may not be known yet when the work is enqueued. Out: the state and the convolution window
after those rows. The definition is the recurrence of mlx-lm's `gated_delta_ops`, without the read-out. Knows
no layer.
"""

import mlx.core as mx

from dflash_mlx.kernels.choice import NO_KERNELS, Choices, Contest
from dflash_mlx.kernels.source import Factory, Kernel

REPLAY = Kernel(
    name="delta_replay",
    file="delta_replay.metal",
    inputs=("key", "v", "decay", "beta", "state", "conv", "count"),
    outputs=("new_state", "window"),
)

BOUND = 1e-4  # the state is fp32 on both sides; the sums are taken in another order
_SIMD_GROUPS = 2  # a threadgroup: each SIMD-group works alone, two keep the scheduler busy


def supports(
    key: mx.array,
    v: mx.array,
    decay: mx.array,
    beta: mx.array,
    state: mx.array,
    conv: mx.array,
    count: mx.array,
) -> bool:
    """Whether the kernel takes these shapes and dtypes: the limits of `delta_replay.metal`."""
    if key.ndim != 4 or v.ndim != 4 or conv.ndim != 3 or count.ndim != 1:
        return False
    (batch, rows, key_heads, key_dim), (heads, value_dim) = key.shape, v.shape[2:]
    return (
        key_dim % 32 == 0
        and key_dim <= 256
        and heads % key_heads == 0
        and v.shape[:2] == (batch, rows)
        and rows > 0
        and decay.shape in ((batch, rows, heads), (batch, rows, heads, key_dim))
        and beta.shape == (batch, rows, heads)
        and state.shape == (batch, heads, value_dim, key_dim)
        and state.dtype == mx.float32
        and conv.shape[0] == batch
        and conv.shape[1] > rows
        and conv.size < 2**31
        and count.shape == (batch,)
        and count.dtype == mx.int32
    )


def delta_replay_reference(
    key: mx.array,
    v: mx.array,
    decay: mx.array,
    beta: mx.array,
    state: mx.array,
    conv: mx.array,
    count: mx.array,
) -> tuple[mx.array, mx.array]:
    """The definition: state and convolution window after the first count[b] rows of each batch entry.

    Args:
        key: [B, T, Hk, Dk], normalised as it entered the recurrence.
        v: [B, T, Hv, Dv].
        decay: [B, T, Hv], or [B, T, Hv, Dk]; the factor itself, not its logarithm.
        beta: [B, T, Hv].
        state: [B, Hv, Dv, Dk] float32, before the pass.
        conv: [B, K - 1 + T, C], the rows that entered the convolution, the old window first.
        count: [B] int32, within 0..T.

    Returns:
        The state [B, Hv, Dv, Dk] float32 and the window [B, K - 1, C].
    """
    rows = key.shape[1]
    key = mx.repeat(key, v.shape[2] // key.shape[2], axis=2).astype(mx.float32)
    count = mx.clip(count, 0, rows)
    for t in range(rows):
        factor = decay[:, t, :, None, :] if decay.ndim == 4 else decay[:, t, :, None, None]
        decayed = state * factor
        recalled = (decayed * key[:, t, :, None, :]).sum(axis=-1)
        change = (v[:, t] - recalled) * beta[:, t, :, None]
        after = decayed + key[:, t, :, None, :] * change[..., None]
        state = mx.where((t < count)[:, None, None, None], after, state)
    taps = conv.shape[1] - rows
    places = count[:, None] + mx.arange(taps)
    return state, mx.take_along_axis(conv, places[..., None], axis=1)


def delta_replay_kernel(
    key: mx.array,
    v: mx.array,
    decay: mx.array,
    beta: mx.array,
    state: mx.array,
    conv: mx.array,
    count: mx.array,
    *,
    factory: Factory | None = None,
) -> tuple[mx.array, mx.array]:
    """`delta_replay_reference` by the Metal kernel; the caller has asked `supports`."""
    batch, rows, _, key_dim = key.shape
    heads, value_dim = v.shape[2:]
    blocks = -(-value_dim // 8)
    new_state, window = REPLAY.build(factory)(
        inputs=[key, v, decay, beta, state, conv, count],
        template=[("DK", key_dim), ("DV", value_dim), ("VECTOR", decay.ndim == 4)],
        grid=(32, blocks, batch * heads),
        threadgroup=(32, min(_SIMD_GROUPS, blocks), 1),
        output_shapes=[state.shape, (batch, conv.shape[1] - rows, conv.shape[2])],
        output_dtypes=[mx.float32, conv.dtype],
    )
    return new_state, window


def delta_replay(
    key: mx.array,
    v: mx.array,
    decay: mx.array,
    beta: mx.array,
    state: mx.array,
    conv: mx.array,
    count: mx.array,
    *,
    choices: Choices = NO_KERNELS,
) -> tuple[mx.array, mx.array]:
    """`delta_replay_reference` by whatever was chosen for this class."""
    if choices.chosen and supports(key, v, decay, beta, state, conv, count):
        chosen = choices.factory_for(REPLAY.name, shape_class(key, v, decay, conv))
        if chosen is not None:
            return delta_replay_kernel(key, v, decay, beta, state, conv, count, factory=chosen)
    return delta_replay_reference(key, v, decay, beta, state, conv, count)


def is_chosen(
    key: mx.array,
    v: mx.array,
    decay: mx.array,
    beta: mx.array,
    state: mx.array,
    conv: mx.array,
    count: mx.array,
    *,
    choices: Choices,
) -> bool:
    """Whether `delta_replay` would run the kernel; a caller may have something faster than the definition."""
    if not choices.chosen or not supports(key, v, decay, beta, state, conv, count):
        return False
    return choices.factory_for(REPLAY.name, shape_class(key, v, decay, conv)) is not None


def shape_class(key: mx.array, v: mx.array, decay: mx.array, conv: mx.array) -> str:
    """The class that one measurement stands for: a band of row counts, all else exact."""
    batch, rows, key_heads, key_dim = key.shape
    heads, value_dim = v.shape[2:]
    low, high = _row_class(rows)
    gate = "vector" if decay.ndim == 4 else "scalar"
    dtype = str(v.dtype).removeprefix("mlx.core.")
    taps = conv.shape[1] - rows
    heads_text = f"b{batch} hk{key_heads} hv{heads} dk{key_dim} dv{value_dim}"
    return f"t{low}-{high} {heads_text} {gate} conv {taps}x{conv.shape[2]} {dtype}"


def _row_class(rows: int) -> tuple[int, int]:
    high = 1 << (rows - 1).bit_length()
    return high // 2 + 1, high


def contest(
    rows: int,
    key_heads: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    taps: int,
    channels: int,
    dtype: mx.Dtype,
    vector: bool = False,
) -> Contest | None:
    """What `Chooser.prepare` needs to try this class at batch 1; half of the rows are kept. None outside the limits."""
    rows = _row_class(rows)[0]
    gate = (1, rows, heads, key_dim) if vector else (1, rows, heads)

    def inputs(seed: int) -> tuple[mx.array, ...]:
        keys = mx.random.split(mx.random.key(seed), 6)
        key = mx.random.normal((1, rows, key_heads, key_dim), key=keys[0])
        return (
            (key / mx.linalg.norm(key, axis=-1, keepdims=True)).astype(dtype),
            mx.random.normal((1, rows, heads, value_dim), key=keys[1]).astype(dtype),
            mx.random.uniform(0.8, 1.0, gate, key=keys[2]),
            mx.random.uniform(0.0, 1.0, (1, rows, heads), key=keys[3]).astype(dtype),
            mx.random.normal((1, heads, value_dim, key_dim), key=keys[4]),
            mx.random.normal((1, taps + rows, channels), key=keys[5]).astype(dtype),
            mx.array([(rows + 1) // 2], mx.int32),
        )

    def reference(*arrays: mx.array) -> list[mx.array]:
        return list(delta_replay_reference(*arrays))

    def kernel(factory: Factory, *arrays: mx.array) -> list[mx.array]:
        return list(delta_replay_kernel(*arrays, factory=factory))

    sample = inputs(0)
    if not supports(*sample):
        return None
    key, v, decay, _, _, conv, _ = sample
    return Contest(
        kernel=REPLAY.name,
        digest=REPLAY.digest,
        shape_class=shape_class(key, v, decay, conv),
        bound=BOUND,
        bytes=4 * heads * value_dim * key_dim,
        inputs=inputs,
        reference=reference,
        candidate=kernel,
    )
