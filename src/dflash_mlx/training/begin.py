"""What a training begins with: a target and a wish in, a float32 draft network that fits the target out.

From nothing, from the target's own layers where their shapes fit, or from a drafter that exists. Trains nothing.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from dflash_mlx.drafter import DraftConfig, DraftNetwork, expand
from dflash_mlx.errors import UsageError
from dflash_mlx.loading import LoadedTarget, load_pair, render
from dflash_mlx.runtime import Machine

TARGET, RANDOM = "target", "random"

_UNUSED = ("reserved", "unused", "empty", "extra", "placeholder", "mask")  # what names of spare tokens hold
_COPIED = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
)


def begin(
    target: LoadedTarget,
    begun_from: str | Path,
    *,
    machine: Machine,
    layers: int | None = None,
    block_size: int | None = None,
    taps: tuple[int, ...] | None = None,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
) -> DraftNetwork:
    """A network to train.

    Args:
        target: loaded.
        begun_from: "target", "random", or a drafter: a folder, a hub id or a known name.
        machine: where a drafter is loaded.
        layers: of a new network; None takes 4 below 32 target layers, else 5.
        block_size: of a new network; None takes 8 for narrow targets, else 16.
        taps: of a new network, 0-based; None spreads five over the target.
        seed: of random weights.
        tell: told what was chosen.

    Raises:
        UsageError: a shape that the target does not have, or no spare token to mask with.
        LoadError: a drafter that cannot be had, or does not fit.
    """
    if begun_from not in (TARGET, RANDOM):
        pair = load_pair(target, begun_from, mode="on", dtype=None, machine=machine)
        assert pair.draft is not None, "mode 'on' insists on a drafter"
        expand(pair.draft)
        pair.draft.set_dtype(mx.float32)
        return pair.draft
    config = draft_config(target, layers=layers, block_size=block_size, taps=taps)
    network = DraftNetwork(DraftConfig.from_dict(config, name="drafter"), name="drafter")
    _fill(network, seed)
    if begun_from == TARGET:
        taken, whole = _copy(target, network)
        tell(f"Beginning with {taken} of {whole} weights of the target's own layers.")
    mx.eval(network.parameters())
    return network


def draft_config(
    target: LoadedTarget,
    *,
    layers: int | None = None,
    block_size: int | None = None,
    taps: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """The config.json of a new drafter in z-lab's v1 format; arguments as `begin`.

    Raises:
        UsageError: taps that the target does not have, or no spare token to mask with.
    """
    model, text = target.model, target.model.config.get("text_config") or target.model.config
    hidden, count = model.hidden_size, model.num_layers
    heads = int(text.get("num_attention_heads") or text.get("n_head") or max(1, hidden // 64))
    layers = layers or (4 if count < 32 else 5)
    taps = taps or default_taps(count)
    if wrong := [tap for tap in taps if not 0 <= tap < count]:
        raise UsageError(f"taps holds {wrong[0]}; {target.name} has layers 0 to {count - 1}.")
    rope = text.get("rope_parameters") or {}
    wide = text.get("intermediate_size")
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": block_size or (8 if hidden < 1024 else 16),
        "dflash_config": {"mask_token_id": mask_token(target), "target_layer_ids": list(taps)},
        "dtype": "bfloat16",
        "head_dim": int(text.get("head_dim") or hidden // heads),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": wide if isinstance(wide, int) and wide >= hidden else 3 * hidden,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": model.max_positions or 8192,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": int(text.get("num_key_value_heads") or heads),
        "num_target_layers": count,
        "rms_norm_eps": float(text.get("rms_norm_eps") or 1e-6),
        "rope_theta": float(text.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        "tie_word_embeddings": True,
        "vocab_size": model.vocab_size,
    }


def default_taps(layers: int, count: int = 5) -> tuple[int, ...]:
    """Layers spread from the second to the third-to-last, as in the paper's code; fewer where there are few."""
    count = min(count, max(1, layers - 3))
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))


def mask_token(target: LoadedTarget) -> int:
    """A row of the embedding that no text uses: one beyond the tokenizer, else a token kept in reserve.

    Raises:
        UsageError: there is none.
    """
    vocabulary = target.tokenizer.get_vocab()
    if (beyond := max(vocabulary.values()) + 1) < target.model.vocab_size:
        return beyond
    used = set(render(target.tokenizer, [{"role": "user", "content": "x"}])) | set(target.eos_ids)
    used |= {target.tokenizer.bos_token_id, target.tokenizer.pad_token_id}
    specials = set(target.tokenizer.all_special_ids) | set(target.tokenizer.added_tokens_decoder)
    spare = {number: word for word, number in vocabulary.items() if number in specials and number not in used}
    for number, word in sorted(spare.items()):
        if any(part in word.lower() for part in _UNUSED):
            return number
    raise UsageError(
        f"The tokenizer of {target.name} has no spare token that could mask what is drafted; begin from a drafter "
        "that was made for it."
    )


def _fill(network: DraftNetwork, seed: int) -> None:
    """Random matrices by seed and name, norms of ones."""
    filled = []
    arrays: dict[str, mx.array] = dict(tree_flatten(network.parameters()))
    for name, array in arrays.items():
        if array.ndim < 2:
            filled.append((name, mx.ones(array.shape)))
            continue
        digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=4).digest()
        key = mx.random.key(int.from_bytes(digest, "little"))
        filled.append((name, mx.random.normal(array.shape, key=key) * array.shape[-1] ** -0.5))
    network.update(tree_unflatten(filled))


def _copy(target: LoadedTarget, network: DraftNetwork) -> tuple[int, int]:
    """Take what fits from layers spread over the target's upper half; gives tensors taken and those there are."""
    config, layers = network.config, target.model.model.layers
    last, count = len(layers) - 1, config.num_hidden_layers
    first = len(layers) // 2
    found: list[tuple[str, mx.array]] = []
    for i in range(count):
        source = layers[first + (last - first) * i // max(1, count - 1)]
        for part in _COPIED:
            weight = _weight(source, part)
            name = f"layers.{i}.{part}.weight"
            if weight is not None:
                found.append((name, weight))
    if (norm := _weight(target.model.model, "model.norm")) is not None:
        found.append(("norm.weight", norm))
    arrays: dict[str, mx.array] = dict(tree_flatten(network.parameters()))
    shapes = {name: array.shape for name, array in arrays.items()}
    fitting = [(name, array.astype(mx.float32)) for name, array in found if shapes.get(name) == array.shape]
    # The mean of the tapped layers, from which the projection of the features can part.
    taps = len(config.target_layer_ids)
    mean = mx.concatenate([mx.eye(config.hidden_size) / taps] * taps, axis=-1)
    network.update(tree_unflatten([*fitting, ("fc.weight", mean + 0.1 * network.fc.weight)]))
    return len(fitting), len(shapes)


def _weight(owner: Any, path: str) -> mx.array | None:
    """A plain or packed matrix, or the factors of a plain norm; None where there is nothing of the kind."""
    for step in path.split("."):
        owner = getattr(owner, step, None)
    if isinstance(owner, nn.QuantizedLinear):
        return mx.dequantize(
            owner.weight,
            owner.scales,
            owner.get("biases"),
            group_size=owner.group_size,
            bits=owner.bits,
            mode=owner.mode,
        )
    if isinstance(owner, nn.Linear) or type(owner) is nn.RMSNorm:
        weight: mx.array = owner.weight
        return weight
    return None
