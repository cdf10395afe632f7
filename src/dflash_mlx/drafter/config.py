"""The draft's config: a checkpoint's `config.json` as a dictionary in, a checked `DraftConfig` out.

The format of the config is looked up first and brings it into the shape of z-lab v1; values are then taken from
wherever published v1 files keep them, old layouts and new. Nothing is guessed from a model's name. Knows no files,
no arrays and no target.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dflash_mlx.drafter import formats
from dflash_mlx.drafter.formats.base import Format, checked_count, either
from dflash_mlx.drafter.parts import Ends, Parts
from dflash_mlx.drafter.rope import RopeConfig
from dflash_mlx.drafter.sight import Sight, check_draft_window, sight
from dflash_mlx.errors import CheckpointError, UnsupportedError, UsageError

DEFAULT_BLOCK_SIZE = 16

_LAYER_TYPES = ("full_attention", "sliding_attention")
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)

LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of an MLX-quantised file are packed; `overrides` by layer path, False: not packed."""

    bits: int
    group_size: int
    mode: str
    overrides: Mapping[str, Mapping[str, Any] | bool]


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Everything the draft network, its context and its loader need to know."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None  # tokens a sliding layer sees, its own included; None: not windowed
    is_causal: bool | None  # None: sliding layers are causal inside the block, full layers are not
    rope: RopeConfig
    max_positions: int | None
    block_size: int  # the anchor and the tokens that the trained block drafts after it
    mask_token_id: int  # a row of the target's embedding, maybe beyond its tokenizer
    target_layer_ids: tuple[
        int, ...
    ]  # outputs of these target layers, 0-based, in this order; -1: the embedding
    num_target_layers: int | None
    vocab_size: int | None
    final_logit_softcapping: float | None
    input_embedding_scale: float
    output_multiplier: float
    quantization: Quantization | None
    parts: Parts  # what there is beyond the v1 network
    format: Format = field(compare=False, repr=False)
    source: Mapping[str, Any] = field(compare=False, repr=False)  # the `config.json` it was read from
    draft_window: int | None = None  # context tokens that the user lets a layer see; None: all that it would

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, name: str) -> "DraftConfig":
        """Read a `config.json` of any known format; `name` is the drafter's, for messages.

        Raises:
            UnsupportedError: another architecture, or a feature this version does not know.
            CheckpointError: values that are missing, impossible or contradict each other.
        """
        found = formats.find(config, name=name)
        flat = found.flatten(config, name)
        for key in _REQUIRED:
            checked_count(flat.get(key), key, name)
        if flat["num_attention_heads"] % flat["num_key_value_heads"]:
            raise CheckpointError(
                f"The config of {name} has {flat['num_attention_heads']} attention heads, "
                f"which {flat['num_key_value_heads']} key-value heads do not divide."
            )
        if (activation := flat.get("hidden_act", "silu")) != "silu":
            raise UnsupportedError(
                f"{name} uses the activation {activation!r}; a DFlash drafter uses 'silu'."
            )
        parts = found.parts(flat, name)
        block_size = either(flat, "block_size")
        block_size = DEFAULT_BLOCK_SIZE if block_size is None else block_size
        # Where the anchor slot predicts, K rows draft K tokens: a block of K + 1 with the anchor.
        block_size = parts.anchor_predicts + checked_count(
            block_size, "block_size", name, least=1 if parts.anchor_predicts else 2
        )
        num_target_layers = either(flat, "num_target_layers")
        if num_target_layers is not None:
            checked_count(num_target_layers, "num_target_layers", name)
        layer_types, window = _layers(flat, name)
        softcap = either(flat, "final_logit_softcapping")
        scale, multiplier = either(flat, "input_embedding_scale"), either(flat, "output_multiplier")
        causal = flat.get("is_causal")
        return cls(
            **{key: flat[key] for key in _REQUIRED},
            rms_norm_eps=float(flat.get("rms_norm_eps", 1e-6)),
            attention_bias=bool(flat.get("attention_bias", False)),
            layer_types=layer_types,
            sliding_window=window,
            is_causal=(flat.get("dflash_config") or {}).get("causal") if causal is None else causal,
            rope=RopeConfig.from_dict(flat, name=name),
            max_positions=flat.get("max_position_embeddings"),
            block_size=block_size,
            mask_token_id=checked_count(either(flat, "mask_token_id"), "mask_token_id", name, least=0),
            target_layer_ids=_target_layer_ids(flat, num_target_layers, found, name),
            num_target_layers=num_target_layers,
            vocab_size=flat.get("vocab_size"),
            final_logit_softcapping=float(softcap) if softcap else None,
            input_embedding_scale=1.0 if scale is None else float(scale),
            output_multiplier=1.0 if multiplier is None else float(multiplier),
            quantization=_quantization(flat, found, name),
            parts=parts,
            format=found,
            source=config,
        )

    def with_ends(self, ends: Ends) -> "DraftConfig":
        """The same config of a file that brings these ends along."""
        return replace(self, parts=replace(self.parts, ends=ends))

    def with_draft_window(self, tokens: int | None) -> "DraftConfig":
        """The same config with no layer seeing more than so many tokens of the context.

        Raises:
            UsageError: no whole number, or fewer than the block has.
        """
        check_draft_window(tokens, self.block_size)
        return replace(self, draft_window=tokens)

    def num_parameters(self) -> int:
        """Parameters of an unquantised file, in closed form; the loader's self-check."""
        hidden, head = self.hidden_size, self.head_dim
        query, key_value = self.num_attention_heads * head, self.num_key_value_heads * head
        layer = 2 * hidden * query + 2 * hidden * key_value + 3 * hidden * self.intermediate_size
        layer += 2 * hidden + 2 * head
        if self.attention_bias:
            layer += query + 2 * key_value + hidden
        taps, parts = len(self.target_layer_ids), self.parts
        if (convolution := parts.convolution) is not None:
            kernels = 2 * convolution.taps * hidden  # both sides of a sublayer, of which there are two
            layer += 2 * (kernels + kernels // convolution.group_size * hidden)
        if parts.head_gate:
            layer += self.num_attention_heads * hidden
        total = self.num_hidden_layers * layer + taps * hidden**2 + 2 * hidden
        if parts.tap_norms:
            total += taps * hidden
        if (selector := parts.selector) is not None:
            total += selector.rank * (hidden + 2 * selector.rows)
        if (markov := parts.markov) is not None:
            total += markov.rank * (markov.rows + markov.head_rows)
        if parts.confidence_head:
            total += self.confidence_width + 1
        return total + hidden * ((parts.ends.embedding_rows or 0) + (parts.ends.head_rows or 0))

    @property
    def confidence_width(self) -> int:
        """Values that the confidence head reads for each slot."""
        markov = self.parts.markov
        return self.hidden_size + (markov.rank if markov and self.parts.confidence_sees_markov else 0)

    def effective_block_size(self, override: int | None) -> int:
        """The block to draft: `override` when given, else the trained one.

        Raises:
            UsageError: an override below 2 or above the trained block.
        """
        if override is None:
            return self.block_size
        if (
            isinstance(override, bool)
            or not isinstance(override, int)
            or not 2 <= override <= self.block_size
        ):
            raise UsageError(
                f"block_size {override}: this drafter was trained with blocks of {self.block_size}; "
                f"give a whole number from 2 to {self.block_size}."
            )
        return override

    def window(self, layer: int) -> int | None:
        """Tokens that layer sees by the checkpoint, its own included; None: all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    @property
    def sights(self) -> tuple[Sight, ...]:
        """What of the context each layer sees, `draft_window` taken into account."""
        return tuple(sight(self.window(layer), self.draft_window) for layer in range(self.num_hidden_layers))

    def causal(self, layer: int) -> bool:
        """Whether that layer's block rows see only the block rows before them."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer] == "sliding_attention"


def _layers(config: Mapping[str, Any], name: str) -> tuple[tuple[LayerType, ...], int | None]:
    count = config["num_hidden_layers"]
    types = tuple(config.get("layer_types") or ("full_attention",) * count)
    if unknown := sorted(set(types) - set(_LAYER_TYPES)):
        raise UnsupportedError(
            f"{name} has layers of type {unknown[0]!r}; supported are {' and '.join(_LAYER_TYPES)}."
        )
    if len(types) != count:
        raise CheckpointError(f"The config of {name} lists {len(types)} layer_types for {count} layers.")
    # As in Transformers, an explicit use_sliding_window=false drops the window and leaves the causal rule.
    if "sliding_attention" not in types or config.get("use_sliding_window") is False:
        return types, None
    window = config.get("sliding_window")
    checked_count(window, "sliding_window", name, least=2)
    return types, window


def _target_layer_ids(
    config: Mapping[str, Any], num_target_layers: int | None, found: Format, name: str
) -> tuple[int, ...]:
    ids = either(config, "target_layer_ids")
    if not isinstance(ids, Iterable) or isinstance(ids, str) or not (ids := tuple(ids)):
        raise CheckpointError(
            f"The config of {name} has no target_layer_ids; a list of target layers is needed."
        )
    least = -1 if found.taps_embedding else 0
    for position, layer in enumerate(ids):
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < least:
            raise CheckpointError(
                f"The config of {name} has the target layer id {layer!r}; ids count from 0."
            )
        if layer in ids[:position]:
            raise CheckpointError(f"The config of {name} has the target layer id {layer} twice.")
        if num_target_layers is not None and layer >= num_target_layers:
            raise CheckpointError(
                f"The config of {name} has the target layer id {layer}, "
                f"but its target has {num_target_layers} layers (0 to {num_target_layers - 1})."
            )
    return ids


def _quantization(config: Mapping[str, Any], found: Format, name: str) -> Quantization | None:
    section = config.get("quantization")
    if section is None:
        if section := config.get("quantization_config"):
            method = section.get("quant_method", "unknown")
            raise UnsupportedError(
                f"{name} is quantised by {method!r}; only MLX-quantised drafters are supported."
            )
        return None
    for key in ("bits", "group_size"):
        checked_count(section.get(key), f"quantization.{key}", name)
    overrides = {
        path: value
        for stored, value in section.items()
        if isinstance(value, (Mapping, bool))
        for path in found.paths(stored)
    }
    return Quantization(section["bits"], section["group_size"], section.get("mode", "affine"), overrides)
