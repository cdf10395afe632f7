"""Laguna drafters: a gate on every attention head, a norm on every tap, one matrix for queries, keys and values.

A fused context row also passes each layer's input norm before its keys and values are made, unlike in v1; three
published servers agree on this.
"""

from collections.abc import Mapping

from dflash_mlx.drafter.formats.base import Config, Format, refuse
from dflash_mlx.drafter.parts import Parts

_FUSED = "qkv_proj"


def _flatten(config: Config, name: str) -> Config:
    gating = config.get("gating", True)
    if gating not in (True, "per-head"):
        raise refuse(name, f"a Laguna drafter with gating {gating!r}")
    if config.get("num_experts"):
        raise refuse(name, f"a Laguna drafter with {config['num_experts']} experts")
    if config.get("draft_vocab_size", config.get("vocab_size")) != config.get("vocab_size"):
        raise refuse(name, f"a Laguna drafter with a vocabulary of its own ({config['draft_vocab_size']})")
    if len(set(config.get("sliding_windows") or ()) | {config.get("sliding_window")}) > 1:
        raise refuse(name, f"a Laguna drafter whose layers have the windows {config['sliding_windows']}")
    parameters = config.get("rope_parameters") or {}
    types = set(config.get("layer_types") or ())
    # Its target rotates full and sliding layers differently; a drafter whose layers are of one type has one rotation.
    if len(types) == 1 and isinstance(own := parameters.get(*types), Mapping):
        return {**config, "rope_parameters": own}
    return config


def _paths(path: str) -> tuple[str, ...]:
    above, _, leaf = path.rpartition(".")
    if leaf != _FUSED:
        return (path,)
    return tuple(f"{above}.{part}" for part in ("q_proj", "k_proj", "v_proj"))


FORMAT = Format(
    title="Laguna",
    architectures=("DFlashLagunaForCausalLM",),
    model_types=("laguna",),
    flatten=_flatten,
    parts=lambda config, name: Parts(head_gate=True, tap_norms=True, context_norm=True),
    paths=_paths,
)
