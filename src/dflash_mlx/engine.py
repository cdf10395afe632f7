"""A loaded pair made ready: what every generation of one generator runs on.

In: models, kernels and costs, as they were found and chosen once. Out: what one generation needs of them. Knows no
conversation and runs nothing.
"""

from dataclasses import dataclass

from dflash_mlx import runtime, tuning
from dflash_mlx.core import Stats
from dflash_mlx.drafter import Drafter, Shortlist
from dflash_mlx.kernels.choice import Choices
from dflash_mlx.loading import LoadedPair
from dflash_mlx.pace import Pace
from dflash_mlx.policy import CostCurve
from dflash_mlx.request import Request
from dflash_mlx.runtime import Machine
from dflash_mlx.text import Transcript

PREFILL_CHUNK = {"gpu": 512, "cpu": 256}  # tokens in one pass at most; more gains nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What was loaded, chosen and measured; never changes, but for the pace that is learned."""

    pair: LoadedPair
    machine: Machine
    kernels: Choices
    curve: CostCurve | None  # None: nothing was measured, whole blocks are verified
    block_size: int | None  # tokens in a drafted block, the anchor included; None without a drafter
    shortlist: Shortlist | None = None  # what is proposed besides the words of the text; None: any word
    notes: tuple[str, ...]
    seconds_load: float
    load_peak_gb: float
    pace: Pace  # of reading prompts; goes from one generation to the next

    @property
    def prefill_chunk(self) -> int:
        """Most prompt tokens in one pass."""
        return PREFILL_CHUNK[self.machine.device]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, the shortlist's copies included."""
        return self.pair.nbytes + (self.shortlist.nbytes if self.shortlist else 0)

    def drafter(self, *, after: int = 0, insist: bool = False) -> Drafter | None:
        """A drafter without context; None also where not even one that is always right would pay.

        Args:
            after: tokens of the prompt; what passes cost with fewer in the cache is not asked.
            insist: draft whatever it costs.
        """
        if self.pair.draft is None or not (insist or self.curve is None or self.curve.can_pay_after(after)):
            return None
        return Drafter(self.pair.draft, self.pair.target.model, shortlist=self.shortlist)

    def transcript(self, request: Request) -> Transcript:
        """The text of an answer that has not begun."""
        tokenizer = self.pair.target.tokenizer
        return Transcript(
            tokenizer,
            stop_ids=frozenset(self.pair.target.eos_ids),
            max_new_tokens=request.budget,
            stop_strings=request.options.stop_strings,
            think_tags=(tokenizer.think_start, tokenizer.think_end) if tokenizer.has_thinking else None,
            inside_thought=request.inside_thought,
        )

    def stats(self, request: Request) -> Stats:
        """Those of a generation that has not begun."""
        target, draft = self.pair.target, self.pair.draft
        stats = Stats(
            target=target.name,
            draft=draft.name if draft else None,
            dtype=str(target.model.dtype).removeprefix("mlx.core."),
            device=self.machine.device,
            blas=self.machine.blas,
            kernels=tuning.in_use(target.model, self.kernels),
            block_size=self.block_size,
            draft_bits=draft.bits if draft else None,
            draft_vocab=len(self.shortlist) if self.shortlist else None,
            kv_bits=target.model.kv_bits,
            draft_window=draft.config.draft_window if draft else None,
            seed=request.params.seed,
            prompt_tokens=len(request.prompt),
            context_limit=target.model.max_positions,
            load_peak_memory_gb=self.load_peak_gb,
            weights_gb=self.nbytes / runtime.GB,
            notes=[*self.notes, *request.notes],
        )
        stats.seconds.load = self.seconds_load
        if self.curve is not None:
            stats.plain_tokens_per_second_estimate = 1 / self.curve.at(len(request.prompt)).plain
        return stats
