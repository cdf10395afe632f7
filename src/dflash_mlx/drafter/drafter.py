"""The drafter of one generation: target features in, proposals out.

Holds a network, the context it has seen, and the features that still wait to enter it. Embedding and head are
the target's, through the small protocol below, or the network's own; it knows no target class, no text and no
acceptance.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import mlx.core as mx

from dflash_mlx.core import Proposal
from dflash_mlx.drafter import kept
from dflash_mlx.drafter.context import ContextSnapshot
from dflash_mlx.drafter.network import DraftNetwork
from dflash_mlx.drafter.shortlist import Shortlist, Words
from dflash_mlx.errors import PairError

_MAX_WAITING = 512  # rows of features kept before their keys and values are computed unasked


class SharedEnds(Protocol):
    """What a drafter borrows from its target."""

    name: str
    vocab_size: int
    hidden_size: int
    logit_softcap: float | None  # applied inside `head`; None: not capped

    def embed(self, ids: mx.array) -> mx.array:
        """Token ids [S] to the rows [S, D] that enter the target's layer 0."""

    def lookup(self, ids: mx.array) -> mx.array:
        """Token ids [S] to rows [S, D] of the embedding's table, neither scaled nor normed."""

    def head(self, hidden: mx.array) -> mx.array:
        """Normed rows [S, D] to logits [S, V], the target's own scale and soft-cap included."""


class Waiting(NamedTuple):
    """Features whose first `keep` rows are to enter the context."""

    features: mx.array  # [S, F*D], evaluated
    keep: int


class DrafterSnapshot(NamedTuple):
    """The context and what waited to enter it."""

    context: ContextSnapshot
    waiting: tuple[Waiting, ...]


