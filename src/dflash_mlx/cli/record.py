"""What `--json` prints: a result or a comparison in, plain dicts and numbers out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it loads MLX
    from dflash_mlx.core import Comparison, Result, Seconds

Record = dict[str, Any]
"""A JSON object."""


def result_record(result: Result) -> Record:
    """One decoding: its text, its tokens and what they cost."""
    stats = result.stats
    return {
        "text": result.text,
        "thinking": result.thinking,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "prompt_tokens": stats.prompt_tokens,
        "reused_tokens": stats.reused_tokens,
        "read_tokens": stats.read_tokens,
        "new_tokens": stats.new_tokens,
        "rounds": stats.rounds,
        "verified": stats.verified,
        "accepted": stats.accepted,
        "tokens_per_round": stats.tokens_per_round,
        "acceptance_rate": stats.acceptance_rate,
        "accept_lengths": list(stats.accept_lengths),
        "verify_lengths": list(stats.verify_lengths),
        "plain_rounds": stats.plain_rounds,
        "block_size": stats.block_size,
        "draft_bits": stats.draft_bits,
        "draft_vocab": stats.draft_vocab,
        "kv_bits": stats.kv_bits,
        "draft_window": stats.draft_window,
        "seed": stats.seed,
        "seconds": _seconds(stats.seconds),
        "tokens_per_second": stats.tokens_per_second,
        "plain_tokens_per_second_estimate": stats.plain_tokens_per_second_estimate,
        "peak_memory_gb": stats.peak_memory_gb,
        "load_peak_memory_gb": stats.load_peak_memory_gb,
        "weights_gb": stats.weights_gb,
        "target": stats.target,
        "draft": stats.draft,
        "dtype": stats.dtype,
        "device": stats.device,
        "blas": stats.blas,
        "kernels": stats.kernels,
        "notes": list(stats.notes),
    }


def comparison_record(comparison: Comparison) -> Record:
    """The drafted decoding, with the plain one beside it and the first token in which they differ."""
    difference = comparison.first_difference
    return result_record(comparison.drafted) | {
        "plain": result_record(comparison.plain),
        "identical": comparison.identical,
        "first_difference": difference
        and {
            "index": difference.index,
            "plain": difference.plain,
            "drafted": difference.drafted,
            "logit_gap": difference.logit_gap,
        },
        "speedup": comparison.speedup,
    }


def _seconds(seconds: Seconds) -> Record:
    measured: Record = {
        "load": seconds.load,
        "prefill": seconds.prefill,
        "first_token": seconds.first_token,
        "decode": seconds.decode,
    }
    if seconds.draft is not None:
        measured |= {"draft": seconds.draft, "verify": seconds.verify, "other": seconds.other}
    return measured
