"""How far a proposal agrees with the target's draws. Pure: integers in, an integer out."""

from collections.abc import Sequence


def agree(proposal: Sequence[int], draws: Sequence[int]) -> int:
    """Count the leading proposed tokens that equal the draw of the same row.

    `draws[j]` is the target's token where `proposal[j]` stands; the draw after the agreed ones is emitted too.
    Emitting the target's own draws gives exactly the target's law whatever proposed (each draw is independent of
    the proposal given the prefix).
    """
    accepted = 0
    for proposed, drawn in zip(proposal, draws, strict=False):
        if proposed != drawn:
            break
        accepted += 1
    return accepted
