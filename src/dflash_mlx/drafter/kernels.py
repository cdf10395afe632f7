"""Kernels inside the draft network: which classes it would use, and whether a whole draft agrees with them.

In: a network, a block size, what was chosen. Out: contests; a network that holds its choices. Knows no machine.
"""

from collections.abc import Iterator

import mlx.core as mx

from dflash_mlx.drafter.network import DraftNetwork
from dflash_mlx.kernels import attention, attention_plan, context_rows, layers, trial
from dflash_mlx.kernels.choice import NO_KERNELS, Choices, Contest


def contests(network: DraftNetwork, *, block_size: int, key_bands: list[int]) -> Iterator[Contest]:
    """What drafting blocks of `block_size` could use, one contest for each class."""
    config, dtype = network.config, network.dtype
    rows = block_size - config.parts.anchor_predicts  # of the block that is drafted
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    # A round commits 1 to block_size rows, which enter the context together with the next block.
    joined = range(rows + 1, rows + block_size + 1)
    if attention_plan.covers(heads, kv_heads, head_dim, dtype):
        for keys in _visible_bands(network, rows, key_bands):
            yield attention.contest(
                rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim, keys=keys, dtype=dtype
            )
    if context_rows.covers(head_dim, dtype):
        for count in sorted({1 << (count - 1).bit_length() for count in joined}):
            yield context_rows.contest(count, heads=kv_heads, head_dim=head_dim, dtype=dtype)
    yield from layers.contests(network, range(2, joined.stop), dtype)


def use(network: DraftNetwork, choices: Choices, *, block_size: int) -> str | None:
    """Let the network run the chosen kernels, once they gave the same draft as its stock operations.

    Returns:
        None, or a sentence for the user: it was not the same, and the network runs stock operations.
    """
    restore(network)
    if choices is NO_KERNELS:
        return None
    expected = _drafts(network, block_size)
    mx.eval(expected)
    network.choices = choices
    layers.give_products(network, choices)
    wrong = trial.difference(expected, lambda: _drafts(network, block_size), dtype=network.dtype)
    if wrong is None:
        return None
    restore(network)
    return f"Drafts of {network.name} differ with the Metal kernels ({wrong}): none is used."


def restore(network: DraftNetwork) -> None:
    """Back to stock operations."""
    network.choices = NO_KERNELS
    layers.restore(network)


def _visible_bands(network: DraftNetwork, rows: int, key_bands: list[int]) -> list[int]:
    """The bands that some layer can reach: a window ends the sight of its layer."""
    reaches = [sight.most for sight in network.config.sights]
    if None in reaches:
        return key_bands
    most = max(reach for reach in reaches if reach is not None) + rows
    return [band for band in key_bands if band <= attention_plan.bands(rows, most)[1]]


def _drafts(network: DraftNetwork, block_size: int) -> list[mx.array]:
    """A block after a context that holds rows, and some that enter with it: the slots that predict, [B - 1, D]."""
    config = network.config
    keys = mx.random.split(mx.random.key(0), 2)
    width = len(config.target_layer_ids) * config.hidden_size
    features = mx.random.normal((2 * block_size, width), key=keys[0])
    rows = block_size - config.parts.anchor_predicts
    block = mx.random.normal((rows, config.hidden_size), key=keys[1])
    context = network.make_context()
    network.absorb(network.fuse(features[:block_size]), context)
    return [network(block, network.fuse(features[block_size:]), context)]
