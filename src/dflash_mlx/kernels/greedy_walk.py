"""The greedy tokens of a verify pass and how far the proposal agrees with them, in one small array.

In: logits [S, V] and the S - 1 proposed tokens. Out: int32 [S + 1] = (accepted, token of row 0, ..., S - 1).
Ties take the lowest id. Knows nothing of stop tokens and budgets.
"""

import mlx.core as mx

from dflash_mlx.kernels.choice import NO_KERNELS, Choices, Contest
from dflash_mlx.kernels.source import Factory, Kernel

WALK_ROWS = Kernel(
    name="greedy_walk_rows", file="greedy_walk_rows.metal", inputs=("logits",), outputs=("best", "id")
)
WALK = Kernel(
    name="greedy_walk", file="greedy_walk.metal", inputs=("best", "id", "proposal"), outputs=("walk",)
)

MAX_ROWS = 32
_SPAN = 4096  # ids of one threadgroup: 16 for each thread
_THREADS = 256  # as the body counts on


def supports(logits: mx.array, proposal: mx.array) -> bool:
    """Whether the kernel takes these shapes and dtypes: the limits of both bodies."""
    return (
        logits.ndim == 2
        and 2 <= logits.shape[0] <= MAX_ROWS
        and 8 <= logits.size < 2**31
        and logits.dtype in (mx.float32, mx.float16, mx.bfloat16)
        and proposal.shape == (logits.shape[0] - 1,)
        and proposal.dtype == mx.int32
    )


def greedy_walk_reference(logits: mx.array, proposal: mx.array) -> mx.array:
    """The definition: the largest logit's lowest id in each row, led by the length of the agreeing prefix."""
    tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
    agrees = (tokens[:-1] == proposal).astype(mx.int32)
    accepted = mx.cumprod(agrees).sum(keepdims=True).astype(mx.int32)
    return mx.concatenate([accepted, tokens])


def greedy_walk_kernel(logits: mx.array, proposal: mx.array, *, factory: Factory | None = None) -> mx.array:
    """`greedy_walk_reference` by the two Metal kernels; the caller has asked `supports`."""
    rows, vocabulary = logits.shape
    parts = -(-vocabulary // _SPAN)
    best, ids = WALK_ROWS.build(factory)(
        inputs=[logits],
        template=[("SPAN", _SPAN)],
        grid=(_THREADS * parts, rows, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows, parts), (rows, parts)],
        output_dtypes=[mx.float32, mx.int32],
    )
    return WALK.build(factory)(
        inputs=[best, ids, proposal],
        grid=(32 * rows, 1, 1),
        threadgroup=(32 * rows, 1, 1),
        output_shapes=[(rows + 1,)],
        output_dtypes=[mx.int32],
    )[0]


def greedy_walk(logits: mx.array, proposal: mx.array, *, choices: Choices = NO_KERNELS) -> mx.array:
    """`greedy_walk_reference` by whatever was chosen for this class."""
    chosen = _chosen(logits, proposal, choices)
    if chosen is None:
        return greedy_walk_reference(logits, proposal)
    return greedy_walk_kernel(logits, proposal, factory=chosen)


def is_chosen(logits: mx.array, proposal: mx.array, choices: Choices) -> bool:
    """Whether `greedy_walk` runs the kernel here."""
    return _chosen(logits, proposal, choices) is not None


def _chosen(logits: mx.array, proposal: mx.array, choices: Choices) -> Factory | None:
    if not choices.chosen or not supports(logits, proposal):
        return None
    return choices.factory_for(WALK.name, shape_class(logits))


def shape_class(logits: mx.array) -> str:
    """The class that one measurement stands for: a band of row counts, all else exact."""
    high = 1 << (logits.shape[0] - 1).bit_length()
    dtype = str(logits.dtype).removeprefix("mlx.core.")
    return f"s{high // 2 + 1}-{high} v{logits.shape[1]} {dtype}"


def contest(rows: int, vocabulary: int, dtype: mx.Dtype) -> Contest:
    """What `Chooser.prepare` needs to try this class; raced at the fewest rows of its band."""
    rows = (1 << (rows - 1).bit_length()) // 2 + 1

    def inputs(seed: int) -> tuple[mx.array, ...]:
        logits = mx.random.normal((rows, vocabulary), key=mx.random.key(seed)).astype(dtype)
        # a proposal that agrees for a while: 16-bit logits hold ties, so their lowest id is tried too
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)[:-1]
        return logits, mx.where(mx.arange(rows - 1) == rows // 2, tokens + 1, tokens)

    def kernel(factory: Factory, *arrays: mx.array) -> list[mx.array]:
        return [greedy_walk_kernel(*arrays, factory=factory)]

    return Contest(
        kernel=WALK.name,
        digest=f"{WALK_ROWS.digest}{WALK.digest}",
        shape_class=shape_class(mx.zeros((rows, vocabulary), dtype)),
        bound=0.0,
        bytes=rows * vocabulary * dtype.size,
        inputs=inputs,
        reference=lambda *arrays: [greedy_walk_reference(*arrays)],
        candidate=kernel,
    )
