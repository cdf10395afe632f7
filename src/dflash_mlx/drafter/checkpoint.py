"""Drafter checkpoints: a folder in, an evaluated `DraftNetwork` out.

A file is taken only if it holds every tensor of its config, in its shape, and no other. An embedding or a head in
the file is used where its format says so; in a v1 file it is refused, because v1 drafters use their target's and this
room cannot tell whether the two are equal. Knows no hub and no target.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from dflash_mlx.drafter.config import DraftConfig, Quantization
from dflash_mlx.drafter.frequent import read_frequent
from dflash_mlx.drafter.network import DraftNetwork
from dflash_mlx.drafter.tensors import in_v1_names, own_ends
from dflash_mlx.errors import CheckpointError, UnsupportedError, UsageError

DRAFT_BITS = (4, 8)
_GROUP_SIZES = (64, 32)  # the second where a width is no multiple of the first
_FEW_ROWS = 8  # a matrix of fewer rows, such as a confidence head, gains nothing by being packed


def load_draft(
    folder: str | Path,
    *,
    name: str,
    bits: int | None = None,
    dtype: mx.Dtype | None = None,
    draft_window: int | None = None,
) -> DraftNetwork:
    """Load a drafter of any known format from a folder with `config.json` and safetensors.

    Args:
        folder: where the files lie.
        name: the drafter's, for messages.
        bits: 4 or 8 quantises the matrices at load; None leaves them as they are stored.
        dtype: of activations and unquantised weights. None: as stored on a GPU (bf16 for files in fp16, whose
            range activations can leave), fp32 on a CPU, where matrices stored quantised are expanded too.
        draft_window: context tokens that a layer sees at most; None for all that its config lets it see.

    Raises:
        UsageError: other `bits`, or `bits` for a file that is quantised otherwise; a `draft_window` below the block.
        CheckpointError: files missing or unreadable, tensors missing, extra or misshaped.
        UnsupportedError: not a drafter of a known format.
    """
    check_bits(bits)
    folder = Path(folder)
    config = DraftConfig.from_dict(read_config(folder, name=name), name=name).with_draft_window(draft_window)
    stored = config.quantization
    if bits and stored and stored.bits != bits:
        raise UsageError(
            f"draft_bits {bits}: the file of {name} is already quantised to {stored.bits} bits; "
            f"leave draft_bits out or take an unquantised file."
        )
    weights = in_v1_names(_read_tensors(folder, name), config, name=name)
    config = config.with_ends(own_ends(weights, config, name=name))
    network = DraftNetwork(config, name=name)
    if stored:
        _match_quantization(network, stored, weights, name)
    _check_tensors(network, weights, name)
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    computed = dtype or activation_dtype({tensor.dtype for tensor in weights.values()}, on_cpu=on_cpu)
    network.load_weights(list(weights.items()), strict=True)
    del weights
    if stored is None and (found := _count(network)) != config.num_parameters():
        raise CheckpointError(
            f"{name} has {found:,} parameters, but its config makes {config.num_parameters():,}."
        )
    if stored and bits is None and dtype is None and on_cpu:
        expand(network)
        stored = None
    _cast(network, computed)
    if bits and not stored:
        _quantize(network, bits, name)
    network.bits = stored.bits if stored else bits
    network.frequent = read_frequent(folder, name=name)
    network.eval()
    _evaluate(network, name)
    return network


def quantised(network: DraftNetwork, bits: int) -> DraftNetwork:
    """A packed copy of an unpacked network; what is not packed is shared.

    Raises:
        UsageError: rows that cannot be packed.
    """
    packed = DraftNetwork(network.config, name=network.name)
    weights: dict[str, mx.array] = dict(tree_flatten(network.parameters()))
    packed.load_weights(list(weights.items()), strict=True)
    _quantize(packed, bits, network.name)
    packed.bits, packed.frequent = bits, network.frequent
    packed.eval()
    _evaluate(packed, network.name)
    return packed


def activation_dtype(stored: set[mx.Dtype], *, on_cpu: bool) -> mx.Dtype:
    """What a network computes in unless asked otherwise: fp32 on a CPU, else as stored, but never fp16."""
    return mx.float32 if on_cpu or mx.float32 in stored else mx.bfloat16


def check_bits(bits: int | None) -> None:
    """Refuse any `draft_bits` but 4, 8 and None; before any file is read.

    Raises:
        UsageError: another value.
    """
    if bits is not None and (isinstance(bits, bool) or bits not in DRAFT_BITS):
        raise UsageError(f"draft_bits {bits}: 4, 8 or none.")


def read_config(folder: str | Path, *, name: str) -> dict[str, Any]:
    """The dictionary in a folder's `config.json`.

    Raises:
        CheckpointError: no such file, or not a JSON object.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{name} has no config.json (looked in {path.parent}).") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"The config.json of {name} cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"The config.json of {name} is not a JSON object.")
    return config


