"""What a drafter format is: a config and tensor names in, the v1 shape of both and the extra parts out.

A format knows dictionaries and names; it builds no network and reads no file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_mlx.drafter.parts import Parts
from dflash_mlx.errors import CheckpointError, UnsupportedError

Config = Mapping[str, Any]


def as_is(config: Config, name: str) -> Config:
    """A config whose keys lie where v1 has them."""
    return config


def same_name(path: str) -> tuple[str, ...]:
    """A module that is called as in v1."""
    return (path,)


def without_prefix(path: str) -> tuple[str, ...]:
    """A module that some files put below `model.`."""
    return (path.removeprefix("model."),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way to write a drafter down."""

    title: str  # for messages: "a ... drafter"
    architectures: tuple[str, ...]
    model_types: tuple[str, ...] = ()  # tell the format where no architecture, or only v1's, is named
    knows: frozenset[str] = frozenset()  # keys of `FOREIGN` that mean what this format expects
    taps_embedding: bool = False  # layer id -1 means the embedded token
    own_ends: bool = False  # an embedding or head in the file is what the drafter uses
    ignores: frozenset[str] = frozenset()  # tensors in some files that drafting does not need
    flatten: Callable[[Config, str], Config] = as_is  # config, drafter's name -> config in the shape of v1
    parts: Callable[[Config, str], Parts] = lambda config, name: Parts()  # of a flat config
    # A stored module's path -> its path in the network; several: their rows are stacked in this order.
    paths: Callable[[str], tuple[str, ...]] = same_name


def either(config: Config, key: str) -> Any:
    """A value that lies in `dflash_config` or at the top level."""
    value = (config.get("dflash_config") or {}).get(key)
    return config.get(key) if value is None else value


def count(config: Config, key: str, name: str, *, least: int = 1) -> int:
    """A whole number in `dflash_config` or at the top level.

    Raises:
        CheckpointError: no such value, or another kind of value.
    """
    return checked_count(either(config, key), key, name, least=least)


def checked_count(value: Any, key: str, name: str, *, least: int = 1) -> int:
    """The value, if it is a whole number of at least `least`.

    Raises:
        CheckpointError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        found = "no value" if value is None else repr(value)
        raise CheckpointError(
            f"The config of {name} has {found} for {key}; a whole number of {least} or more is needed."
        )
    return value


def refuse(name: str, what: str) -> UnsupportedError:
    """The error for a drafter that is known by name and not supported."""
    return UnsupportedError(f"{name} is {what}, which this version does not support.")
