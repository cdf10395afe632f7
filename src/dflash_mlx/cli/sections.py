"""Sections of a record as lines of text: names beside values, rows of a table in columns. Draws nothing."""

from __future__ import annotations

from typing import Any

from dflash_mlx.cli.record import Record


def lines(content: Record | list[Any]) -> list[str]:
    """A section, a table or a list of sentences, without the indent of its title."""
    if isinstance(content, dict):
        plain = {name: value for name, value in content.items() if not isinstance(value, list)}
        shown = _columns([[_named(name), _shown(value)] for name, value in plain.items()])
        for value in content.values():
            shown += lines(value) if isinstance(value, list) else []
        return shown
    if all(isinstance(row, dict) for row in content):
        rows = [[_shown(value) for value in row.values()] for row in content]
        return _columns([[_named(name) for name in content[0]], *rows]) if content else []
    return [str(line) for line in content]


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    padded = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in padded]


def _named(field: str) -> str:
    return field.replace("_", " ")


def _shown(value: object) -> str:
    """A value as people read it: yes and no, numbers short, nothing as a dash."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
