"""From a block's logits to its proposal: hidden rows, logits and the anchor in, tokens and confidences out.

Most drafters take each slot's most probable token. A candidate selector (DFlash2) and a Markov head (DSpark) walk
from left to right, each slot seeing the token that was taken before it. Nothing here waits for the device.
Ties take the lowest id.
"""

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.core import Proposal
from dflash_mlx.drafter.parts import Markov, Selector


def most_probable(logits: mx.array) -> Proposal:
    """Each slot's best token and its probability, from logits [n, V]."""
    logits = logits.astype(mx.float32)
    best = mx.max(logits, axis=-1)
    return Proposal(mx.argmax(logits, axis=-1).astype(mx.int32), mx.exp(best - mx.logsumexp(logits, axis=-1)))


class CandidateSelector(nn.Module):
    """Scores a slot's candidates by their logits and by how they follow the token before (reference: DFlash2)."""

    def __init__(self, config: Selector, hidden_size: int) -> None:
        super().__init__()
        self._top_k = config.top_k
        self.predecessor_codebook = mx.zeros((config.rows, config.rank))
        self.successor_codebook = mx.zeros((config.rows, config.rank))
        self.hidden_projection = nn.Linear(hidden_size, config.rank, bias=False)

    def walk(
        self, hidden: mx.array, logits: mx.array, anchor: int, words: mx.array | None = None
    ) -> Proposal:
        """Rows [n, D] and logits [n, V] of the drafted slots to the path of best scores.

        A confidence is the softmax of the slot's scores, given the path so far. `words` [V] names the tokens that
        the logits are of, where those are not all; there must be as many as candidates.
        """
        rows = self.successor_codebook.shape[0]
        if words is None:
            logits = logits[:, :rows].astype(mx.float32)
        else:
            logits = mx.where(words < rows, logits.astype(mx.float32), -mx.inf)
        count = min(self._top_k, logits.shape[-1])
        places = mx.argpartition(-logits, count - 1, axis=-1)[:, :count]  # [n, K]
        if words is None:
            places = candidates = mx.sort(places, axis=-1)
        else:
            order = mx.argsort(words[places], axis=-1)
            places = mx.take_along_axis(places, order, axis=-1)
            candidates = mx.minimum(words[places], rows - 1)  # those beyond have no chance
        unary = mx.take_along_axis(logits, places, axis=-1)
        # The first slot has one predecessor, the anchor; K times, so that all slots are one product.
        first = mx.full((1, count), min(anchor, rows - 1), dtype=candidates.dtype)
        before = self.predecessor_codebook[mx.concatenate([first, candidates[:-1]])].astype(mx.float32)
        after = self.successor_codebook[candidates].astype(mx.float32)  # [n, K, R]
        projected = self.hidden_projection(hidden).astype(mx.float32)
        scores = unary[:, None] + (before * projected[:, None]) @ after.swapaxes(1, 2)  # [n, K before, K]
        best = mx.argmax(scores, axis=-1)
        sure = mx.exp(mx.max(scores, axis=-1) - mx.logsumexp(scores, axis=-1))
        tokens, confidences = [], []
        taken = mx.array(0)
        for slot in range(hidden.shape[0]):
            confidences.append(sure[slot, taken])
            taken = best[slot, taken]
            tokens.append(candidates[slot, taken])
        return Proposal(mx.stack(tokens).astype(mx.int32), mx.stack(confidences))


class MarkovHead(nn.Module):
    """Adds to a slot's logits a low-rank bias that depends on the token before it (reference: DSpark)."""

    def __init__(self, config: Markov) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.rows, config.rank)
        self.markov_w2 = nn.Linear(config.rank, config.head_rows, bias=False)

    def walk(self, logits: mx.array, anchor: int, offsets: mx.array | None) -> Proposal:
        """Logits [n, V] of the drafted slots to the greedy path; offsets [V] lead from head ids to token ids."""
        token = mx.array(self._known(anchor))
        tokens, confidences = [], []
        for row in logits.astype(mx.float32):
            bias = self.markov_w2(self.markov_w1(token)).astype(mx.float32)
            shared = min(row.shape[0], bias.shape[0])  # they may be padded differently
            taken = most_probable((row[:shared] + bias[:shared])[None])
            token = translated(taken.tokens, offsets)[0]
            tokens.append(token)
            confidences.append(taken.confidences[0])
        return Proposal(mx.stack(tokens), mx.stack(confidences))

    def before(self, tokens: mx.array, anchor: int) -> mx.array:
        """Embeddings [n, R] of the tokens before each of the drafted tokens [n]."""
        return self.markov_w1(mx.concatenate([mx.array([self._known(anchor)], mx.int32), tokens[:-1]]))

    def _known(self, anchor: int) -> int:
        return min(anchor, self.markov_w1.weight.shape[0] - 1)  # a target may be padded beyond it


class ConfidenceHead(nn.Module):
    """Foretells how probable it is that the target takes a drafted token (reference: DSpark)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def __call__(self, rows: mx.array) -> mx.array:
        """Rows [n, width] to probabilities [n] in float32."""
        return mx.sigmoid(self.proj(rows)[:, 0].astype(mx.float32))


def translated(ids: mx.array, offsets: mx.array | None) -> mx.array:
    """Ids [n] as the head numbers them to token ids of the target."""
    return ids if offsets is None else (ids + offsets[ids]).astype(mx.int32)
