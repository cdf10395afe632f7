"""The figures of an answer as lines of text: stats in, words out. Draws nothing and knows no terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it loads MLX
    from dflash_mlx.core import Stats

_BETWEEN = " · "
_SETTLED = 8  # tokens before a speed means anything


def live(stats: Stats, width: int) -> str:
    """The line that stands below an answer while it streams: as many figures as fit, the most wanted first.

    Args:
        stats: running totals.
        width: columns.
    """
    parts: list[str] = []
    if stats.new_tokens >= _SETTLED:
        parts += [f"{stats.tokens_per_second:.1f} tokens/s", *_speedup(stats)]
    if stats.draft is not None and stats.rounds:
        parts.append(f"{stats.tokens_per_round:.1f} tokens/round")
    parts += _context(stats)
    if stats.block_size is not None and stats.verify_lengths:
        parts.append(f"block {stats.block_size}, {_verifying(stats.verify_lengths[-1])}")
    return _fitted(parts, width)


def whole(stats: Stats) -> str:
    """The line after an answer."""
    seconds = stats.seconds
    parts = [
        f"{stats.new_tokens} tokens",
        f"{stats.tokens_per_second:.1f} tokens/s",
        *_speedup(stats),
        f"{stats.tokens_per_round:.2f} tokens/round",
    ]
    if stats.draft is not None:
        parts.append(f"{stats.acceptance_rate:.0%} of {stats.verified} proposals accepted")
        parts += _plainly(stats)
    if stats.block_size is not None and stats.verify_lengths:
        mean = sum(stats.verify_lengths) / len(stats.verify_lengths)
        parts.append(f"block {stats.block_size}, {mean:.1f} verified")
    tokens = "1 token" if stats.read_tokens == 1 else f"{stats.read_tokens} tokens"
    read = f"prefill {seconds.prefill:.2f} s for {tokens}"
    parts.append(read + (f", {stats.reused_tokens} re-used" if stats.reused_tokens else ""))
    parts += _context(stats)
    for name in ("draft", "verify", "other"):
        if (measured := getattr(seconds, name)) is not None:
            parts.append(f"{name} {measured:.2f} s")
    parts.append(f"peak {stats.peak_memory_gb:.2f} GB")
    parts.append(f"seed {stats.seed}")
    return _BETWEEN.join(parts)


def details(stats: Stats) -> str:
    """The figures of `whole`, a line for each."""
    return "\n".join(whole(stats).split(_BETWEEN))


def _speedup(stats: Stats) -> list[str]:
    plain = stats.plain_tokens_per_second_estimate
    if stats.draft is None or not plain or not stats.tokens_per_second:
        return []
    return [f"~{stats.tokens_per_second / plain:.1f}x est."]


def _plainly(stats: Stats) -> list[str]:
    """How much of an answer was decoded plainly, and how fast all of it would have been."""
    parts = []
    if stats.plain_rounds:
        rounds = f"{stats.plain_rounds} of {stats.rounds} rounds"
        mostly = 2 * stats.plain_rounds > stats.rounds
        parts.append(f"decoded plainly: {rounds}" if mostly else f"{rounds} plain")
    if stats.plain_tokens_per_second_estimate:
        parts.append(f"plain ~{stats.plain_tokens_per_second_estimate:.1f} tokens/s est.")
    return parts


def _context(stats: Stats) -> list[str]:
    if stats.context_limit is None:
        return []
    return [f"context {stats.prompt_tokens + stats.new_tokens:,} of {stats.context_limit:,}"]


def _verifying(proposals: int) -> str:
    return f"{proposals} verified" if proposals else "none verified"


def _fitted(parts: list[str], width: int) -> str:
    line = ""
    for part in parts:
        longer = f"{line}{_BETWEEN}{part}" if line else part
        if len(longer) > width:
            break
        line = longer
    return line
