"""Stored tensors of any format in, the same tensors under the network's names out.

Names are the format's business, shapes the loader's; what is moved or split here stays lazy.
"""

import mlx.core as mx

from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.parts import Ends
from dflash_mlx.errors import CheckpointError, UnsupportedError

_ENDS = ("embed_tokens", "lm_head", "model.embed_tokens")
_LEAVES = ("weight", "bias", "scales", "biases")  # what a module may hold; anything else is a name of its own


def in_v1_names(weights: dict[str, mx.array], config: DraftConfig, *, name: str) -> dict[str, mx.array]:
    """Rename and split what the format stores otherwise; `name` is the drafter's, for messages.

    Raises:
        UnsupportedError: an embedding or a head where the format has none.
        CheckpointError: two tensors of one name, or a vocabulary that contradicts itself.
    """
    if not config.format.own_ends:
        _refuse_ends(weights, name)
    renamed: dict[str, mx.array] = {}
    for key, tensor in weights.items():
        if key in config.format.ignores:
            continue
        for path, part in _parts(key, tensor, config, name):
            if path in renamed:
                raise CheckpointError(f"{name} holds the tensor {path} twice, once as {key}.")
            renamed[path] = part
    if "d2t" in renamed:
        _check_offsets(renamed["d2t"], _rows(renamed, "lm_head"), weights.get("t2d"), name)
    return renamed


def own_ends(weights: dict[str, mx.array], config: DraftConfig, *, name: str) -> Ends:
    """Which ends lie among tensors under the network's names.

    Raises:
        CheckpointError: the config asks for a head of its own and the file has none, or another.
    """
    ends = Ends(_rows(weights, "embed_tokens"), _rows(weights, "lm_head"), "d2t" in weights)
    wanted = config.parts.head_rows
    if wanted is not None and (ends.head_rows, ends.offsets) != (wanted, True):
        found = f"a head of {ends.head_rows} rows" if ends.head_rows else "no head"
        raise CheckpointError(
            f"{name} drafts with a vocabulary of {wanted} tokens by its config, but its file holds {found} "
            f"and {'a' if ends.offsets else 'no'} d2t."
        )
    return ends


def _rows(weights: dict[str, mx.array], module: str) -> int | None:
    weight = weights.get(f"{module}.weight")
    return None if weight is None else weight.shape[0]


def _refuse_ends(weights: dict[str, mx.array], name: str) -> None:
    own = [key for key in sorted(weights) if key.startswith(tuple(f"{end}." for end in _ENDS))]
    if own:
        raise UnsupportedError(
            f"{name} carries its own {own[0]}; a drafter of its format uses its target's embedding and head, "
            f"and whether the two are equal cannot be told."
        )


def _check_offsets(offsets: mx.array, rows: int | None, mask: mx.array | None, name: str) -> None:
    """As many offsets as the head has rows, each to another token; the stored mask of its tokens agrees."""
    if rows is None or offsets.shape != (rows,) or not mx.issubdtype(offsets.dtype, mx.integer):
        raise CheckpointError(
            f"{name} holds d2t with shape {list(offsets.shape)}, but its head has "
            f"{'no rows of its own' if rows is None else f'{rows} rows'}."
        )
    ids = mx.sort(offsets + mx.arange(rows))
    agrees = mx.all(ids[1:] > ids[:-1]) & (ids[0] >= 0)
    if mask is not None:
        named = mask.astype(mx.bool_)
        agrees &= (ids[-1] < named.shape[0]) & mx.all(named[ids]) & (named.sum() == rows)
    if not agrees.item():
        raise CheckpointError(
            f"{name} holds a d2t that does not lead to {rows} different tokens of its vocabulary."
        )


def _parts(key: str, tensor: mx.array, config: DraftConfig, name: str) -> list[tuple[str, mx.array]]:
    module, _, leaf = key.rpartition(".")
    if leaf not in _LEAVES:
        return [
            (path, tensor.astype(mx.int32) if path == "d2t" else tensor) for path in config.format.paths(key)
        ]
    paths = config.format.paths(module)
    if len(paths) == 1:
        return [(f"{paths[0]}.{leaf}", tensor)]
    query, key_value = config.num_attention_heads, config.num_key_value_heads
    sizes = [heads * config.head_dim for heads in (query, key_value, key_value)]
    if tensor.shape[0] != sum(sizes):
        raise CheckpointError(
            f"{name} holds {key} with {tensor.shape[0]} rows, but its config makes {sum(sizes)}."
        )
    rows = mx.split(tensor, [sizes[0], sizes[0] + sizes[1]], axis=0)
    return [(f"{path}.{leaf}", part) for path, part in zip(paths, rows, strict=True)]
