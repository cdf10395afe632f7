"""z-lab v1, in its old and new layouts: the format that all others are brought into.

Its drafters use their target's embedding and head. A file that brings its own is refused: whether the two are
equal cannot be told here.
"""

from dflash_mlx.drafter.formats.base import Format

FORMAT = Format(title="z-lab v1", architectures=("DFlashDraftModel",))
