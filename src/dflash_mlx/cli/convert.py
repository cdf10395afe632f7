"""What `dflash-mlx convert` tells: names and options in, one record of what was written out. Draws nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from dflash_mlx.cli.options import flag
from dflash_mlx.cli.record import Record
from dflash_mlx.errors import UsageError
from dflash_mlx.loading.convert import BITS, DTYPES, convert_draft


def convert_drafter(
    source: str, out: str, *, bits: int | None, dtype: str | None, force: bool, say: Callable[[str], None]
) -> Record:
    """Convert, telling `say` what is done and what was chosen.

    Raises:
        UsageError: values that mean nothing, in the console's words.
        DFlashError: as `convert_draft`.
    """
    for name, value, known in (("bits", bits, BITS), ("dtype", dtype, tuple(DTYPES))):
        if value is not None and value not in known:
            raise UsageError(f"{flag(name)} is {value}; expected one of {', '.join(map(str, known))}.")
    if not out.strip():
        raise UsageError("The name of the folder to make is empty.")
    done = convert_draft(source, out, bits=bits, dtype=dtype, force=force, say=say)
    for note in done.notes:
        say(note)
    return {
        "written": {
            "folder": str(done.out),
            "source": done.source,
            "format": done.format,
            "bits": done.bits,
            "dtype": done.dtype,
            "parameters": done.parameters,
            "tensors": done.tensors,
            "bytes": done.nbytes,
            "source_bytes": done.source_nbytes,
        },
        "comparison": asdict(done.agreement),
    }
