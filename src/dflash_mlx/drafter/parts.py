"""What a draft network may have beyond the v1 network, as numbers.

A checkpoint's format chooses the parts and the network builds them. Every part is independent of the others.
Knows no arrays and no files.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Convolution:
    """A dynamic convolution along the block, before and after each sublayer (DFlash2)."""

    taps: int  # block rows that one row sees, itself included
    group_size: int  # channels that share the dynamic part of a kernel


@dataclass(frozen=True, slots=True)
class Selector:
    """A walk through the best candidates of each slot, scored by pairs of neighbours (DFlash2)."""

    rank: int
    top_k: int
    rows: int  # of both codebooks; ids beyond them are not proposed


@dataclass(frozen=True, slots=True)
class Markov:
    """A bias on each slot's logits from the token before it (DSpark)."""

    rank: int
    rows: int  # token ids that may stand before a slot
    head_rows: int  # ids that it biases, numbered as the head numbers them


@dataclass(frozen=True, slots=True)
class Ends:
    """An embedding and a head that the file brings along; without them they are the target's."""

    embedding_rows: int | None = None
    head_rows: int | None = None
    offsets: bool = False  # the head's ids are the target's only after adding an offset to each


@dataclass(frozen=True, slots=True)
class Parts:
    """What is there; the defaults are the v1 network."""

    anchor_predicts: bool = (
        False  # slot j predicts the token after it: block rows and drafts are equally many
    )
    last_tap_is_normed: bool = False  # the target's last layer, as a tap, means its normed output
    convolution: Convolution | None = None
    selector: Selector | None = None
    markov: Markov | None = None
    confidence_head: bool = False
    confidence_sees_markov: bool = False  # besides the hidden row it reads the Markov embedding
    raw_embedding: bool = (
        False  # of the target's embedding the bare table, without the target's scale or norm
    )
    head_gate: bool = False  # each attention head's output is scaled by a softplus of the layer's input
    tap_norms: bool = False  # each tapped feature is normed before they are fused
    context_norm: bool = False  # fused rows pass a layer's input norm, as block rows do
    head_rows: int | None = None  # of the head that the file must bring, its ids told by offsets
    ends: Ends = Ends()  # what the file at hand brings
