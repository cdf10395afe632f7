"""What drafting costs on this machine, as `dflash-mlx doctor` shows it: curves in, records out. Draws nothing.

A record has one entry for each pair, with milliseconds by depth and rows; `for_reading` makes a table of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dflash_mlx.cli.record import Record
from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    from dflash_mlx.cli.view import View
    from dflash_mlx.generator import DFlashGenerator
    from dflash_mlx.policy import CostCurve

_TELLING = ("target", "draft", "dtype", "draft_bits", "draft_vocab", "block_size")


def known_costs(problems: list[str]) -> Record:
    """Every curve that is kept; what drafting needs to pay is in tokens a round, its own token included."""
    from dflash_mlx import calibration

    setting = os.environ.get("DFLASH_COSTS", "auto")
    try:
        calibration.wanted()
    except UsageError as error:
        problems.append(str(error))
    try:
        pairs = [_pair(key) | {"depths": _depths(curve)} for key, curve in calibration.known_pairs()]
    except RuntimeError:
        pairs = []
    return {"setting": setting, "pairs": pairs}


def recalibrated(view: View, load: Callable[..., DFlashGenerator], model: Mapping[str, Any]) -> Record:
    """Load a pair, measure it now, and give what was known beside what is known now.

    Raises:
        DFlashError: a pair that cannot be had, or no drafter in it.
    """
    # A mode that measures nothing by itself.
    with load(**{**model, "mode": "on"}, on_note=view.note) as generator:
        view.say("Measuring what drafting costs on this machine ...")
        found = generator.measure_costs()
        names = {"target": generator.target_name, "draft": generator.draft_name}
    view.note(found.note)
    old = _depths(found.old) if found.old else []
    return {"pair": names, "before": {"depths": old}, "now": {"depths": _depths(found.new)}}


def for_reading(record: Record) -> Record:
    """The same, with a line for each depth and row count; also of what `recalibrated` gave."""
    read: Record = {}
    for name, content in record.items():
        if isinstance(content, dict) and "pairs" in content:
            lines = [line for pair in content["pairs"] for line in _lines(pair["depths"], _label(pair))]
            read[name] = {"setting": content["setting"], "table": lines}
        elif isinstance(content, dict) and "depths" in content:
            read[name] = _lines(content["depths"]) or ["nothing was known"]
        else:
            read[name] = content
    return read


def _pair(key: Mapping[str, str]) -> Record:
    return {name: key[name].removeprefix("mlx.core.") for name in _TELLING if key.get(name, "None") != "None"}


def _label(pair: Record) -> str:
    about = [pair.get("dtype", "?"), f"block {pair['block_size']}"]
    about += [f"{pair['draft_bits']} bits"] if "draft_bits" in pair else []
    about += [f"{pair['draft_vocab']} words"] if "draft_vocab" in pair else []
    return f"{pair.get('target', '?')} + {pair.get('draft', '?')} ({', '.join(about)})"


def _depths(curve: CostCurve) -> list[Record]:
    return [
        {
            "tokens": depth.tokens,
            "plain_ms": 1e3 * depth.plain,
            "draft_ms": 1e3 * depth.draft,
            "look_ms": 1e3 * depth.look,
            "rows": [
                {
                    "rows": rows,
                    "verify_ms": 1e3 * seconds,
                    "tokens_to_pay": (depth.draft + seconds) / depth.plain,
                }
                for rows, seconds in sorted(depth.verify.items())
                if rows > 1
            ],
        }
        for depth in curve.measured
    ]


def _lines(depths: list[Record], pair: str | None = None) -> list[Record]:
    return [
        ({"pair": pair} if pair else {})
        | {
            "context": depth["tokens"],
            "plain ms": depth["plain_ms"],
            "draft ms": depth["draft_ms"],
            "rows": row["rows"],
            "verify ms": row["verify_ms"],
            "pays from": f"{row['tokens_to_pay']:.2f} tokens a round"
            + (" (never)" if row["tokens_to_pay"] > row["rows"] else ""),
        }
        for depth in depths
        for row in depth["rows"]
    ]
