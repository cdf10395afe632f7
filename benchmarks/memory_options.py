"""What `draft_bits`, `kv_bits` and `draft_window` cost in tokens per round, and what memory they save.

    uv run python benchmarks/memory_options.py --out result.json      # the default pair of this machine
    uv run python benchmarks/memory_options.py --target-model Qwen3-8B --max-new-tokens 512

Each class of questions is a chat of two turns, and the second answer counts: its context is a few hundred tokens
long, longer than most windows that are tried. The answer is decoded once, plainly. Every setting then drafts along
that text, whole blocks of greedy tokens, as it would in decoding; with `kv_bits` the features are those of quantised
keys, and `other` says at how many places the target itself would have gone on otherwise. Counts, not seconds: they
are the same however busy the machine. With --out, a run that was stopped goes on where it was.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from dflash_mlx import DFlashGenerator  # before MLX: it puts OpenBLAS in front of MLX's own

# isort: split
import mlx.core as mx

from dflash_mlx.bench.prompts import CLASSES
from dflash_mlx.drafter import Drafter
from dflash_mlx.loading import load_pair, memory, render
from dflash_mlx.runtime import machine
from dflash_mlx.target import MLXTarget

ARMS: dict[str, dict[str, int]] = {
    "none": {},
    "draft_bits 8": {"draft_bits": 8},
    "draft_bits 4": {"draft_bits": 4},
    "kv_bits 8": {"kv_bits": 8},
    "kv_bits 4": {"kv_bits": 4},
    "draft_window 256": {"draft_window": 256},
    "draft_window 128": {"draft_window": 128},
    "draft_window 64": {"draft_window": 64},
    "8, 8 and 128": {"draft_bits": 8, "kv_bits": 8, "draft_window": 128},
}
KINDS = ("code", "maths", "prose", "chat", "structured")

Figures = dict[str, Any]  # as JSON has them


class Text(NamedTuple):
    """Token ids of a prompt and its answer."""

    ids: list[int]
    prompt: int  # tokens of the prompt


class Reading(NamedTuple):
    """What a target made of a text."""

    features: mx.array  # [S, F*D]
    choices: list[int]  # its greedy choice after each token


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target-model")
    parser.add_argument("--draft-model")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, help="write everything measured as JSON")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    facts = {
        "machine": f"{machine().chip}, {machine().os}, {machine().device}",
        **{name: version(name) for name in ("dflash-mlx", "mlx", "mlx-lm")},
        "pair": [asked.target_model, asked.draft_model],
        "max_new_tokens": asked.max_new_tokens,
    }
    record = begun(asked.out, facts)
    with DFlashGenerator(asked.target_model, asked.draft_model, mode="on", draft_vocab="full") as runner:
        for kind in KINDS:
            if kind not in record["texts"]:
                record["texts"][kind] = told(runner, kind, asked.max_new_tokens)
                keep(asked.out, record)
        readings: dict[tuple[int | None, str], Reading] = {}
        for name, options in ARMS.items():
            arm = record["arms"].setdefault(name, {"answers": {}})
            if len(arm["answers"]) < len(KINDS):
                measure(runner, asked.draft_model, options, record, arm, readings, asked.out)
    print_table(record)


def begun(out: Path | None, facts: Figures) -> Figures:
    """The record of a run that was stopped, where it is one of the same kind."""
    if out and out.exists():
        found: Figures = json.loads(out.read_text())
        if {name: found.get(name) for name in facts} == facts:
            return found
        raise SystemExit(f"{out} is the record of another run; give another name.")
    return {"date": date.today().isoformat(), "command": " ".join(sys.argv), **facts, "texts": {}, "arms": {}}


def told(runner: DFlashGenerator, kind: str, most: int) -> Figures:
    """A first question with its answer, a second question, and the ids of all that with the second answer."""
    first, second, *_ = CLASSES[kind]
    said = runner.generate(first, max_new_tokens=2 * most).text
    roles = ("user", "assistant", "user")
    chat = [{"role": role, "content": text} for role, text in zip(roles, (first, said, second), strict=True)]
    prompt = render(runner.target.tokenizer, chat, think=None)
    with DFlashGenerator(runner.target, mode="off") as plain:
        answer = plain.generate(chat, max_new_tokens=most).token_ids
    return {"chat": chat, "prompt": len(prompt), "ids": [*prompt, *answer]}


def measure(
    runner: DFlashGenerator,
    draft_model: str | None,
    options: dict[str, int],
    record: Figures,
    arm: Figures,
    readings: dict[tuple[int | None, str], Reading],
    out: Path | None,
) -> None:
    """Let one setting draft along every text; what a target made of one is kept in `readings`."""
    drafting = {name: value for name, value in options.items() if name != "kv_bits"}
    pair = load_pair(runner.target, draft_model, machine=machine(), mode="on", **drafting)
    assert pair.draft is not None
    whole = runner.target.model
    target = MLXTarget(whole.model, whole.config, whole.name, kv_bits=options.get("kv_bits"))
    size = target.dtype.size
    arm["megabytes"] = {
        "drafter": (pair.nbytes - whole.nbytes) / 1e6,
        "keys": (memory.context_bytes(target.config, itemsize=size, kv_bits=target.kv_bits) or 0) / 1e6,
        "context": memory.draft_context_bytes(pair.draft.config, itemsize=pair.draft.dtype.size) / 1e6,
    }
    for kind in KINDS:
        if kind not in arm["answers"]:
            text = Text(record["texts"][kind]["ids"], record["texts"][kind]["prompt"])
            if (target.kv_bits, kind) not in readings:
                readings[target.kv_bits, kind] = read(target, text.ids, pair.draft.config.target_layer_ids)
            features, choices = readings[target.kv_bits, kind]
            rounds = drafted(Drafter(pair.draft, target), features, text, pair.draft.config.block_size)
            other = sum(
                a != b for a, b in zip(choices[text.prompt - 1 : -1], text.ids[text.prompt :], strict=True)
            )
            arm["answers"][kind] = {
                "tokens": len(text.ids) - text.prompt - 1,
                "rounds": rounds,
                "other": other,
            }
            keep(out, record)


def read(target: MLXTarget, ids: Sequence[int], taps: Sequence[int]) -> Reading:
    """One pass over a text, in pieces."""
    cache, features, choices = target.make_cache(), [], []
    for start in range(0, len(ids), 64):
        passed = target.verify(mx.array(ids[start : start + 64]), cache, taps)
        best = mx.argmax(passed.logits, axis=-1)
        mx.eval(passed.features, best)
        target.settle(cache)
        features.append(passed.features)
        choices += best.tolist()
    return Reading(mx.concatenate(features), choices)


def drafted(drafter: Drafter, features: mx.array, text: Text, block_size: int) -> int:
    """Rounds that it takes to draft along an answer, from its first token to its last."""
    at, last, rounds = text.prompt, len(text.ids) - 1, 0
    drafter.inject(features[:at], at)
    drafter.settle()
    while at < last:
        proposed = drafter.propose(text.ids[at], block_size).tokens.tolist()
        true = text.ids[at + 1 : last + 1]
        agreed = next(
            (i for i, (a, b) in enumerate(zip(proposed, true, strict=False)) if a != b), len(proposed)
        )
        step = min(agreed + 1, last - at)
        drafter.inject(features[at : at + step], step)
        at, rounds = at + step, rounds + 1
    return rounds


def keep(out: Path | None, record: Figures) -> None:
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")


def print_table(record: Figures) -> None:
    print(f"{'':18} {'tokens/round':>13} {'change':>8} {'other':>7}   drafter, keys, context (MB)")
    whole = per_round(record["arms"]["none"])
    for name, arm in record["arms"].items():
        every = arm["answers"].values()
        other = sum(one["other"] for one in every) / sum(one["tokens"] + 1 for one in every)
        held = ", ".join(f"{arm['megabytes'][part]:.0f}" for part in ("drafter", "keys", "context"))
        print(f"{name:18} {per_round(arm):13.2f} {per_round(arm) / whole - 1:+8.1%} {other:7.1%}   {held}")


def per_round(arm: Figures) -> float:
    """Tokens per round over all classes; the first token of an answer is no round's."""
    every = arm["answers"].values()
    return sum(one["tokens"] for one in every) / sum(one["rounds"] for one in every)


if __name__ == "__main__":
    main()
