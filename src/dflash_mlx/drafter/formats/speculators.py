"""Drafters of vLLM's speculators: a decoder config inside another, layer ids counted from the embedding on.

There are two kinds: "dflash" has the v1 network, "dspark" a Markov and a confidence head besides. Such a file may
bring its own embedding and a head of fewer words; `d2t` then says how far a head id lies below the token id. What it
does not bring is the target's.
"""

from dataclasses import replace
from typing import Any

from dflash_mlx.drafter.formats import dspark
from dflash_mlx.drafter.formats.base import Config, Format, count, refuse, without_prefix
from dflash_mlx.drafter.parts import Parts
from dflash_mlx.errors import CheckpointError

_DEFAULT_BLOCK_SIZE = 8
_HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def _flatten(config: Config, name: str) -> Config:
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise CheckpointError(
            f"The config of {name} has no transformer_layer_config, where its layers are described."
        )
    if (model_type := inner.get("model_type", "qwen3")) != "qwen3":
        raise refuse(name, f"a speculators drafter made of {model_type!r} layers")
    width = config.get("target_hidden_size")
    if width is not None and width != inner.get("hidden_size"):
        raise refuse(name, f"a speculators drafter for a target of another width ({width})")
    flat: dict[str, Any] = {
        **inner,
        "block_size": config.get("block_size", _DEFAULT_BLOCK_SIZE),
        "mask_token_id": config.get("mask_token_id"),
        "target_layer_ids": _layer_ids(config, name),
        "draft_vocab_size": config.get("draft_vocab_size"),
        "quantization": config.get("quantization"),
        "quantization_config": config.get("quantization_config"),
    }
    flat |= {key: config.get(key) for key in _HEADS}
    anchor = config.get("sample_from_anchor")
    flat["sample_from_anchor"] = config["speculators_model_type"] == "dspark" if anchor is None else anchor
    if config.get("sliding_window_non_causal"):
        flat["is_causal"] = False
    return flat


def _layer_ids(config: Config, name: str) -> list[Any]:
    """The ids less one: here 0 is the embedding and i the output of layer i - 1."""
    ids = config.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not ids:
        raise CheckpointError(
            f"The config of {name} has no aux_hidden_state_layer_ids; which target layers it reads cannot be told."
        )
    if wrong := [
        layer for layer in ids if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0
    ]:
        raise CheckpointError(
            f"The config of {name} has the layer id {wrong[0]!r} in aux_hidden_state_layer_ids; ids count from 0."
        )
    return [layer - 1 for layer in ids]


def _parts(config: Config, name: str) -> Parts:
    rows = config["draft_vocab_size"]
    reduced = rows is not None and rows != count(config, "vocab_size", name)
    head_rows = count(config, "draft_vocab_size", name) if reduced else None
    return replace(
        dspark.heads(config, name, head_rows=head_rows),
        anchor_predicts=bool(config["sample_from_anchor"]),
        last_tap_is_normed=True,
        head_rows=head_rows,
    )


DFLASH = Format(
    title="speculators",
    architectures=(),
    knows=frozenset({"sample_from_anchor"}),
    taps_embedding=True,
    own_ends=True,
    # Needed to train, or to check d2t, and not to draft: the target's own norm and head, a mask of the head's words.
    ignores=frozenset({"t2d", "verifier_norm.weight", "verifier_lm_head.weight"}),
    flatten=_flatten,
    parts=_parts,
    paths=without_prefix,
)
DSPARK = replace(DFLASH, title="speculators DSpark", knows=DFLASH.knows | {"markov_rank"})
