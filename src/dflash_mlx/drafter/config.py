"""The draft's config: a checkpoint's `config.json` as a dictionary in, a checked `DraftConfig` out.

Values are taken from wherever published files keep them (reference: z-lab v1 format, old and new layouts);
nothing is guessed from a model's name. Knows no files, no arrays and no target.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_mlx.drafter.rope import RopeConfig
from dflash_mlx.errors import CheckpointError, UnsupportedError, UsageError

ARCHITECTURE = "DFlashDraftModel"
DEFAULT_BLOCK_SIZE = 16

# Drafters that share DFlash's idea and not its network; refused by name.
_OTHER_ARCHITECTURES = {
    "DFlash2DraftModel": "a second-generation drafter (DFlash2)",
    "Qwen3DSparkModel": "a DSpark drafter",
    "MuseGlimmerAssistantModel": "a Muse assistant drafter",
}
_OTHER_MODEL_TYPES = {"muse_glimmer_assistant": "a Muse assistant drafter", "laguna": "a Laguna drafter"}
# Keys, top-level or in dflash_config, that change the network in a way this version does not know.
_OTHER_KEYS = {
    "conv_kernel_size": "a second-generation drafter (DFlash2)",
    "selector_rank": "a second-generation drafter (DFlash2)",
    "markov_rank": "a DSpark drafter",
    "projector_type": "a Domino drafter",
    "use_swa": "a MiMo drafter",
    "attention_sink_bias": "a drafter with attention sinks",
    "sample_from_anchor": "a drafter whose anchor slot predicts",
}
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
    block_size: int  # trained block, anchor included
    mask_token_id: int  # a row of the target's embedding, maybe beyond its tokenizer
    target_layer_ids: tuple[int, ...]  # outputs of these target layers, 0-based, in this order
    num_target_layers: int | None
    vocab_size: int | None
    final_logit_softcapping: float | None
    input_embedding_scale: float
    output_multiplier: float
    quantization: Quantization | None
    source: Mapping[str, Any] = field(compare=False, repr=False)  # the `config.json` it was read from

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, name: str) -> "DraftConfig":
        """Read a z-lab v1 `config.json`; `name` is the drafter's, for messages.

        Raises:
            UnsupportedError: another architecture, or a feature this version does not know.
            CheckpointError: values that are missing, impossible or contradict each other.
        """
        _check_architecture(config, name)
        dflash = config.get("dflash_config") or {}

        def either(key: str) -> Any:
            value = dflash.get(key)
            return config.get(key) if value is None else value

        for key in _REQUIRED:
            _check_count(config.get(key), key, name)
        if config["num_attention_heads"] % config["num_key_value_heads"]:
            raise CheckpointError(
                f"The config of {name} has {config['num_attention_heads']} attention heads, "
                f"which {config['num_key_value_heads']} key-value heads do not divide."
            )
        if (activation := config.get("hidden_act", "silu")) != "silu":
            raise UnsupportedError(
                f"{name} uses the activation {activation!r}; a DFlash drafter uses 'silu'."
            )
        block_size = either("block_size")
        block_size = DEFAULT_BLOCK_SIZE if block_size is None else block_size
        _check_count(block_size, "block_size", name, least=2)
        _check_count(mask := either("mask_token_id"), "mask_token_id", name, least=0)
        num_target_layers = either("num_target_layers")
        if num_target_layers is not None:
            _check_count(num_target_layers, "num_target_layers", name)
        layer_types, window = _layers(config, name)
        softcap = either("final_logit_softcapping")
        scale, multiplier = either("input_embedding_scale"), either("output_multiplier")
        causal = config.get("is_causal")
        return cls(
            **{key: config[key] for key in _REQUIRED},
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            attention_bias=bool(config.get("attention_bias", False)),
            layer_types=layer_types,
            sliding_window=window,
            is_causal=dflash.get("causal") if causal is None else causal,
            rope=RopeConfig.from_dict(config, name=name),
            max_positions=config.get("max_position_embeddings"),
            block_size=block_size,
            mask_token_id=mask,
            target_layer_ids=_target_layer_ids(either("target_layer_ids"), num_target_layers, name),
            num_target_layers=num_target_layers,
            vocab_size=config.get("vocab_size"),
            final_logit_softcapping=float(softcap) if softcap else None,
            input_embedding_scale=1.0 if scale is None else float(scale),
            output_multiplier=1.0 if multiplier is None else float(multiplier),
            quantization=_quantization(config, name),
            source=config,
        )

    def num_parameters(self) -> int:
        """Parameters of an unquantised file, in closed form; the loader's self-check."""
        hidden, head = self.hidden_size, self.head_dim
        query, key_value = self.num_attention_heads * head, self.num_key_value_heads * head
        layer = 2 * hidden * query + 2 * hidden * key_value + 3 * hidden * self.intermediate_size
        layer += 2 * hidden + 2 * head
        if self.attention_bias:
            layer += query + 2 * key_value + hidden
        return self.num_hidden_layers * layer + len(self.target_layer_ids) * hidden**2 + 2 * hidden

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
        """Tokens that layer sees, its own included; None: all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def causal(self, layer: int) -> bool:
        """Whether that layer's block rows see only the block rows before them."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer] == "sliding_attention"


