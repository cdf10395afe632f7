"""The tables of a benchmark: an outcome in, Rich tables and lines out. Decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from dflash_mlx.bench.arms import PLAIN
from dflash_mlx.bench.summary import ALL, Figures, Row, Spread, all_the_way

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from dflash_mlx.bench import Outcome


def tables(outcome: Outcome) -> list[RenderableType]:
    """Speeds, fixed blocks, what stands behind them, and texts that differ."""
    own, rows = outcome.own, outcome.rows
    found: list[RenderableType] = [_speeds(rows, own)]
    if any(len(row.arms) > 2 for row in rows):
        found.append(_blocks([row for row in rows if len(row.arms) > 2], own))
    found.append(_details(rows, own))
    if any(figures.differences for row in rows for figures in row.arms):
        found.append(_differences(outcome))
    if outcome.interrupted:
        found.append(Text(f"Stopped after {len(outcome.trials)} trials: these are the figures so far."))
    return found


def _speeds(rows: Sequence[Row], own: str) -> Table:
    table = _table(
        f"Tokens a second: plain decoding (mlx-lm) against {own}; in brackets the quartiles",
        ["prompts", "plain", own, "speed-up", "end to end", "same text"],
    )
    table.add_column("")
    for row in rows:
        plain, drafted = row.figures(PLAIN), row.figures(own)
        table.add_row(
            _kind(row),
            f"{plain.tokens_per_second:.1f}",
            f"{drafted.tokens_per_second:.1f}",
            _ratio(drafted.speedup),
            _ratio(drafted.end_to_end),
            "yes" if not any(figures.differences for figures in row.arms) else "no",
            row.verdict,
            end_section=row.kind == ALL and row.context == 0,
        )
    return table


def _blocks(rows: Sequence[Row], own: str) -> Table:
    fixed = [figures.arm for figures in rows[0].arms if figures.arm not in (PLAIN, own)]
    table = _table(
        f"Speed-up of fixed blocks, and {own} against the one that was best on other questions",
        ["prompts", *fixed, f"{own} / best", "best"],
    )
    for row in rows:
        best = row.best_fixed
        table.add_row(
            _kind(row),
            *(_ratio(row.figures(arm).speedup) for arm in fixed),
            _ratio(best.ratio if best else None),
            ", ".join(dict.fromkeys(best.chosen)) if best else "-",
            end_section=row.kind == ALL,
        )
    return table


def _details(rows: Sequence[Row], own: str) -> Table:
    table = _table(
        f"Prompts, waiting and memory (plain / {own}), and what {own} did",
        [
            "prompts",
            "tokens",
            "first token s",
            "peak GB",
            "tokens/round",
            "plain tokens",
            "right up to place 1, 2, 3 ...",
        ],
    )
    for row in rows:
        plain, drafted = row.figures(PLAIN), row.figures(own)
        table.add_row(
            _kind(row),
            f"{row.prompt_tokens:,}",
            f"{plain.first_token:.2f} / {drafted.first_token:.2f}",
            f"{plain.peak_memory_gb:.2f} / {drafted.peak_memory_gb:.2f}",
            f"{drafted.tokens_per_round:.2f}",
            f"{drafted.plain_share:.0%}",
            _acceptance(row),
            end_section=row.kind == ALL and row.context == 0,
        )
    return table


def _differences(outcome: Outcome) -> Table:
    table = _table("Texts that differ from plain decoding", ["prompt", "arm", "token", "logit gap"])
    for trial in outcome.trials:
        for arm, found in trial.differences.items():
            if found is not None:
                gap = "one text ends" if found.logit_gap is None else f"{found.logit_gap:.2g}"
                table.add_row(f"{trial.task.kind} {trial.task.number}", arm, str(found.index), gap)
    return table


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        # A figure is never cut short: where there is no room it goes on below.
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    return table


def _kind(row: Row) -> str:
    return row.kind if row.context == 0 else f"{row.context:,} tokens"


def _ratio(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:.2f} [{spread.low:.2f}-{spread.high:.2f}]"


def _acceptance(row: Row) -> str:
    """From the arm that verified the most places."""
    widest: Figures = max(row.arms, key=lambda figures: len(figures.positions))
    return " ".join(f"{chance:.0%}" for chance in all_the_way(widest.positions)) or "-"
