"""A loaded draft network in, a local folder out that `load_draft` reads again to the same network.

The config is the one the network was read from, so that its format is recognised again; tensors lie under the
names of the network's own modules, packed ones in MLX's layout. Knows no hub and no target.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx.drafter.network import DraftNetwork
from dflash_mlx.errors import UsageError

# `auto_map` names Python files that are not written; the rest speaks of how the weights were stored before.
_DROPPED = ("auto_map", "quantization", "quantization_config")


def save_draft(network: DraftNetwork, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors`; the network, packed or not, is saved as it is held.

    Args:
        network: evaluated, as `load_draft` returns it.
        folder: made if need be; may not hold weights yet.

    Raises:
        UsageError: the folder holds weights already.
        OSError: the files cannot be written.
    """
    folder = Path(folder)
    if there := sorted(folder.glob("*.safetensors")):
        raise UsageError(f"{folder} holds {there[0].name} already; give a folder without weights.")
    folder.mkdir(parents=True, exist_ok=True)
    weights: dict[str, mx.array] = dict(tree_flatten(network.parameters()))
    # Written under another name first: a file called model.safetensors is complete.
    partial, whole = folder / "partial.safetensors", folder / "model.safetensors"
    try:
        mx.save_safetensors(str(partial), weights, metadata={"format": "mlx"})
        partial.rename(whole)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    text = json.dumps(_config(network), indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _config(network: DraftNetwork) -> dict[str, Any]:
    config = {key: value for key, value in network.config.source.items() if key not in _DROPPED}
    stored_as = {"dtype", "torch_dtype"} & config.keys() or {"dtype"}
    config |= {key: str(network.dtype).removeprefix("mlx.core.") for key in stored_as}
    if packed := _quantization(network):
        config["quantization"] = packed
    return config


def _quantization(network: DraftNetwork) -> dict[str, Any] | None:
    """The section of mlx-lm's own files: what most layers have, then the layers that have something else."""
    layers = {
        path: {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        for path, module in network.named_modules()
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding))
    }
    if not layers:
        return None
    ((common, _),) = Counter(tuple(layer.items()) for layer in layers.values()).most_common(1)
    usual = dict(common)
    return usual | {path: layer for path, layer in layers.items() if layer != usual}