def _check_architecture(config: Mapping[str, Any], name: str) -> None:
    dflash = config.get("dflash_config") or {}
    if kind := config.get("speculators_model_type"):
        raise UnsupportedError(f"{name} is a drafter in the 'speculators' format ({kind}), {_UNSUPPORTED}.")
    architecture = next(iter(config.get("architectures") or ()), None)
    kind = _OTHER_ARCHITECTURES.get(str(architecture)) or _OTHER_MODEL_TYPES.get(
        str(config.get("model_type"))
    )
    if kind:
        raise UnsupportedError(f"{name} ({architecture}) is {kind}, {_UNSUPPORTED}.")
    marked = bool(dflash) or config.get("target_layer_ids") is not None
    if architecture not in (ARCHITECTURE, None):
        if marked or "draft" in architecture.lower():
            raise UnsupportedError(f"{name} has the drafter architecture {architecture!r}, {_UNSUPPORTED}.")
        raise UnsupportedError(
            f"{name} ({architecture}) is not a drafter; give it as the target and a drafter as the draft."
        )
    if not marked and architecture is None:
        raise UnsupportedError(f"{name} is not a drafter: its config names no {ARCHITECTURE}.")
    for key, kind in _OTHER_KEYS.items():
        if dflash.get(key) or config.get(key):
            raise UnsupportedError(f"{name} is {kind} ({key} is set), {_UNSUPPORTED}.")


_UNSUPPORTED = f"which this version does not support; it runs {ARCHITECTURE} files in the z-lab v1 format"


def _check_count(value: Any, key: str, name: str, *, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        found = "no value" if value is None else repr(value)
        raise CheckpointError(
            f"The config of {name} has {found} for {key}; a whole number of {least} or more is needed."
        )


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
    _check_count(window, "sliding_window", name, least=2)
    return types, window


def _target_layer_ids(ids: Any, num_target_layers: int | None, name: str) -> tuple[int, ...]:
    if not isinstance(ids, Iterable) or isinstance(ids, str) or not (ids := tuple(ids)):
        raise CheckpointError(
            f"The config of {name} has no target_layer_ids; a list of target layers is needed."
        )
    for position, layer in enumerate(ids):
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
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


def _quantization(config: Mapping[str, Any], name: str) -> Quantization | None:
    section = config.get("quantization")
    if section is None:
        if section := config.get("quantization_config"):
            method = section.get("quant_method", "unknown")
            raise UnsupportedError(
                f"{name} is quantised by {method!r}; only MLX-quantised drafters are supported."
            )
        return None
    for key in ("bits", "group_size"):
        _check_count(section.get(key), f"quantization.{key}", name)
    overrides = {key: value for key, value in section.items() if isinstance(value, (Mapping, bool))}
    return Quantization(section["bits"], section["group_size"], section.get("mode", "affine"), overrides)
