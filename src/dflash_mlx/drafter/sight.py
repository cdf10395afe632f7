"""How much of the context a layer of the draft network sees: two windows in, one rule out. Knows no arrays.

The checkpoint's window slides: each row of a block sees one token less of the context than the row before it. The
user's `draft_window` is what is kept in sight for the whole block: the first tokens of all, on which attention
comes to rest when it finds nothing, and the latest.
"""

from typing import NamedTuple

from dflash_mlx.errors import UsageError

SINKS = 4


class Sight(NamedTuple):
    """The context rows that the token right after them sees."""

    most: int | None = None  # None: all of them
    sinks: int = 0  # of these the first so many of all; the others are the latest
    slides: bool = False

    @property
    def window(self) -> int | None:
        """Positions that a row sees, its own included, where its sight moves with it."""
        return None if self.most is None or not self.slides else self.most + 1

    def seen(self, held: int) -> int:
        """Rows in sight out of `held` rows."""
        return held if self.most is None else min(held, self.most)


def sight(window: int | None, draft_window: int | None) -> Sight:
    """What a layer with the checkpoint's `window` sees, the smaller of both windows if there are two.

    A layer that slides gets no first tokens: its checkpoint would not have it see them.
    """
    if window is not None:
        most = window - 1
        return Sight(most if draft_window is None else min(most, draft_window), slides=True)
    if draft_window is None:
        return Sight()
    return Sight(draft_window, min(SINKS, draft_window // 4))


def check_draft_window(tokens: int | None, block_size: int | None = None) -> None:
    """Refuse what cannot be a `draft_window`; before any file is read, and again once the block is known.

    Raises:
        UsageError: no whole number, or fewer tokens than a block has.
    """
    if tokens is None:
        return
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 2:
        raise UsageError(
            f"draft_window {tokens}: expected tokens of the context that the drafter keeps, 2 or more, or none."
        )
    if block_size is not None and tokens < block_size:
        raise UsageError(
            f"draft_window {tokens}: the drafter drafts blocks of {block_size} tokens; give {block_size} or more."
        )
