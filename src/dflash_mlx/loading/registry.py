"""The public pairs: which drafter was trained for which target, and what is known of both. A table, no files.

Values come from the published configs of mid-2026; a drafter's own files always win over this table, which only
finds names, chooses a size that fits, and says how a pair was meant to be used. Nothing here is guessed: what is
not known is None, and `verified` is False where a second source for the drafter's config was not found.
"""

from collections.abc import Iterator
from dataclasses import dataclass

GB = 10**9

BUNDLED = "smollm2-135m"
"""The alias of the pair whose drafter ships with this package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPair:
    """One target with the drafter trained for it."""

    alias: str  # also found in any case
    target: str  # hub id, as published
    draft: str  # hub id, or `bundled:<folder>`
    target_4bit: str | None = None  # hub id of a 4-bit conversion for MLX
    target_bytes: int | None = None  # weights of `target`
    draft_bytes: int | None = None
    thinking: bool | None = None  # the mode its training answers were written in
    block_size: int | None = None
    verified: bool = False
    other_targets: tuple[str, ...] = ()  # hub ids of the same model under other names
    draft_names: tuple[str, ...] = ()  # other names of the drafter, as articles print them

    @property
    def pair_bytes(self) -> int | None:
        """Bytes of both models' weights as published; None while one is not known."""
        if self.target_bytes is None or self.draft_bytes is None:
            return None
        return self.target_bytes + self.draft_bytes

    def target_names(self) -> Iterator[str]:
        """Every hub id under which the target is known, the 4-bit one included."""
        yield self.target
        if self.target_4bit:
            yield self.target_4bit
        yield from self.other_targets


