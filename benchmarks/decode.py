"""Plain decoding by mlx-lm against drafted decoding: same weights, same process, the two in turns.

    uv run python benchmarks/decode.py                      # the default pair of this machine
    uv run python benchmarks/decode.py --target-model Qwen3-8B --repeats 5 --out result.json

Per prompt class: median and range of the speed-up over the repeats, tokens per round, both speeds, whether the
texts were the same. `overhead` is the share of a round that is neither drafting nor verifying, from a run with
barriers around both. Speeds are of decoding; `end to end` includes reading the prompt.
"""

import argparse
import importlib.metadata
import json
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path
from statistics import median

from dflash_mlx import DFlashGenerator
from dflash_mlx.core import Comparison
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
    parser.add_argument("--draft-bits", type=int)
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--dtype")
    parser.add_argument(
        "--mode", choices=("on", "auto"), default="on", help="auto: lengths by measured costs"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write everything measured as JSON")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    options = {"max_new_tokens": asked.max_new_tokens, "temperature": asked.temperature, "seed": asked.seed}
    with DFlashGenerator(
        asked.target_model,
        asked.draft_model,
        mode=asked.mode,
        block_size=asked.block_size,
        draft_bits=asked.draft_bits,
        dtype=asked.dtype,
    ) as runner:
        facts = describe(runner)
        print("\n".join(f"{name}: {value}" for name, value in facts.items()))
        runner.compare(PROMPTS["code"], **{**options, "max_new_tokens": 16})  # warm-up, not counted
        rows = [measure(runner, name, prompt, asked.repeats, options) for name, prompt in PROMPTS.items()]
    print_table(rows)
    if asked.out:
        record = {"command": " ".join(sys.argv), **facts, "options": options, "classes": rows}
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(record, indent=1) + "\n")


def describe(runner: DFlashGenerator) -> dict[str, object]:
    here = machine()
    versions = {name: importlib.metadata.version(name) for name in ("dflash-mlx", "mlx", "mlx-lm")}
    return {
        "date": date.today().isoformat(),
        "machine": f"{here.chip}, {here.memory_gb:.0f} GB, {here.os}, {here.device}",
        "blas": here.blas,
        **versions,
        "target": runner.target_name,
        "draft": runner.draft_name,
    }


def measure(
    runner: DFlashGenerator, name: str, prompt: str, repeats: int, options: dict[str, float]
) -> dict[str, object]:
    """`repeats` comparisons, plain and drafted in turns, then one run with barriers."""
    runs: list[Comparison] = [runner.compare(prompt, **options) for _ in range(repeats)]
    profiled = runner.generate(prompt, profile=True, **options).stats
    drafted = runs[0].drafted.stats
    speedups = sorted(run.speedup for run in runs)
    return {
        "class": name,
        "speedup": median(speedups),
        "speedup_range": [speedups[0], speedups[-1]],
        "end_to_end": median(total(run.plain.stats) / total(run.drafted.stats) for run in runs),
        "tokens_per_round": drafted.tokens_per_round,
        "acceptance_rate": drafted.acceptance_rate,
        "plain_tokens_per_second": median(run.plain.stats.tokens_per_second for run in runs),
        "drafted_tokens_per_second": median(run.drafted.stats.tokens_per_second for run in runs),
        "identical": all(run.identical for run in runs),
        "differences": [asdict(run.first_difference) for run in runs if run.first_difference],
        "new_tokens": drafted.new_tokens,
        "dtype": drafted.dtype,
        "block_size": drafted.block_size,
        "draft_ms": 1e3 * profiled.seconds.draft / profiled.rounds,
        "verify_ms": 1e3 * profiled.seconds.verify / profiled.rounds,
        "overhead": profiled.seconds.other / profiled.seconds.decode,
        "peak_memory_gb": max(run.drafted.stats.peak_memory_gb for run in runs),
    }


def total(stats: object) -> float:
    return stats.seconds.prefill + stats.seconds.decode


def print_table(rows: list[dict[str, object]]) -> None:
    print(
        f"\n{'class':11} {'speed-up':>9} {'range':>13} {'end to end':>11} {'tokens/round':>13}"
        f" {'plain tok/s':>12} {'drafted':>8} {'overhead':>9}  same text"
    )
    for row in rows:
        low, high = row["speedup_range"]
        print(
            f"{row['class']:11} {row['speedup']:8.2f}x {f'{low:.2f}-{high:.2f}':>13} {row['end_to_end']:10.2f}x"
            f" {row['tokens_per_round']:13.2f} {row['plain_tokens_per_second']:12.1f}"
            f" {row['drafted_tokens_per_second']:8.1f} {row['overhead']:9.1%}  {'yes' if row['identical'] else 'NO'}"
        )
    mean = sum(row["speedup"] for row in rows) / len(rows)
    print(f"{'mean':11} {mean:8.2f}x")


if __name__ == "__main__":
    main()
