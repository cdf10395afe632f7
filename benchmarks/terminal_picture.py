"""Draw `docs/terminal.svg`: a conversation with the default pair of this machine, as the chat shows it.

    uv run python benchmarks/terminal_picture.py --out docs/terminal.svg

Answers and figures are those of the run. The picture names no host: its letters are those of the reader's machine.
"""

import argparse
import html
import io
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

from dflash_mlx import DFlashGenerator
from dflash_mlx.cli import figures
from dflash_mlx.cli.markdown import MarkdownStream

QUESTIONS = (
    "Write a Python function that tells whether a word is a palindrome.",
    "Say in one sentence how it works.",
)
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/terminal.svg"))
    parser.add_argument("--target-model")
    parser.add_argument("--draft-model")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--columns", type=int, default=100)
    options = parser.parse_args()
    console = Console(record=True, width=options.columns, file=io.StringIO(), highlight=False)
    answers = MarkdownStream(console)
    with DFlashGenerator(options.target_model, options.draft_model) as runner:
        console.print("[bold green]$[/] dflash-mlx-chat --temperature 0")
        console.print(
            f"{runner.target_name} with {runner.draft_name} · {runner.weights_gb:.2f} GB ready in "
            f"{runner.seconds_load:.1f} s · temperature 0 · /help lists the commands",
            style="dim",
        )
        chat = runner.chat(max_new_tokens=options.max_new_tokens)
        for question in QUESTIONS:
            console.print(f"[bold]>[/] {question}")
            chunks = list(chat.send(question))
            answers.feed("".join(chunk.text for chunk in chunks))
            answers.finish()
            console.print(figures.whole(chunks[-1].stats), style="dim")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    picture = console.export_svg(
        title="dflash-mlx-chat", theme=MONOKAI, code_format=FORMAT, unique_id="dflash"
    )
    options.out.write_text(without_outer_spaces(picture), encoding="utf-8")


def without_outer_spaces(picture: str) -> str:
    """Begin and end every text with a letter: not all that draw SVG keep spaces there."""
    text = re.compile(
        r'x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)"([^>]*)>((?:&#160;)*)(.*?)((?:&#160;)*)</text>'
    )

    def trimmed(found: re.Match[str]) -> str:
        x, y, length, rest, before, letters, after = found.groups()
        spaces = (before.count(";"), after.count(";"))
        cell = float(length) / max(1, len(html.unescape(before + letters + after)))
        at, left = float(x) + spaces[0] * cell, float(length) - sum(spaces) * cell
        return f'x="{at:.1f}" y="{y}" textLength="{left:.1f}"{rest}>{letters}</text>'

    return text.sub(trimmed, picture)


if __name__ == "__main__":
    main()
