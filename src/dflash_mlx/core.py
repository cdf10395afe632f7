"""Nouns that cross rooms. Shapes: S rows of one pass, D hidden width, F tapped layers, V vocabulary."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import mlx.core as mx

FinishReason = Literal["stop", "length"]
ChunkKind = Literal["answer", "thought"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's next token is drawn; `temperature` 0 takes the most probable token."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0


class Pass(NamedTuple):
    """What one target pass over S tokens gave; arrays may still be lazy."""

    logits: mx.array  # [S, V], row j predicts the token after tokens[j]
    features: mx.array  # [S, F*D], outputs of the tapped layers side by side, in the order of the taps
    tape: Any  # what `Target.commit` needs to undo rows; belongs to the target that made it


class Proposal(NamedTuple):
    """The tokens of one drafted block, without its anchor."""

    tokens: mx.array  # [n] int32
    confidences: mx.array  # [n] float32, the draft's own probability of each token


class Cut(NamedTuple):
    """How many of a round's tokens are kept, and why generation ends there (None: it goes on)."""

    keep: int
    finish_reason: FinishReason | None


CutFunction = Callable[[Sequence[int]], Cut]


@dataclass(frozen=True, slots=True)
class Round:
    """One draft-verify turn, already committed: the tokens it emitted and what it cost."""

    tokens: tuple[int, ...]  # emitted and kept
    verified: int  # proposed tokens that the target saw
    accepted: int  # proposed tokens among `tokens`
    finish_reason: FinishReason | None = None
    drafted: bool = False  # a block was proposed, even if nothing of it was verified


@dataclass(slots=True)
class Seconds:
    """Wall time by phase; draft, verify and other are parts of decode, measured only under `profile`."""

    load: float = 0.0
    prefill: float = 0.0  # up to the first token
    decode: float = 0.0
    draft: float | None = None
    verify: float | None = None
    other: float | None = None

    @property
    def first_token(self) -> float:
        """From the request to its first token, loading left out."""
        return self.prefill


@dataclass(slots=True)
class Stats:
    """What a generation did; complete in the last chunk, running totals in those before."""

    target: str = ""
    draft: str | None = None
    dtype: str = ""
    device: str = ""
    blas: str | None = None
    kernels: str = "stock"  # what runs besides MLX's own: kernels by name, or quick exponentials on a CPU
    block_size: int | None = None  # tokens in a drafted block, its anchor included; None without a drafter
    draft_bits: int | None = None  # of the drafter's weights; None: not quantised, or no drafter
    draft_vocab: int | None = None  # words proposed besides those of the text; None: any word, or no drafter
    kv_bits: int | None = None  # of the target's keys and values; None: not quantised
    draft_window: int | None = None  # context tokens that the drafter sees at most; None: all that it would
    seed: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, held since an earlier request
    context_limit: int | None = None  # tokens that the target takes, prompt and answer together
    new_tokens: int = 0
    rounds: int = 0  # target passes after the prefill
    verified: int = 0
    accepted: int = 0
    accept_lengths: list[int] = field(default_factory=list)  # accepted tokens, round by round
    verify_lengths: list[int] = field(default_factory=list)  # verified proposals, round by round
    plain_rounds: int = 0  # rounds in which nothing was drafted
    plain_tokens_per_second_estimate: float | None = None  # by the measured costs; None: not measured
    finish_reason: FinishReason | None = None
    seconds: Seconds = field(default_factory=Seconds)
    peak_memory_gb: float = 0.0
    load_peak_memory_gb: float = 0.0
    weights_gb: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def read_tokens(self) -> int:
        """Tokens of the prompt that were read for this request."""
        return self.prompt_tokens - self.reused_tokens

    @property
    def tokens_per_round(self) -> float:
        """Tokens emitted per target pass, the target's own token included; the prefill's token is no round's."""
        return (self.new_tokens - 1) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over verified proposals."""
        return self.accepted / self.verified if self.verified else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding, the prefill and its token left out."""
        return (self.new_tokens - 1) / self.seconds.decode if self.seconds.decode > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LoadStep:
    """What loading is at: a model on its way from the hub to the disk, or from the disk into memory."""

    stage: Literal["fetch", "read"]
    role: Literal["target", "drafter"]
    name: str
    nbytes: int | None  # of its weights, as stored or as they will be held; None: not known
    done: int = 0  # bytes read so far
    pair_nbytes: int | None = None  # of both models' weights, known once they are read


