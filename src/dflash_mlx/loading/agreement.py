"""Whether a converted drafter is still the same: what both draft of random input in, figures or an error out."""

from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.drafter import Probe
from dflash_mlx.errors import NumericalError, WriteError

# Root mean square of the difference over that of the rows: more is no rounding any more.
_MOST = {4: 1.0, 8: 0.25, None: 0.1}


@dataclass(frozen=True, slots=True)
class Agreement:
    """The same random input through the network before and after."""

    compared: str  # "logits", or "hidden" rows where the drafter borrows its target's head
    rows: int
    exact: bool  # bit by bit
    max_difference: float
    relative_difference: float  # root mean squares, of the difference over the rows before
    same_token: float  # share of rows that draft the same token; of hidden rows: with the same largest entry


def compared(before: Probe, after: Probe, *, bits: int | None, dtype: str, same_weights: bool) -> Agreement:
    """Hold what a written drafter drafts against its source.

    Args:
        before: of the source.
        after: of what was written.
        bits: that its matrices are packed to; None: not packed.
        dtype: of what is not packed, for messages.
        same_weights: the conversion may not have changed a number.

    Raises:
        NumericalError: one of the two drafts no numbers.
        WriteError: they differ by more than packing or rounding explains.
    """
    if not mx.all(mx.isfinite(before.rows)).item():
        raise NumericalError(
            "What the drafter computes before the conversion is no numbers; is its file sound?"
        )
    if not mx.all(mx.isfinite(after.rows)).item():
        raise NumericalError(
            f"What the drafter computes as {dtype} is no numbers any more; give bfloat16 or float32."
        )
    found = _agreement(before, after)
    if same_weights and not found.exact:
        raise WriteError(
            f"The written drafter differs from its source by {found.max_difference:.2g}, where nothing was to "
            "change; the folder was not kept."
        )
    if found.relative_difference > (most := _MOST[bits]):
        raise WriteError(
            f"The written drafter differs from its source by {found.relative_difference:.0%} of its rows, more "
            f"than {most:.0%}; the folder was not kept. Give more bits."
        )
    return found


def _agreement(before: Probe, after: Probe) -> Agreement:
    difference = before.rows - after.rows
    relative = mx.sqrt(mx.mean(difference**2)) / mx.sqrt(mx.mean(before.rows**2))
    return Agreement(
        compared=before.of,
        rows=before.rows.shape[0],
        exact=bool(mx.array_equal(before.rows, after.rows).item())
        and bool(mx.array_equal(before.tokens, after.tokens).item()),
        max_difference=_number(mx.max(mx.abs(difference))),
        relative_difference=_number(relative),
        same_token=_number(mx.mean(before.tokens == after.tokens)),
    )


def _number(array: mx.array) -> float:
    value: float = array.item()  # type: ignore[assignment]
    return value
