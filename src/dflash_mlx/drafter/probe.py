"""What a draft network makes of random input: a network in, arrays out that two of the same shape can be compared by.

Features, embeddings and anchors come from fixed seeds and depend on the network's widths alone. A network without a
head of its own is read at its last hidden rows, as if every width were a token. Knows no target.
"""

from typing import NamedTuple

import mlx.core as mx

from dflash_mlx.drafter.drafter import Drafter
from dflash_mlx.drafter.network import DraftNetwork

_STRETCHES = (24, 1, 7, 16)  # tokens of context that come before each block
_ANY = 2**31 - 1  # more tokens than any vocabulary has


class Probe(NamedTuple):
    """The rows of several blocks, one below the other."""

    of: str  # "logits", or "hidden" where the network borrows its target's head
    rows: mx.array  # [n, V] or [n, D], float32
    tokens: mx.array  # [n], what the network's own walk takes of these rows


class _Ends:
    """Random embeddings in place of a target's, and hidden rows in place of logits."""

    name = "random numbers"
    vocab_size = _ANY
    logit_softcap: float | None = None

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size

    def embed(self, ids: mx.array) -> mx.array:
        keys = [mx.random.key(int(token)) for token in ids.tolist()]  # type: ignore[arg-type, union-attr]
        return mx.stack([mx.random.normal((self.hidden_size,), key=key) for key in keys])

    def lookup(self, ids: mx.array) -> mx.array:
        return self.embed(ids)

    def head(self, hidden: mx.array) -> mx.array:
        return hidden


def probe(network: DraftNetwork) -> Probe:
    """Draft a few blocks over a growing context of random features; evaluated."""
    config = network.config
    drafter = Drafter(network, _Ends(config.hidden_size))
    width = len(config.target_layer_ids) * config.hidden_size
    rows, tokens = [], []
    for anchor, count in enumerate(_STRETCHES, start=1):
        drafter.inject(mx.random.normal((count, width), key=mx.random.key(_ANY - anchor)), count)
        rows.append(drafter.logits(anchor, config.block_size).astype(mx.float32))
        tokens.append(drafter.propose(anchor, config.block_size).tokens)
        mx.eval(rows[-1], tokens[-1])
    of = "hidden" if network.lm_head is None else "logits"
    return Probe(of, mx.concatenate(rows), mx.concatenate(tokens))