PAIRS: tuple[KnownPair, ...] = (
    KnownPair(
        alias=BUNDLED,
        target="HuggingFaceTB/SmolLM2-135M-Instruct",
        draft="bundled:smollm2-135m-dflash",
        target_bytes=2 * 134_515_008,
        draft_bytes=2 * 15_820_928,
        thinking=None,  # the target has no thoughts
        block_size=8,
        verified=True,
    ),
    KnownPair(
        alias="Qwen3-4B",
        target="Qwen/Qwen3-4B",
        draft="z-lab/Qwen3-4B-DFlash-b16",
        target_4bit="mlx-community/Qwen3-4B-4bit",
        target_bytes=2 * 4_022_468_096,
        draft_bytes=2 * 537_427_200,
        thinking=False,
        block_size=16,
        verified=True,
        draft_names=("z-lab/Qwen3-4B-DFlash",),
    ),
    KnownPair(
        alias="Qwen3-8B",
        target="Qwen/Qwen3-8B",
        draft="z-lab/Qwen3-8B-DFlash-b16",
        target_4bit="mlx-community/Qwen3-8B-4bit",
        target_bytes=2 * 8_190_735_360,
        draft_bytes=2 * 1_048_626_432,
        thinking=False,
        block_size=16,
        verified=True,
        draft_names=("z-lab/Qwen3-8B-DFlash",),
    ),
    KnownPair(
        alias="Llama-3.1-8B-Instruct",
        target="meta-llama/Llama-3.1-8B-Instruct",
        draft="z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        target_4bit="mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
        target_bytes=2 * 8_030_261_248,
        draft_bytes=2 * 1_048_626_432,
        block_size=10,
        other_targets=(
            "meta-llama/Meta-Llama-3.1-8B-Instruct",
            "mlx-community/Llama-3.1-8B-Instruct-4bit",
        ),
    ),
    KnownPair(
        alias="Qwen3-Coder-30B-A3B",
        target="Qwen/Qwen3-Coder-30B-A3B-Instruct",
        draft="z-lab/Qwen3-Coder-30B-A3B-DFlash",
        target_4bit="mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit",
        target_bytes=2 * 30_532_122_624,
        draft_bytes=2 * 473_995_264,
        block_size=16,
    ),
    KnownPair(
        alias="Qwen3-Coder-Next",
        target="Qwen/Qwen3-Coder-Next",
        draft="z-lab/Qwen3-Coder-Next-DFlash",
        target_4bit="mlx-community/Qwen3-Coder-Next-4bit",
        draft_bytes=2 * 473_995_264,
        block_size=16,
        verified=True,
    ),
    KnownPair(
        alias="Qwen3.5-4B",
        target="Qwen/Qwen3.5-4B",
        draft="z-lab/Qwen3.5-4B-DFlash",
        target_4bit="mlx-community/Qwen3.5-4B-4bit",
        draft_bytes=2 * 634_425_856,
        thinking=True,
        block_size=16,
        verified=True,
    ),
    KnownPair(
        alias="Qwen3.5-9B",
        target="Qwen/Qwen3.5-9B",
        draft="z-lab/Qwen3.5-9B-DFlash",
        target_4bit="mlx-community/Qwen3.5-9B-4bit",
        draft_bytes=2 * 1_291_904_512,
        thinking=True,
        block_size=16,
    ),
    KnownPair(
        alias="Qwen3.5-27B",
        target="Qwen/Qwen3.5-27B",
        draft="z-lab/Qwen3.5-27B-DFlash",
        target_4bit="mlx-community/Qwen3.5-27B-4bit",
        draft_bytes=2 * 2_128_682_496,
        thinking=True,
        block_size=16,
        verified=True,
    ),
    KnownPair(
        alias="Qwen3.5-35B-A3B",
        target="Qwen/Qwen3.5-35B-A3B",
        draft="z-lab/Qwen3.5-35B-A3B-DFlash",
        target_4bit="mlx-community/Qwen3.5-35B-A3B-4bit",
        draft_bytes=2 * 385_906_176,
        thinking=True,
        block_size=16,
        verified=True,
    ),
    KnownPair(
        alias="Qwen3.5-122B-A10B",
        target="Qwen/Qwen3.5-122B-A10B",
        draft="z-lab/Qwen3.5-122B-A10B-DFlash",
        draft_bytes=2 * 773_893_632,
        thinking=True,
        block_size=16,
        verified=True,
    ),
    KnownPair(
        alias="Qwen3.5-397B-A17B",
        target="Qwen/Qwen3.5-397B-A17B",
        draft="z-lab/Qwen3.5-397B-A17B-DFlash",
        thinking=True,
    ),
    KnownPair(
        alias="Qwen3.6-27B",
        target="Qwen/Qwen3.6-27B",
        draft="z-lab/Qwen3.6-27B-DFlash",
        target_4bit="mlx-community/Qwen3.6-27B-4bit",
        draft_bytes=2 * 1_730_213_120,
        thinking=True,
        block_size=16,
        verified=True,
    ),
    KnownPair(
        alias="Qwen3.6-35B-A3B",
        target="Qwen/Qwen3.6-35B-A3B",
        draft="z-lab/Qwen3.6-35B-A3B-DFlash",
        target_4bit="mlx-community/Qwen3.6-35B-A3B-4bit",
        draft_bytes=2 * 385_906_176,
        thinking=True,
        block_size=16,
        verified=True,
    ),
    KnownPair(
        alias="gemma-4-31B-it",
        target="google/gemma-4-31B-it",
        draft="z-lab/gemma-4-31B-it-DFlash",
        target_4bit="mlx-community/gemma-4-31b-it-4bit",
        draft_bytes=2 * 1_535_967_488,
        thinking=True,
        block_size=16,
        verified=True,
    ),
    KnownPair(
        alias="gemma-4-26B-A4B-it",
        target="google/gemma-4-26B-A4B-it",
        draft="z-lab/gemma-4-26B-A4B-it-DFlash",
        target_4bit="mlx-community/gemma-4-26b-a4b-it-4bit",
        draft_bytes=2 * 429_689_088,
        thinking=True,
        block_size=16,
        verified=True,
    ),
    KnownPair(
        alias="gemma-4-12B-it",
        target="google/gemma-4-12B-it",
        draft="z-lab/gemma4-12B-it-DFlash",
        thinking=True,
    ),
    KnownPair(
        alias="gpt-oss-20b",
        target="openai/gpt-oss-20b",
        draft="z-lab/gpt-oss-20b-DFlash",
        draft_bytes=2 * 784_703_104,
        block_size=8,
        verified=True,
        other_targets=("mlx-community/gpt-oss-20b-MXFP4-Q8",),
    ),
    KnownPair(
        alias="gpt-oss-120b",
        target="openai/gpt-oss-120b",
        draft="z-lab/gpt-oss-120b-DFlash",
        draft_bytes=2 * 784_703_104,
        block_size=10,
    ),
    KnownPair(
        alias="Kimi-K2.5",
        target="moonshotai/Kimi-K2.5",
        draft="z-lab/Kimi-K2.5-DFlash",
        draft_bytes=2 * 3_479_277_056,
        block_size=8,
        verified=True,
    ),
    KnownPair(alias="Kimi-K2.6", target="moonshotai/Kimi-K2.6", draft="z-lab/Kimi-K2.6-DFlash"),
    KnownPair(alias="MiniMax-M2.5", target="MiniMaxAI/MiniMax-M2.5", draft="z-lab/MiniMax-M2.5-DFlash"),
    KnownPair(alias="MiniMax-M2.7", target="MiniMaxAI/MiniMax-M2.7", draft="z-lab/MiniMax-M2.7-DFlash"),
)
