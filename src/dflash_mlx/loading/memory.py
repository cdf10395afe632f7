"""What a pair will take of the machine's memory, before it is loaded: headers and configs in, bytes and a verdict out.

Reads no weights. Sizes are those that loading leaves: what a CPU expands to float32 is counted expanded, and
tensors that mlx-lm leaves out of a language model are not counted.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.drafter import DraftConfig
from dflash_mlx.errors import LoadError
from dflash_mlx.loading import files
from dflash_mlx.loading.names import HEADROOM
from dflash_mlx.loading.registry import GB
from dflash_mlx.runtime import Machine

CONTEXT = 4096  # tokens whose keys and values are counted: a prompt and an answer of the default length

_LEFT_OUT = ("visual.", "vision", "audio", "multi_modal", "mtp.")
_FLOATS = {"F64", "F32", "F16", "BF16"}
_DEFAULT_GROUP = 64


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one pair; None: not known before its files are here."""

    target: int | None
    draft: int | None  # 0 without a drafter
    context: int | None  # keys and values of `CONTEXT` tokens, of both

    @property
    def weights(self) -> int:
        """Bytes of what is known of both models."""
        return (self.target or 0) + (self.draft or 0)


def stored_bytes(folder: Path, config: Mapping[str, Any], *, dtype: mx.Dtype | None, name: str) -> int | None:
    """Bytes that a checkpoint's weights take once loaded; None where neither files nor an index tell.

    Args:
        folder: of the checkpoint, its weights there or not.
        config: its config.json.
        dtype: as for loading; None keeps what is stored.
        name: for messages.

    Raises:
        CheckpointError: a file that is truncated or no safetensors.
    """
    if files.complete(folder, tokenizer=False):
        return held_bytes(files.tensors(folder, name=name), config, dtype=dtype)
    if not (folder / files.INDEX).exists():
        return None
    total = (files.read_json(folder / files.INDEX, name=name).get("metadata") or {}).get("total_size")
    if not isinstance(total, int):
        return None
    return _grown(total, config, dtype)


def held_bytes(
    tensors: Mapping[str, files.Stored], config: Mapping[str, Any], *, dtype: mx.Dtype | None
) -> int:
    """Bytes of these tensors once they are loaded as `dtype`; packed ones are expanded for float32 alone."""
    expands = dtype is not None and dtype == mx.float32
    total = 0
    for key, tensor in tensors.items():
        if any(part in key for part in _LEFT_OUT):
            continue
        stem, _, leaf = key.rpartition(".")
        scales = tensors.get(f"{stem}.scales")
        if scales is not None and expands and leaf in ("scales", "biases"):
            continue
        if scales is not None and expands and leaf == "weight":
            total += 4 * math.prod(scales.shape) * _group(config, stem)
        elif dtype is not None and tensor.dtype in _FLOATS:
            total += dtype.size * math.prod(tensor.shape)
        else:
            total += tensor.nbytes
    return total


def packed_bytes(held: int, itemsize: int, bits: int | None) -> int:
    """Bytes of weights that would take `held` bytes, once they are packed to so many bits at load."""
    return held if bits is None else int(held / itemsize * (bits + 32 / _DEFAULT_GROUP) / 8)


