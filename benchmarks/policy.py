"""What the policy loses at the two ends: a drafter that is always wrong, and one that is always right.

    uv run python benchmarks/policy.py                      # the default pair of this machine
    uv run python benchmarks/policy.py --tokens 128 --repeats 3 --out result.json

The drafters are planned: the real one runs, so that its costs are real, and its words are replaced by what plain
decoding gave, or by others. Arms take turns in one process: mlx-lm's plain loop; the policy with the wrong drafter;
the policy and every fixed length with the right one. Medians, and ranges over the repeats; the time to the first
token is left out. Every arm must give the same text.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median

from dflash_mlx import DFlashGenerator  # before MLX: it puts OpenBLAS in front of MLX's own

# isort: split
import mlx.core as mx

from dflash_mlx.core import Cut, Proposal, SamplingParams
from dflash_mlx.decoding import Decoder, Meter
from dflash_mlx.policy import Adaptive, Plan
from dflash_mlx.sampling import Sampler
from dflash_mlx.target import plain_tokens

PROMPT = "Explain gravity in simple terms."
LENGTHS = (1, 2, 3, 4, 5, 7, 11, 15)


class Planned:
    """A drafter that takes as long as the real one and proposes the true words, or none of them."""

    def __init__(self, drafter: object, truth: Sequence[int], *, right: bool) -> None:
        self._drafter, self._truth, self._right = drafter, list(truth), right

    def __getattr__(self, name: str) -> object:
        return getattr(self._drafter, name)

    def propose(self, anchor: int, block_size: int) -> Proposal:
        start = self._drafter.context_length + 1
        real = self._drafter.propose(anchor, block_size)
        true = [*self._truth[start : start + block_size - 1], *[0] * block_size][: block_size - 1]
        words = mx.array(true if self._right else [token ^ 1 for token in true], mx.int32)
        # Both depend on the real draft, which is therefore computed.
        return Proposal(mx.where(real.tokens >= 0, words, real.tokens), 0 * real.confidences + 0.5)


class Fixed:
    """Always verifies the same number of proposals."""

    def __init__(self, length: int) -> None:
        self._length = length

    def plan(self, *, depth: int, most: int) -> Plan:
        return Plan(min(self._length, most))

    def choose(self, confidences: Sequence[float]) -> int:
        return self._length

    def observe(self, verified: int, accepted: int) -> None:
        pass


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target-model")
    parser.add_argument("--draft-model")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("wrong", "right"), help="one half of the arms")
    parser.add_argument("--out", type=Path, help="write everything measured as JSON")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    with DFlashGenerator(asked.target_model, asked.draft_model) as runner:
        engine = runner.engine
        assert engine.curve is not None and engine.block_size is not None, "mode auto measures costs"
        tokenizer = engine.pair.target.tokenizer
        message = [{"role": "user", "content": PROMPT}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True)
        truth = [*prompt, *(token for token, _ in plain(engine, prompt, asked.tokens))]
        arms = {"plain": lambda: plain(engine, prompt, asked.tokens)}

        def drafted(policy: object, *, right: bool) -> Iterator[tuple[int, float]]:
            drafter = Planned(engine.drafter(insist=True), truth, right=right)
            return decoded(engine, drafter, policy, prompt, asked.tokens)

        if asked.only != "right":
            arms["wrong, auto"] = lambda: drafted(Adaptive(engine.curve), right=False)
        if asked.only != "wrong":
            arms["right, auto"] = lambda: drafted(Adaptive(engine.curve), right=True)
            for length in (n for n in LENGTHS if n < engine.block_size):
                arms[f"right, {length}"] = lambda n=length: drafted(Fixed(n), right=True)
        runs: dict[str, list[list[float]]] = {name: [] for name in arms}
        for _ in range(asked.repeats):
            for name, arm in arms.items():
                tokens, times = zip(*arm(), strict=True)
                assert [*prompt, *tokens] == truth, f"{name} gives another text"
                runs[name].append([t - times[0] for t in times])
        facts = {
            "command": " ".join(sys.argv),
            "date": date.today().isoformat(),
            "machine": f"{engine.machine.chip}, {engine.machine.os}, {engine.machine.device}",
            "blas": engine.machine.blas,
            "mlx": version("mlx"),
            "mlx-lm": version("mlx-lm"),
            "target": runner.target_name,
            "draft": runner.draft_name,
            "tokens": asked.tokens,
            "repeats": asked.repeats,
            "curve": [{**depth._asdict(), "verify": dict(depth.verify)} for depth in engine.curve.measured],
        }
    rows = [summary(name, times, runs) for name, times in runs.items()]
    print("\n".join(f"{name}: {value}" for name, value in facts.items() if name != "curve"))
    print_table(rows)
    if asked.out:
        asked.out.write_text(json.dumps({**facts, "arms": rows}, indent=1) + "\n")


def plain(engine: object, prompt: Sequence[int], tokens: int) -> Iterator[tuple[int, float]]:
    """Tokens of mlx-lm's loop, and when they came."""
    sampler = Sampler(SamplingParams(), ())
    loop = plain_tokens(
        engine.pair.target.model,
        prompt,
        max_new_tokens=tokens,
        draw=sampler.draw,
        draw_whole=sampler.draw_whole,
        prefill_chunk=engine.prefill_chunk,
    )
    for token in loop:
        yield token, time.perf_counter()


