"""Two drafters of one target against mlx-lm's plain decoding: same weights, same process, all in turns.

    uv run python benchmarks/drafters.py --old /path/to/old/drafter     # new: the bundled pair's drafter
    uv run python benchmarks/drafters.py --target-model T --old OLD --new NEW --repeats 3 --out result.json

Built-in questions of six classes, greedy. Per class: tokens per round with every block verified whole, and the speed-up
over plain decoding with whole blocks and, with --auto, with the lengths that pay by measured costs (the first time
takes some seconds more for each drafter). Run it on an idle machine.
"""

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from statistics import median

from dflash_mlx import DFlashGenerator
from dflash_mlx.bench import Pair
from dflash_mlx.bench.prompts import CLASSES, questions
from dflash_mlx.core import Result
from dflash_mlx.policy import WholeBlock
from dflash_mlx.runtime import machine

PLAIN = "plain"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target-model")
    parser.add_argument("--old", required=True, help="folder or hub id of the drafter before")
    parser.add_argument("--new", help="unset: the one that is known for the target")
    parser.add_argument("--classes", default=",".join(CLASSES))
    parser.add_argument("--limit", type=int, default=2, help="questions of each class")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype")
    parser.add_argument("--auto", action="store_true", help="also with lengths by measured costs")
    parser.add_argument("--out", type=Path, help="write everything measured as JSON")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    options = {"max_new_tokens": asked.max_new_tokens, "temperature": 0.0, "seed": 7}
    tasks = questions(asked.classes.split(","), asked.limit)
    with ExitStack() as stack:
        pairs = opened(stack, asked)
        print(f"{machine().chip}, {machine().os}, {machine().blas}; {', '.join(versions())}")
        for name, pair in pairs.items():
            print(f"{name}: {pair.engine.pair.draft.name}, block {pair.engine.block_size}")
        arms = [PLAIN, *pairs, *(f"{name} auto" for name in pairs if asked.auto)]
        for arm in arms:
            answered(pairs, arm, tasks[0].text, {**options, "max_new_tokens": 8})  # warm-up, not counted
        trials = list(raced(pairs, arms, tasks, asked.repeats, options))
    rows = [row(kind, [found for at, found in trials if at == kind], arms) for kind in kinds(trials)]
    rows.append(row("all", [found for _, found in trials], arms))
    print_table(rows, arms)
    if asked.out:
        record = {
            "date": date.today().isoformat(),
            "command": " ".join(sys.argv),
            "machine": f"{machine().chip}, {machine().memory_gb:.0f} GB, {machine().os}, {machine().device}",
            "blas": machine().blas,
            "versions": versions(),
            "options": options | {"repeats": asked.repeats},
            "drafters": {name: pair.engine.pair.draft.name for name, pair in pairs.items()},
            "rows": rows,
        }
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(record, indent=1) + "\n")


def opened(stack: ExitStack, asked: argparse.Namespace) -> dict[str, Pair]:
    """Both drafters on one loaded target."""
    mode = "auto" if asked.auto else "on"
    old = stack.enter_context(
        DFlashGenerator(
            asked.target_model or "smollm2-135m", asked.old, mode=mode, dtype=asked.dtype, kept_gb=0
        )
    )
    new = stack.enter_context(DFlashGenerator(old.target, asked.new, mode=mode, kept_gb=0))
    return {"old": Pair(old.engine), "new": Pair(new.engine)}


def raced(
    pairs: dict[str, Pair], arms: list[str], tasks: list, repeats: int, options: dict[str, float]
) -> Iterator[tuple[str, dict[str, Result]]]:
    """Every arm answers every question; who begins changes each time."""
    total, done = len(tasks) * repeats, 0
    for repeat in range(repeats):
        for at, task in enumerate(tasks):
            start = (at + repeat) % len(arms)
            found = {arm: answered(pairs, arm, task.text, options) for arm in [*arms[start:], *arms[:start]]}
            done += 1
            told = ", ".join(f"{arm} {found[arm].stats.tokens_per_second:.1f}" for arm in arms)
            print(f"{done} of {total} {task.kind}: {told} tokens/s", file=sys.stderr)
            yield task.kind, found


def answered(pairs: dict[str, Pair], arm: str, prompt: str, options: dict[str, float]) -> Result:
    if arm == PLAIN:
        return pairs["new"].yardstick(prompt, **options)
    name, _, auto = arm.partition(" ")
    return pairs[name].trial(prompt, policy=None if auto else WholeBlock(), **options)


def kinds(trials: list[tuple[str, dict[str, Result]]]) -> list[str]:
    return list(dict.fromkeys(kind for kind, _ in trials))


def row(kind: str, results: list[dict[str, Result]], arms: list[str]) -> dict[str, object]:
    """Tokens per round over all answers; the median of the speed-ups, answer by answer, and their range."""
    shown: dict[str, object] = {"class": kind, "answers": len(results)}
    shown["plain_tokens_per_second"] = median(one[PLAIN].stats.tokens_per_second for one in results)
    for arm in arms[1:]:
        stats = [one[arm].stats for one in results]
        ratios = [
            one[arm].stats.tokens_per_second / one[PLAIN].stats.tokens_per_second
            for one in results
            if one[PLAIN].stats.tokens_per_second
        ]
        shown[arm] = {
            "tokens_per_round": sum(s.new_tokens - 1 for s in stats) / max(1, sum(s.rounds for s in stats)),
            "speedup": median(ratios),
            "speedup_range": [min(ratios), max(ratios)],
            "identical": sum(one[arm].token_ids == one[PLAIN].token_ids for one in results),
        }
    return shown


def versions() -> list[str]:
    return [f"{name} {importlib.metadata.version(name)}" for name in ("dflash-mlx", "mlx", "mlx-lm")]


def print_table(rows: list[dict[str, object]], arms: list[str]) -> None:
    heads = "".join(f" {arm + ' t/round':>16} {'speed-up':>9} {'range':>11}" for arm in arms[1:])
    print(f"\n{'class':11} {'plain tok/s':>12}{heads}  same text")
    for found in rows:
        cells = ""
        for arm in arms[1:]:
            low, high = found[arm]["speedup_range"]
            cells += f" {found[arm]['tokens_per_round']:16.2f} {found[arm]['speedup']:8.2f}x"
            cells += f" {f'{low:.2f}-{high:.2f}':>11}"
        same = min(found[arm]["identical"] for arm in arms[1:])
        print(
            f"{found['class']:11} {found['plain_tokens_per_second']:12.1f}{cells}  {same} of {found['answers']}"
        )


if __name__ == "__main__":
    main()
