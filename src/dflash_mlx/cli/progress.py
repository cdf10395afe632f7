"""How far a long run is, as one line that draws itself again; only on a terminal. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class FarLine:
    """One line: a name, a bar, and what is told."""

    def __init__(self, progress: Progress | None, name: str):
        self._progress = progress
        self._task = progress.add_task(name, total=1.0, told="") if progress else None

    def at(self, share: float, told: str) -> None:
        """Show how far it is, 0 to 1, and figures beside it."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=min(1.0, share), told=told)


@contextmanager
def far_line(console: Console, name: str) -> Iterator[FarLine]:
    """A line for the length of a block; it is gone afterwards."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield FarLine(None, name)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[told]}", markup=False),
    )
    with Progress(
        *columns,
        console=console,
        transient=True,
        refresh_per_second=4,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:
        yield FarLine(progress, name)


def duration(seconds: float | None) -> str:
    """A time as people say it; a dash where it is not known."""
    if seconds is None:
        return "-"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
