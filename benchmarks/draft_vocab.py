"""How many words to draft over: the same pair with whole and with shortened heads, in turns, in one process.

    uv run python benchmarks/draft_vocab.py                                  # all words, and the number chosen here
    uv run python benchmarks/draft_vocab.py --draft-vocab full,2048,8192,auto --mode on
    uv run python benchmarks/draft_vocab.py --classes code,maths --out r.json   # others later, added to r.json

Per prompt class and head: time of a round, tokens per round, decoding speed against mlx-lm's plain decoding, whether
the text was the same; draft and verify time of a round from a run with barriers around both. Medians of the repeats.
With `--mode on` (the default) every arm verifies whole blocks, so that rounds are alike; with `--mode auto` each
decides by its own measured costs.
"""

import argparse
import importlib.metadata
import json
import sys
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from dflash_mlx import DFlashGenerator
from dflash_mlx.core import Result
from dflash_mlx.runtime import machine

PROMPTS = {
    "code": "Write a quicksort in Python.",
    "maths": "What is 17 times 6? Show your steps.",
    "prose": "Explain gravity in simple terms.",
    "chat": "Write an email to a friend about hiking.",
    "structured": "Give me a JSON object describing a book.",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target-model")
    parser.add_argument("--draft-model")
    parser.add_argument(
        "--draft-vocab", default="full,auto", help="arms; the first is what others are held to"
    )
    parser.add_argument("--classes", default=",".join(PROMPTS))
    parser.add_argument("--mode", choices=("on", "auto"), default="on")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, help="write everything measured as JSON; classes are added to those there"
    )
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    arms = load(asked)
    first = next(iter(arms.values()))
    facts = describe(first)
    words = {name: arm.engine.shortlist and len(arm.engine.shortlist) for name, arm in arms.items()}
    print("\n".join(f"{name}: {value}" for name, value in (facts | {"words": words}).items()))
    options = {"max_new_tokens": asked.max_new_tokens, "temperature": 0.0}
    for arm in arms.values():
        arm.generate(PROMPTS["code"], max_new_tokens=16)  # warm-up, not counted
    record = {"mode": asked.mode, **facts, "words": words, "options": options}
    rows: list[dict[str, Any]] = []
    for name in asked.classes.split(","):
        fresh = measure(arms, name, asked.repeats, options)
        rows = added(asked.out, fresh, record) if asked.out else rows + fresh
    print_table(rows)


def describe(runner: DFlashGenerator) -> dict[str, Any]:
    here = machine()
    return {
        "date": date.today().isoformat(),
        "machine": f"{here.chip}, {here.memory_gb:.0f} GB, {here.os}, {here.device}",
        "blas": here.blas,
        **{name: importlib.metadata.version(name) for name in ("dflash-mlx", "mlx", "mlx-lm")},
        "target": runner.target_name,
        "draft": runner.draft_name,
    }


def load(asked: argparse.Namespace) -> dict[str, DFlashGenerator]:
    """A generator for each arm, all on one target."""
    target, arms = asked.target_model, {}
    for name in asked.draft_vocab.split(","):
        words = int(name) if name.isdigit() else name
        draft = asked.draft_model or (arms and next(iter(arms.values())).draft_name) or None
        arms[name] = DFlashGenerator(
            target, draft, mode=asked.mode, draft_vocab=words, kept_gb=0, on_note=print
        )
        target = arms[name].target
    return arms


def measure(
    arms: dict[str, DFlashGenerator], kind: str, repeats: int, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """One row an arm; plain decoding and all arms in turns, then each once with barriers."""
    prompt = PROMPTS[kind]
    plain: list[Result] = []
    runs: dict[str, list[Result]] = {name: [] for name in arms}
    for _ in range(repeats):
        for index, (name, arm) in enumerate(arms.items()):
            if index == 0:
                both = arm.compare(prompt, **options)
                plain.append(both.plain)
                runs[name].append(both.drafted)
            else:
                runs[name].append(arm.generate(prompt, **options))
    speed = median(result.stats.tokens_per_second for result in plain)
    rows = []
    for name, arm in arms.items():
        profiled, stats = arm.generate(prompt, profile=True, **options).stats, runs[name][0].stats
        rows.append(
            {
                "class": kind,
                "arm": name,
                "round_ms": median(1e3 * run.stats.seconds.decode / run.stats.rounds for run in runs[name]),
                "tokens_per_round": stats.tokens_per_round,
                "acceptance_rate": stats.acceptance_rate,
                "plain_rounds": stats.plain_rounds,
                "rounds": stats.rounds,
                "tokens_per_second": median(run.stats.tokens_per_second for run in runs[name]),
                "speedup": median(run.stats.tokens_per_second for run in runs[name]) / speed,
                "draft_ms": 1e3 * profiled.seconds.draft / profiled.rounds,
                "verify_ms": 1e3 * profiled.seconds.verify / profiled.rounds,
                "identical": all(run.token_ids == plain[0].token_ids for run in runs[name]),
            }
        )
    return rows


def added(out: Path, rows: list[dict[str, Any]], facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Write the rows behind those that the file holds of other classes; gives all of them."""
    held = json.loads(out.read_text()) if out.exists() else {"commands": [], **facts, "rows": []}
    if {name: held[name] for name in facts} != facts:
        sys.exit(f"{out} holds figures of another machine, pair or mode; give another file.")
    fresh = {row["class"] for row in rows}
    held["rows"] = [row for row in held["rows"] if row["class"] not in fresh] + rows
    held["commands"] = list(dict.fromkeys([*held["commands"], " ".join(sys.argv)]))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(held, indent=1) + "\n")
    return held["rows"]


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        f"\n{'class':11} {'words':>6} {'round':>9} {'draft':>9} {'tokens/round':>13} {'tok/s':>6} {'speed-up':>9}"
        "  same text"
    )
    for row in rows:
        print(
            f"{row['class']:11} {row['arm']:>6} {row['round_ms']:6.1f} ms {row['draft_ms']:6.1f} ms"
            f" {row['tokens_per_round']:13.2f} {row['tokens_per_second']:6.1f} {row['speedup']:8.2f}x"
            f"  {'yes' if row['identical'] else 'NO'}"
        )
    names = list(dict.fromkeys(row["arm"] for row in rows))
    for name in names:
        mine = [row for row in rows if row["arm"] == name]
        mean = {
            key: sum(row[key] for row in mine) / len(mine)
            for key in ("round_ms", "tokens_per_round", "speedup")
        }
        print(
            f"{'mean':11} {name:>6} {mean['round_ms']:6.1f} ms {'':12} {mean['tokens_per_round']:13.2f} {'':6}"
            f" {mean['speedup']:8.2f}x"
        )


if __name__ == "__main__":
    main()
