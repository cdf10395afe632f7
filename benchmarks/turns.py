"""A conversation of three turns whose first message is long: what each turn reads, and how soon it answers.

    uv run python benchmarks/turns.py                       # the default pair of this machine
    uv run python benchmarks/turns.py --target-model Qwen3-8B --first-tokens 8000 --out result.json

Each turn is held against a cold run: the same ids through plain decoding that keeps nothing. `behind the shared` is
how many ids of the prompt stand behind its longest beginning that was held already; a cache that can be cut reads
just these. Exits 1 where a text differs.
"""

import argparse
import importlib.metadata
import json
import sys
from datetime import date
from pathlib import Path

from dflash_mlx import DFlashGenerator
from dflash_mlx.conversation import common_prefix
from dflash_mlx.prompting import requested
from dflash_mlx.request import Options

PARAGRAPH = (
    "Paragraph {}: the keeper of the northern light wrote down the wind, the tide and {} passing ships. "
)
QUESTIONS = ("Summarise this: {}", "Now in five words.", "Who wrote it down?")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target-model")
    parser.add_argument("--draft-model")
    parser.add_argument("--mode", choices=("on", "auto", "off"), default="on")
    parser.add_argument(
        "--first-tokens", type=int, default=1500, help="length of the first message, at least"
    )
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, help="write what was measured as JSON")
    return parser.parse_args()


def document(tokens: int, tokenizer: object) -> str:
    text, number = "", 0
    while len(tokenizer.encode(text)) < tokens:
        text += "".join(PARAGRAPH.format(i, i * 7 % 31) for i in range(number, number + 10))
        number += 10
    return text


def main() -> None:
    asked = arguments()
    options = {"max_new_tokens": asked.max_new_tokens, "temperature": 0.0}
    with DFlashGenerator(
        asked.target_model,
        asked.draft_model,
        mode=asked.mode,
        on_note=lambda note: print(note, file=sys.stderr),
    ) as runner:
        cold = DFlashGenerator(runner.target, mode="off", kept_gb=0)
        # The first pass of a process also makes ready what later ones find. It is not the runner's: it would keep it.
        cold.generate("Hello.", max_new_tokens=2)
        rows = turns(runner, cold, document(asked.first_tokens, runner.target.tokenizer), options)
    print_table(rows)
    if asked.out:
        versions = {name: importlib.metadata.version(name) for name in ("dflash-mlx", "mlx", "mlx-lm")}
        asked.out.write_text(
            json.dumps({"date": str(date.today()), "versions": versions, "turns": rows}, indent=1)
        )
    if not all(row["same text"] for row in rows):
        sys.exit(1)


def turns(
    runner: DFlashGenerator, cold: DFlashGenerator, text: str, options: dict[str, object]
) -> list[dict[str, object]]:
    chat = runner.chat(**options)
    rows, held = [], []
    for question in QUESTIONS:
        said = question.format(text)
        told = [
            message
            for turn in chat.turns
            for message in (
                {"role": "user", "content": turn.said},
                {"role": "assistant", "content": turn.answer, "token_ids": turn.ids},
            )
        ]
        asked = [*told, {"role": "user", "content": said}]
        ids = requested(runner.engine.pair, asked, Options.checked(options)).prompt
        chunks = list(chat.send(said))
        stats = chunks[-1].stats
        tokens = tuple(token for chunk in chunks for token in chunk.tokens)
        truth = cold.generate(ids, **options)
        rows.append(
            {
                "prompt": stats.prompt_tokens,
                "re-used": stats.reused_tokens,
                "read": stats.read_tokens,
                "behind the shared": len(ids) - common_prefix(held, ids),
                "first token s": stats.seconds.first_token,
                "cold s": truth.stats.seconds.first_token,
                "of turn 1": stats.seconds.first_token / rows[0]["first token s"] if rows else 1.0,
                "same text": tokens == truth.token_ids,
            }
        )
        held = [*ids, *tokens[:-1]]
    return rows


def print_table(rows: list[dict[str, object]]) -> None:
    print("turn " + " ".join(f"{name:>{width(name)}}" for name in rows[0]))
    for number, row in enumerate(rows, 1):
        print(f"{number:4} " + " ".join(f"{shown(value):>{width(name)}}" for name, value in row.items()))


def width(name: str) -> int:
    return max(len(name), 7)


def shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
