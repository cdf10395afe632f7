"""An mlx-lm folder, or a config, to a model with its weights evaluated in the type asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, dequantize_model, load_model

from dflash_mlx.errors import CheckpointError, UnsupportedError
from dflash_mlx.target.model import MLXTarget


def load_target(
    folder: Path,
    *,
    dtype: mx.Dtype | None,
    name: str,
    kv_bits: int | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> MLXTarget:
    """Load an mlx-lm model folder.

    Args:
        folder: `config.json` and `model*.safetensors`, checked before.
        dtype: type of weights and activations; None keeps them as stored, quantised ones included.
        name: what messages call it.
        kv_bits: 4 or 8 quantises keys and values, see `MLXTarget`.
        on_bytes: told how many bytes of weights are there, after each tensor.

    Raises:
        UsageError: for other `kv_bits`.
        UnsupportedError: for a model type that mlx-lm does not know, or a state that cannot be undone.
        CheckpointError: for weights that do not fit their config.
    """
    try:
        model, config = load_model(folder, lazy=True)
    except ValueError as error:
        if "not supported" in str(error):
            raise UnsupportedError(f"{name}: mlx-lm knows no model of this type ({error})") from error
        raise CheckpointError(
            f"{name}: the weights in {folder} do not fit their config.json: {_one_line(error)}"
        ) from error
    except KeyError as error:
        raise CheckpointError(f"{name}: config.json in {folder} lacks {error}.") from error
    except TypeError as error:
        raise CheckpointError(f"{name}: config.json in {folder} does not make a model: {error}.") from error
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{name}: {folder} has no config.json with model*.safetensors beside it ({error})."
        ) from error
    # A Dtype cannot be compared with None.
    if dtype is not None and dtype == mx.float32 and "quantization" in config:
        # Quantised products are slow on a CPU, where fp32 is the default: expand.
        dequantize_model(model)
    set_dtype(model, dtype, on_bytes)
    return MLXTarget(model, config, name, kv_bits=kv_bits)


def build(config: dict[str, Any]) -> nn.Module:
    """An mlx-lm model of this config with random weights, to load others into."""
    model_class, args_class = _get_classes(config)
    model: nn.Module = model_class(args_class.from_dict(config))
    return model


def set_dtype(
    model: nn.Module, dtype: mx.Dtype | None, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Evaluate the weights one by one, floating ones as `dtype`, so that no two copies of the whole exist.

    Those that the model itself keeps from being cast, such as the decay of a recurrence, stay as they are. Between
    two of them a Ctrl-C is answered.
    """
    done = 0
    may_cast: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _: True)
    names: list[str] = [entry[0] for entry in tree_flatten(model.parameters())]
    for name in names:
        *path, leaf = name.split(".")
        owner: Any = model
        for step in path:
            owner = owner[int(step)] if isinstance(owner, list) else owner[step]
        array = owner[leaf]
        if dtype is not None and mx.issubdtype(array.dtype, mx.floating) and may_cast(name):
            array = owner[leaf] = array.astype(dtype)
        mx.eval(array)
        done += array.nbytes
        if on_bytes:
            on_bytes(done)


def _one_line(error: ValueError, most: int = 300) -> str:
    """Mlx lists tensors one a line, all of them."""
    text = " ".join(str(error).split())
    return text if len(text) <= most else f"{text[:most]} ..."
