"""Pictures of a run: the log's lines and an evaluation in, SVG documents by file name out."""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_mlx.bench.charts import Bar, Line, bars, lines
from dflash_mlx.training.evaluate import NEW, OLD, Evaluation

_MOST_POINTS = 60
_SLOTS = 4  # lines of accuracy


def training_pictures(log: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Loss, accuracy by slot, and tokens per round over the steps; {} before there are two steps.

    Args:
        log: a mapping a line, as `log.py` keeps them.
    """
    steps = _thinned([row for row in log if row.get("loss") is not None])
    if len(steps) < 2:
        return {}
    found = {
        "loss.svg": lines(
            "Loss",
            [Line("loss", [(row["step"], row["loss"]) for row in steps])],
            x_label="step",
            y_label="running mean",
            x_names=_marks(steps),
        ),
        "slots.svg": lines(
            "Labels that the draft finds likeliest, by slot",
            [
                Line(f"slot {slot + 1}", [(row["step"], row["agreeing"][slot]) for row in steps])
                for slot in range(min(_SLOTS, len(steps[-1]["agreeing"])))
            ],
            x_label="step",
            y_label="share",
            x_names=_marks(steps),
        ),
    }
    measured = _thinned([row for row in log if row.get("tokens_per_round") is not None])
    if measured:
        found["rounds.svg"] = lines(
            "Tokens per round on held-out answers, simulated",
            [Line("tokens per round", [(row["step"], row["tokens_per_round"]) for row in measured])],
            x_label="step",
            y_label="tokens",
            x_names=_marks(measured),
        )
    return found


def evaluation_pictures(measured: Evaluation) -> dict[str, str]:
    """Tokens per round by class, before and after."""
    arms = [(name, arm) for name, arm in (("before", OLD), ("now", NEW)) if arm in measured.drafts]
    return {
        "classes.svg": bars(
            "Tokens per round on held-out prompts",
            [row.prompt_class for row in measured.rows],
            [(name, [Bar(row.figures[arm].tokens_per_round) for row in measured.rows]) for name, arm in arms],
            y_label="tokens per round",
            reference=1.0,
        )
    }


def _thinned(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Few enough to draw, the last one among them."""
    if len(rows) <= _MOST_POINTS:
        return rows
    return [rows[i * (len(rows) - 1) // (_MOST_POINTS - 1)] for i in range(_MOST_POINTS)]


def _marks(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, str]]:
    """Five places of the axis."""
    last = len(rows) - 1
    chosen = sorted({i * last // 4 for i in range(5)})
    return [(float(rows[i]["step"]), f"{rows[i]['step']:,}") for i in chosen]
