"""The pictures of a benchmark: rows and costs in, SVG documents by file name out. Writes no file."""

from collections.abc import Sequence

from dflash_mlx.bench.arms import PLAIN
from dflash_mlx.bench.charts import Bar, Line, bars, lines
from dflash_mlx.bench.summary import ALL, Figures, Row, all_the_way
from dflash_mlx.policy import CostCurve


def pictures(rows: Sequence[Row], own: str, curve: CostCurve | None) -> dict[str, str]:
    """Those for which there are figures."""
    short = [row for row in rows if row.context == 0]
    found: dict[str, str] = {}
    if short:
        found["speedup.svg"] = _speedup(short, own)
        if chart := _acceptance([row for row in short if row.kind != ALL]):
            found["acceptance.svg"] = chart
    if len({row.context for row in rows}) > 1:
        found["context.svg"] = _context(rows, own)
    if curve is not None:
        found["costs.svg"] = _costs(curve)
    return found


def _speedup(rows: Sequence[Row], own: str) -> str:
    names = [figures.arm for figures in rows[0].arms if figures.arm != PLAIN]
    series = [(name, [_bar(row.figures(name)) for row in rows]) for name in names]
    return bars(
        "Decoding speed against plain decoding (median, quartiles)",
        [row.kind for row in rows],
        series,
        y_label="times plain",
        reference=1.0,
    )


def _bar(figures: Figures) -> Bar | None:
    speedup = figures.speedup
    return Bar(speedup.median, speedup.low, speedup.high) if speedup else None


def _acceptance(rows: Sequence[Row]) -> str | None:
    """Of the longest fixed block, whose every place was verified; of the own policy where none ran."""
    arm = rows[0].arms[-1].arm
    series = []
    for row in rows:
        chances = all_the_way(row.figures(arm).positions)
        if chances:
            series.append(Line(row.kind, [(i + 1, 100 * chance) for i, chance in enumerate(chances)]))
    if not series:
        return None
    return lines(
        f"How often a block is right up to each place ({arm})",
        series,
        x_label="place in the block",
        y_label="% of the blocks",
        top=100,
    )


def _context(rows: Sequence[Row], own: str) -> str:
    """All classes together; prompts are placed by how many there are, not by their length."""
    points = [row for row in rows if row.kind == ALL or row.context]
    if not any(row.context == 0 for row in points):
        points = [*(row for row in rows if row.context == 0), *points]
    series = [
        Line(
            f"{name}, {what}", [(i, value(row.figures(name))) for i, row in enumerate(points)], dashed, colour
        )
        for what, value, dashed in (("decoding", _decoding, False), ("end to end", _end_to_end, True))
        for colour, name in enumerate((PLAIN, own))
    ]
    return lines(
        "Speed against the length of the prompt",
        series,
        x_label="tokens in the prompt (median)",
        y_label="tokens a second",
        x_names=[(i, f"{row.prompt_tokens:,}") for i, row in enumerate(points)],
    )


def _decoding(figures: Figures) -> float:
    return figures.tokens_per_second


def _end_to_end(figures: Figures) -> float:
    return figures.end_to_end_per_second


def _costs(curve: CostCurve) -> str:
    series = []
    for colour, depth in enumerate(curve.measured):
        after = f"after {depth.tokens:,} tokens"
        costs, rows = curve.at(depth.tokens), sorted(depth.verify)
        series += [
            Line(f"a round, {after}", [(n, 1e3 * costs.round(n - 1)) for n in rows], False, colour),
            Line(f"plain step, {after}", [(n, 1e3 * costs.plain) for n in (rows[0], rows[-1])], True, colour),
        ]
    return lines(
        "What a round costs by the rows that it verifies",
        series,
        x_label="rows of the pass, the last token included",
        y_label="milliseconds",
    )
