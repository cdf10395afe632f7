"""Whether a target and a drafter fit, from their configs alone: two dictionaries in, an error or nothing out.

Runs before weights are fetched or loaded. Knows no files and no hub.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_mlx.core import Target
from dflash_mlx.drafter import DraftConfig
from dflash_mlx.errors import CheckpointError, PairError, UnsupportedError
from dflash_mlx.target import build
from dflash_mlx.target.caches import check_model, quantised


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What a drafter must agree with."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int  # rows of the embedding, padding included


def shape_of(target: Target) -> TargetShape:
    """The shape of a target that is loaded already."""
    return TargetShape(target.name, target.hidden_size, target.num_layers, target.vocab_size)


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether a config is a block-diffusion drafter's, of this or another generation."""
    architecture = str(next(iter(config.get("architectures") or ()), ""))
    return bool(
        config.get("dflash_config")
        or config.get("speculators_model_type")
        or "draft" in architecture.lower()
        or "dspark" in architecture.lower()
        or str(config.get("model_type")) == "muse_glimmer_assistant"
    )


def check_target(config: dict[str, Any], *, name: str, kv_bits: int | None = None) -> TargetShape:
    """Check that this config is a target that can be run and undone, with `kv_bits` if given; no weights are made.

    Raises:
        PairError: a drafter's config.
        UnsupportedError: a model type that mlx-lm does not know, a state that cannot be undone, or keys that cannot
            be quantised.
        CheckpointError: a config without the values of its type.
    """
    if is_drafter(config):
        raise PairError(
            f"{name} is a drafter, not a target; give it as the draft model and the model it was trained for as target."
        )
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"The config of {name} has no model_type; is it a language model?")
    try:
        model = build(config)
    except ValueError as error:
        if "not supported" not in str(error):
            raise CheckpointError(
                f"The config of {name} does not make a '{model_type}' model: {error}."
            ) from error
        raise UnsupportedError(
            f"{name} is a model of type '{model_type}', which the installed mlx-lm does not know."
        ) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"The config of {name} does not make a '{model_type}' model: {error}."
        ) from error
    check_model(model, model_type)
    if kv_bits:
        quantised.group_size(model, kv_bits, name)
    text = config.get("text_config") or config
    return TargetShape(name, int(text["hidden_size"]), len(model.layers), int(text["vocab_size"]))


def beyond_text(config: Mapping[str, Any], *, name: str) -> str | None:
    """A sentence on what a target could take besides text; None for one that reads text alone."""
    parts = {"vision_config": "images", "audio_config": "sound"}
    others = [kind for key, kind in parts.items() if config.get(key)]
    if not others:
        return None
    return f"{name} was made for {' and '.join(others)} too; it is used for text alone."


def check_pair(target: TargetShape, draft: DraftConfig, *, draft_name: str, tokens: int | None) -> None:
    """Check that the drafter was made for a target like this one.

    Args:
        target: what the target's config says.
        draft: the drafter's config.
        draft_name: for messages.
        tokens: ids that the target's tokenizer gives out; None while it is not known. A vocabulary may differ in
            padding beyond these.

    Raises:
        PairError: with both names and the numbers that differ.
    """
    if wrong := differences(target, draft, tokens=tokens):
        raise PairError(
            f"The drafter {draft_name} does not fit the target {target.name}: {'; '.join(wrong)}. "
            "Take the drafter that was trained for this target."
        )


def differences(target: TargetShape, draft: DraftConfig, *, tokens: int | None) -> list[str]:
    """What keeps a drafter from a target, with the numbers; [] where it fits. Arguments as `check_pair`."""
    wrong: list[str] = []
    if draft.hidden_size != target.hidden_size:
        wrong.append(f"hidden size {draft.hidden_size} against {target.hidden_size}")
    if draft.num_target_layers is not None and draft.num_target_layers != target.num_layers:
        wrong.append(f"made for {draft.num_target_layers} target layers, the target has {target.num_layers}")
    elif (last := max(draft.target_layer_ids)) >= target.num_layers:
        wrong.append(
            f"reads target layer {last}, the target has {target.num_layers} (0 to {target.num_layers - 1})"
        )
    elif draft.parts.last_tap_is_normed and last == target.num_layers - 1:
        wrong.append(
            f"reads layer id {target.num_layers} as speculators count, which is the target's normed output "
            "and not a layer's"
        )
    if draft.vocab_size is not None and draft.vocab_size != target.vocab_size:
        shared = min(draft.vocab_size, target.vocab_size)
        if tokens is None or tokens > shared:
            wrong.append(f"vocabulary of {draft.vocab_size} against {target.vocab_size}")
    if draft.mask_token_id >= target.vocab_size:
        wrong.append(f"mask token {draft.mask_token_id}, the target embeds {target.vocab_size} tokens")
    return wrong


def check_same_tokens(
    target: Mapping[str, int], draft: Mapping[str, int], *, target_name: str, draft_name: str
) -> None:
    """Refuse a drafter that brings a tokenizer of its own which numbers a token otherwise.

    Args:
        target: token -> id of the target's tokenizer.
        draft: token -> id of the drafter's.
        target_name: for messages.
        draft_name: for messages.

    Raises:
        PairError: naming the first token that differs.
    """
    for token, number in draft.items():
        if (other := target.get(token)) != number:
            found = "unknown to" if other is None else f"id {other} in"
            raise PairError(
                f"The drafter {draft_name} was made with another tokenizer than {target_name}: the token {token!r} "
                f"is id {number} in the drafter's and {found} the target's."
            )