def _read_tensors(folder: Path, name: str) -> dict[str, mx.array]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{name} has no .safetensors file (looked in {folder}).")
    weights: dict[str, mx.array] = {}
    for file in files:
        try:
            tensors = mx.load(str(file))
        except RuntimeError as error:
            raise CheckpointError(f"{file.name} of {name} cannot be read: {error}") from error
        assert isinstance(tensors, dict)
        if twice := sorted(set(tensors) & set(weights)):
            raise CheckpointError(f"{name} holds the tensor {twice[0]} in two files.")
        weights.update(tensors)
    return weights


def _match_quantization(
    network: DraftNetwork, stored: Quantization, weights: Mapping[str, mx.array], name: str
) -> None:
    """Replace the layers that the file holds packed."""

    def packed(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        override = stored.overrides.get(path, True)
        return dict(override) if isinstance(override, Mapping) else bool(override)

    try:
        nn.quantize(network, stored.group_size, stored.bits, mode=stored.mode, class_predicate=packed)
    except (ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"The quantization of {name} does not fit its layers: {error}") from error


def _check_tensors(network: DraftNetwork, weights: Mapping[str, mx.array], name: str) -> None:
    wanted = dict(tree_flatten(network.parameters()))
    if missing := sorted(set(wanted) - set(weights)):
        raise CheckpointError(
            f"{name} lacks {_some(missing)}; the file is incomplete or its config is another's."
        )
    if extra := sorted(set(weights) - set(wanted)):
        raise CheckpointError(
            f"{name} holds {_some(extra)}, which its config does not ask for; it may be another kind."
        )
    for key, tensor in sorted(weights.items()):
        if tensor.shape != wanted[key].shape:
            raise CheckpointError(
                f"{name} holds {key} with shape {list(tensor.shape)}, but its config "
                f"makes {list(wanted[key].shape)}."
            )
        whole = mx.issubdtype(wanted[key].dtype, mx.integer)  # packed words, or offsets
        if not whole and not mx.issubdtype(tensor.dtype, mx.floating):
            raise UnsupportedError(
                f"{name} holds {key} as {tensor.dtype}; 16-bit and 32-bit floats are supported."
            )


def _some(keys: list[str]) -> str:
    rest = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ("the tensor " if len(keys) == 1 else "the tensors ") + ", ".join(keys[:3]) + rest


def _count(network: DraftNetwork) -> int:
    tensors = dict(tree_flatten(network.parameters())).values()
    return sum(tensor.size for tensor in tensors if mx.issubdtype(tensor.dtype, mx.floating))


def _cast(network: DraftNetwork, dtype: mx.Dtype) -> None:
    def cast(tensor: mx.array) -> mx.array:
        return tensor.astype(dtype) if mx.issubdtype(tensor.dtype, mx.floating) else tensor

    network.update(tree_map(cast, network.parameters()))


def expand(network: DraftNetwork) -> None:
    """Replace packed layers by plain ones of the same values, in place; they are lazy."""
    expanded: list[tuple[str, nn.Module]] = []
    for path, module in network.named_modules():
        if not isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            continue
        weight = mx.dequantize(
            module.weight,
            module.scales,
            module.get("biases"),
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
        )
        rows, width = weight.shape
        if isinstance(module, nn.QuantizedEmbedding):
            plain: nn.Module = nn.Embedding(rows, width)
        else:
            plain = nn.Linear(width, rows, bias="bias" in module)
            if "bias" in module:
                plain.bias = module.bias
        plain.weight = weight
        expanded.append((path, plain))
    network.update_modules(tree_unflatten(expanded))
    network.bits = None


def _quantize(network: DraftNetwork, bits: int, name: str) -> None:
    def group(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not isinstance(module, (nn.Linear, nn.Embedding)) or module.weight.shape[0] < _FEW_ROWS:
            return False
        width = module.weight.shape[1]
        for size in _GROUP_SIZES:
            if width % size == 0:
                return {"group_size": size, "bits": bits}
        raise UsageError(
            f"draft_bits {bits}: {path} of {name} has rows of {width} values, no multiple of "
            f"{_GROUP_SIZES[-1]}; leave draft_bits out."
        )

    nn.quantize(network, class_predicate=group)


def _evaluate(network: DraftNetwork, name: str) -> None:
    """Read, cast and pack one tensor after the other, so that the stored ones never lie beside all others."""
    for key, tensor in dict(tree_flatten(network.parameters())).items():
        try:
            mx.eval(tensor)
        except RuntimeError as error:
            raise CheckpointError(f"The tensor {key} of {name} cannot be read: {error}") from error