def context_bytes(
    config: Mapping[str, Any], *, itemsize: int, kv_bits: int | None = None, tokens: int = CONTEXT
) -> int | None:
    """Keys and values of a target's tokens; None where its config does not tell how it keeps them.

    Layers that see a window, and those without keys, are counted as what they hold at most; `kv_bits` packs the
    others.
    """
    text = config.get("text_config") or config
    layers = text.get("num_hidden_layers")
    kinds = text.get("layer_types")
    if not isinstance(layers, int) or (kinds is None and text.get("hybrid_override_pattern")):
        return None
    if rank := text.get("kv_lora_rank"):
        return layers * (int(rank) + int(text.get("qk_rope_head_dim") or 0)) * itemsize * tokens
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads")
    head = text.get("head_dim")
    if head is None and text.get("hidden_size") and text.get("num_attention_heads"):
        head = text["hidden_size"] // text["num_attention_heads"]
    if not isinstance(heads, int) or not isinstance(head, int):
        return None
    if kinds is None and (interval := text.get("full_attention_interval")):
        kinds = ["full_attention"] * (layers // interval)
    if kinds is None and (pattern := text.get("sliding_window_pattern")):
        kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    window = text.get("sliding_window") or tokens
    kinds = kinds or ["full_attention"] * layers
    growing = sum(kind == "full_attention" for kind in kinds) * tokens
    sliding = sum(kind == "sliding_attention" for kind in kinds) * min(tokens, window)
    width = float(itemsize) if kv_bits is None else kv_bits / 8 + 2 * itemsize / (32 if head % 64 else 64)
    return int(2 * heads * head * (growing * width + sliding * itemsize))


def draft_context_bytes(config: DraftConfig, *, itemsize: int, tokens: int = CONTEXT) -> int:
    """Keys and values that a drafter keeps of these tokens."""
    reaches = [sight.most for sight in config.sights]
    held = sum(tokens if most is None else min(tokens, 2 * (most + 1)) for most in reaches)
    return 2 * held * config.num_key_value_heads * config.head_dim * itemsize


def verdict(need: Need, machine: Machine, *, target_name: str, draft_name: str | None) -> str | None:
    """Whether the machine can hold a pair: None, or a sentence for the user where it will be tight.

    Raises:
        LoadError: the weights alone are more than the machine's memory and swap together.
    """
    parts = [f"{target_name} {_size(need.target)}" if need.target else ""]
    parts += [f"{draft_name} {_size(need.draft)}" if need.draft else ""]
    sizes = ", ".join(part for part in parts if part)
    subject = "The pair" if draft_name else "The target"
    if need.weights > (machine.memory_gb + machine.swap_gb) * GB:
        swap = f" and {machine.swap_gb:.1f} GB of swap" if machine.swap_gb >= 0.05 else ""
        raise LoadError(
            f"{subject} takes {_size(need.weights)} ({sizes}) and this machine has {machine.memory_gb:.1f} GB{swap}: "
            f"it cannot be loaded. {_advice(machine)}"
        )
    whole = need.weights + (need.context or 0)
    limit = recommended_bytes(machine)
    if whole <= limit:
        return None
    context = f", {CONTEXT:,} tokens of context {_size(need.context)}" if need.context else ""
    return (
        f"{subject} takes {_size(whole)} ({sizes}{context}); more than {_size(limit)} is slow on this machine of "
        f"{machine.memory_gb:.1f} GB. {_advice(machine)}"
    )


def recommended_bytes(machine: Machine) -> int:
    """What can be held without slowing down: the GPU's recommended working set, else what leaves a fifth free."""
    own = machine.working_set_gb
    return int((machine.memory_gb / HEADROOM if own is None else own) * GB)


def _group(config: Mapping[str, Any], stem: str) -> int:
    section = config.get("quantization") or config.get("quantization_config") or {}
    own = section.get(stem)
    size = own.get("group_size") if isinstance(own, Mapping) else None
    return int(size or section.get("group_size") or _DEFAULT_GROUP)


def _grown(total: int, config: Mapping[str, Any], dtype: mx.Dtype | None) -> int:
    """All stored bytes as they will be held, from what the config says of their type."""
    if dtype is None:
        return total
    section = config.get("quantization") or {}
    if bits := section.get("bits"):
        group = section.get("group_size") or _DEFAULT_GROUP
        return int(total * 32 / (bits + 32 / group)) if dtype == mx.float32 else total
    text = config.get("text_config") or {}
    kept = next((c[k] for c in (config, text) for k in ("dtype", "torch_dtype") if c.get(k)), "bfloat16")
    return total * dtype.size // (4 if kept == "float32" else 2)


def _size(nbytes: float | None) -> str:
    return "an unknown size" if nbytes is None else f"{nbytes / GB:.{1 if nbytes >= GB else 2}f} GB"


def _advice(machine: Machine) -> str:
    if machine.device == "cpu":
        return "On a CPU all weights are held as float32: take a smaller target, or dtype 'bfloat16' (slow)."
    return "Take a 4-bit target, draft_bits 4, or a smaller pair."