def decoded(
    engine: object, drafter: object, policy: object, prompt: Sequence[int], tokens: int
) -> Iterator[tuple[int, float]]:
    """Tokens of our loop, and when they came."""
    made = 0

    def cut(emitted: Sequence[int]) -> Cut:
        nonlocal made
        keep = min(len(emitted), tokens - made)
        made += keep
        return Cut(keep, "length" if made == tokens else None)

    target = engine.pair.target.model
    decoder = Decoder(
        target=target,
        cache=target.make_cache(),
        drafter=drafter,
        sampler=Sampler(SamplingParams(), (), choices=engine.kernels),
        cut=cut,
        policy=policy,
        max_new_tokens=tokens,
        block_size=engine.block_size,
        prefill_chunk=engine.prefill_chunk,
        meter=Meter(),
        ids=[],
    )
    for _ in decoder.prefill(prompt):
        pass
    for round_ in decoder.rounds():
        now = time.perf_counter()
        for token in round_.tokens:
            yield token, now


def summary(name: str, times: list[list[float]], runs: dict[str, list[list[float]]]) -> dict[str, object]:
    """Speeds against plain decoding, and against the best fixed length with the right drafter."""
    last = len(times[0]) - 1
    against = {"all": (0, last), "first 64": (0, min(63, last)), "after 64": (min(64, last - 1), last)}
    row: dict[str, object] = {"arm": name, "seconds": median(run[-1] for run in times)}
    for span, (a, b) in against.items():
        ratios = sorted(
            (p[b] - p[a]) / max(t[b] - t[a], 1e-9) for p, t in zip(runs["plain"], times, strict=True)
        )
        row[span] = {"median": median(ratios), "range": [ratios[0], ratios[-1]]}
    fixed = {
        n: median(run[-1] for run in r)
        for n, r in runs.items()
        if n.startswith("right, ") and n != "right, auto"
    }
    if name == "right, auto" and fixed:
        best = min(fixed, key=fixed.__getitem__)
        row["best fixed"] = best
        row["of best fixed"] = median(f[-1] / t[-1] for f, t in zip(runs[best], times, strict=True))
    return row


def print_table(rows: list[dict[str, object]]) -> None:
    print(f"\n{'arm':14} {'seconds':>8} {'of plain':>9} {'range':>13} {'first 64':>9} {'after 64':>9}")
    for row in rows:
        low, high = row["all"]["range"]
        print(
            f"{row['arm']:14} {row['seconds']:8.2f} {row['all']['median']:9.3f} {f'{low:.3f}-{high:.3f}':>13}"
            f" {row['first 64']['median']:9.3f} {row['after 64']['median']:9.3f}"
            + (f"  {row['of best fixed']:.3f} of {row['best fixed']}" if "of best fixed" in row else "")
        )


if __name__ == "__main__":
    main()