OnLoad = Callable[[LoadStep], None]
"""Told of each step, before it is done."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of text as it becomes final; joined, the pieces of each kind are the whole text."""

    text: str
    kind: ChunkKind
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    stats: Stats


@dataclass(frozen=True, slots=True)
class Result:
    """A whole generation; `str(result)` is the answer."""

    text: str  # the answer, without thoughts
    thinking: str
    token_ids: tuple[int, ...]  # every emitted token, the stop id included
    finish_reason: FinishReason | None  # None: the stream was left before its end
    stats: Stats

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two texts part."""

    index: int  # of the new token
    plain: int | None  # token ids; None where that text had ended
    drafted: int | None
    logit_gap: float | None  # by how much plain decoding preferred its own token, noise of the draw included


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same request decoded plainly by mlx-lm and with the drafter."""

    plain: Result
    drafted: Result
    first_difference: Difference | None

    @property
    def identical(self) -> bool:
        """Whether both gave the same tokens."""
        return self.first_difference is None

    @property
    def speedup(self) -> float:
        """Decoding speed with the drafter over plain decoding speed, prefill left out."""
        plain = self.plain.stats.tokens_per_second
        return self.drafted.stats.tokens_per_second / plain if plain else 0.0


class Target(Protocol):
    """The verifier: one model, any number of caches."""

    name: str
    hidden_size: int
    vocab_size: int  # rows of the embedding, padding included
    num_layers: int
    max_positions: int | None

    def make_cache(self) -> Any:
        """An empty cache."""

    def embed(self, ids: mx.array) -> mx.array:
        """Token ids [S] to the hidden rows [S, D] that enter layer 0."""

    def head(self, hidden: mx.array) -> mx.array:
        """Normed hidden rows [S, D] to logits [S, V], as the model's own forward makes them."""

    def verify(self, ids: mx.array, cache: Any, taps: Sequence[int]) -> Pass:
        """One pass over ids [S] after what the cache holds; the cache holds the rows afterwards."""

    def commit(self, cache: Any, tape: Any, keep: int) -> None:
        """Let the cache hold only the first `keep` rows of the pass that made `tape`.

        May be called again with another `keep` until the next pass.
        """

    def settle(self, cache: Any) -> None:
        """Evaluate everything the cache holds."""

    def settling(self, cache: Any) -> Iterator[None]:
        """The same in parts; yields after each, so that a Ctrl-C waits for one part only."""

    def snapshot(self, cache: Any) -> Any:
        """What `restore` needs to bring this state back; stays valid while the cache goes on."""

    def restore(self, cache: Any, snapshot: Any) -> None:
        """Bring back the state of `snapshot`."""


class Drafter(Protocol):
    """The draft network with the context injected so far."""

    taps: tuple[int, ...]  # target layers whose outputs are its features; -1: what enters layer 0
    block_size: int  # trained block, anchor included

    @property
    def context_length(self) -> int:
        """Committed tokens whose features were injected."""

    def inject(self, features: mx.array, keep: int) -> None:
        """Append the first `keep` rows of evaluated features [S, F*D] as context; may wait for the next propose."""

    def see(self, text: Sequence[int]) -> None:
        """The text so far, which only grows, the anchor included; asked before each `propose`."""

    def settle(self) -> None:
        """Compute and evaluate everything that waits."""

    def propose(self, anchor: int, block_size: int) -> Proposal:
        """Draft the block_size - 1 tokens after the anchor, which stands right after the context."""

    def snapshot(self) -> Any:
        """What `restore` needs to bring this context back."""

    def restore(self, snapshot: Any) -> None:
        """Bring back the context of `snapshot`."""

    def rewind(self, length: int) -> bool:
        """Let the context hold only its first `length` tokens; False, and no change, where it cannot."""

    def part(self) -> None:
        """Take the context into buffers of its own, so that whoever shares it may go on with theirs."""

    def nbytes_of(self, snapshots: Sequence[Any]) -> int:
        """Bytes of what these snapshots hold; what several share counts once."""