class Drafter:
    """Implements `core.Drafter` for one target; many may share a network."""

    def __init__(
        self, network: DraftNetwork, target: SharedEnds, *, shortlist: Shortlist | None = None
    ) -> None:
        """Bind a network to a target; with a shortlist it proposes its words and those of the text.

        Raises:
            PairError: hidden sizes differ, or ids of the network are none of the target's.
            UnsupportedError: the network needs the target's bare embedding, which cannot be reached.
        """
        config = network.config
        if config.hidden_size != target.hidden_size:
            raise PairError(
                f"{network.name} is for targets with hidden size {config.hidden_size}, "
                f"but {target.name} has {target.hidden_size}; the drafter belongs to another target."
            )
        rows = config.parts.ends.embedding_rows or target.vocab_size
        if config.mask_token_id >= rows:
            raise PairError(
                f"{network.name} uses the mask id {config.mask_token_id}, but {target.name} has only "
                f"{rows} embedding rows; the drafter belongs to another target."
            )
        if network.d2t is not None and (last := _last_id(network.d2t)) >= target.vocab_size:
            raise PairError(
                f"{network.name} drafts token {last}, but {target.name} has only {target.vocab_size} tokens; "
                "the drafter belongs to another target."
            )
        self.network = network
        self.target = target
        self.name = network.name
        self.taps: tuple[int, ...] = config.target_layer_ids
        self.block_size: int = config.block_size
        self._embed = target.lookup if config.parts.raw_embedding else target.embed
        self._target_dtype = self._embed(mx.array([0])).dtype  # of what its head takes; nothing is computed
        self._context = network.make_context()
        self._waiting: list[Waiting] = []
        self._words = Words(shortlist) if shortlist else None
        own_cap = config.final_logit_softcapping
        self._softcap = own_cap if network.lm_head is not None or target.logit_softcap is None else None

    @property
    def context_length(self) -> int:
        """Committed tokens injected so far, those that still wait included."""
        return self._context.length + sum(waiting.keep for waiting in self._waiting)

    def inject(self, features: mx.array, keep: int) -> None:
        """Append the first `keep` rows of evaluated features [S, F*D] as context.

        They wait for the next `propose` or `settle`; past a few hundred rows they are settled here.
        """
        assert 0 <= keep <= features.shape[0], (keep, features.shape)
        if keep:
            self._waiting.append(Waiting(features, keep))
        if sum(waiting.keep for waiting in self._waiting) > _MAX_WAITING:
            self.settle()

    @property
    def reads_whole_head(self) -> bool:
        """Whether the next proposals come from all words although there is a shortlist."""
        return self._words is not None and not self._words.covers

    def see(self, text: Sequence[int]) -> None:
        """The text so far, which only grows: its words may be proposed, whatever the shortlist."""
        if self._words is not None:
            self._words.see(text)

    def settle(self) -> None:
        """Compute the context of everything that waits, evaluate it and free the features."""
        with self._undone_when_interrupted():
            fused = self._fuse_waiting()
            if fused is not None:
                self.network.absorb(fused, self._context)
            mx.eval(self._context.arrays())

    def propose(self, anchor: int, block_size: int) -> Proposal:
        """Draft the block_size - 1 tokens after the anchor, which stands right after the context.

        Both arrays of the proposal are lazy, and so is the context until they are evaluated.

        Raises:
            UsageError: a block below 2 or above the trained one.
        """
        hidden = self._hidden(anchor, block_size)
        if self._words is None or self.reads_whole_head:
            return self.network.choose(hidden, self._logits(hidden), anchor)
        return self.network.choose(hidden, self._logits(hidden, self._words), anchor, words=self._words.ids)

    def logits(self, anchor: int, block_size: int) -> mx.array:
        """Logits [block_size - 1, V] of the slots that predict, before any walk; what waits enters the context.

        V is the target's vocabulary, or that of the network's own head; no shortlist is looked at.
        """
        return self._logits(self._hidden(anchor, block_size))

    def _hidden(self, anchor: int, block_size: int) -> mx.array:
        """Normed rows [block_size - 1, D] of the slots that predict."""
        network, config = self.network, self.network.config
        config.effective_block_size(block_size)
        masks = [config.mask_token_id] * (block_size - (2 if config.parts.anchor_predicts else 1))
        if network.embed_tokens is None:
            embedded = self._embed(mx.array([anchor, *masks]))
        else:
            rows_of_own = network.embed_tokens.weight.shape[0]  # a target may be padded beyond them
            embedded = network.embed_tokens(mx.array([min(anchor, rows_of_own - 1), *masks]))
        rows = embedded if config.input_embedding_scale == 1.0 else embedded * config.input_embedding_scale
        with self._undone_when_interrupted():
            return network(rows, self._fuse_waiting(), self._context)

    def _logits(self, hidden: mx.array, words: Words | None = None) -> mx.array:
        """Logits [n, V] of normed rows [n, D], or [n, N] of the words alone."""
        network = self.network
        if network.lm_head is None:
            hidden = hidden.astype(self._target_dtype)
        if words is not None:
            logits = words.logits(hidden)
        elif network.lm_head is None:
            logits = self.target.head(hidden)
        else:
            logits = network.lm_head(hidden)
            if network.d2t is None:
                logits = logits[:, : self.target.vocab_size]  # it may be padded beyond the target's
        if network.config.output_multiplier != 1.0:
            logits = logits * network.config.output_multiplier
        if self._softcap is not None:
            logits = mx.tanh(logits / self._softcap) * self._softcap
        return logits

    def snapshot(self) -> DrafterSnapshot:
        """What `restore` needs to bring this context back; costs nothing and stays valid."""
        return DrafterSnapshot(self._context.snapshot(), tuple(self._waiting))

    def restore(self, snapshot: DrafterSnapshot) -> None:
        """Bring back the context of `snapshot`."""
        self._context.restore(snapshot.context)
        self._waiting = list(snapshot.waiting)

    def rewind(self, length: int) -> bool:
        """Let the context hold only its first `length` tokens; False, and no change, where a window dropped them."""
        self.settle()
        return self._context.rewind(length)

    def arrays(self, places: Sequence[DrafterSnapshot]) -> dict[str, mx.array]:
        """What these places of one text hold, named, for a file; the first is the furthest."""
        assert not any(place.waiting for place in places), "settle first"
        return kept.arrays(self._context, [place.context for place in places])

    def fill(self, named: Mapping[str, mx.array], lengths: Sequence[int]) -> tuple[DrafterSnapshot, ...]:
        """Put what `arrays` gave into an empty context, as that of so many tokens at each place; gives the places.

        Raises:
            KeyError: they are of another network.
        """
        return tuple(DrafterSnapshot(place, ()) for place in kept.fill(self._context, named, lengths))

    def part(self) -> None:
        """Take the context into buffers of its own, so that another drafter may go on with the shared ones."""
        self._context.part()
        mx.eval(self._context.arrays())

    def nbytes_of(self, snapshots: Sequence[DrafterSnapshot]) -> int:
        """Bytes of what these snapshots hold; what several share counts once."""
        waiting = {id(item.features): item.features for place in snapshots for item in place.waiting}
        return kept.nbytes(place.context for place in snapshots) + sum(a.nbytes for a in waiting.values())

    @contextmanager
    def _undone_when_interrupted(self) -> Iterator[None]:
        """Keep layers in step when Ctrl-C or an error falls between two of them."""
        before = self.snapshot()
        try:
            yield
        except BaseException:
            self.restore(before)
            raise

    def _fuse_waiting(self) -> mx.array | None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return None
        return self.network.fuse(_joined([item.features[: item.keep] for item in waiting]))


def _last_id(offsets: mx.array) -> int:
    last: int = mx.max(offsets + mx.arange(offsets.shape[0])).item()  # type: ignore[assignment]
    return last


def _joined(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=0)
