"""Rotary positions of the draft: scaling keys of a config in, rotated queries and keys out.

The draft rotates its whole head, half-split, by its own config; it never takes the target's rotation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from dflash_mlx.errors import CheckpointError, UnsupportedError

_KINDS = ("default", "linear", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base and scaling of the rotation; keys are those of Transformers' rope parameters."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, name: str) -> "RopeConfig":
        """Read the rotation from a `config.json`: top-level theta, `rope_parameters` or `rope_scaling`.

        Raises:
            UnsupportedError: a kind of scaling that is not known here.
            CheckpointError: no theta, or a scaling without its numbers.
        """
        parameters = config.get("rope_parameters") or {}
        scaling = config.get("rope_scaling") or {}
        theta = config.get("rope_theta") or parameters.get("rope_theta") or scaling.get("rope_theta")
        if any(isinstance(value, Mapping) for value in parameters.values()):
            raise UnsupportedError(
                f"{name} has another rotation for each type of layer; one for all is supported."
            )
        if config.get("rope_is_neox_style") is False:
            raise UnsupportedError(
                f"{name} rotates neighbouring values in pairs (rope_is_neox_style is false); "
                "rotation of the two halves of a head is supported."
            )
        if theta is None:
            raise CheckpointError(
                f"The config of {name} has no rope_theta (top level, rope_parameters or rope_scaling)."
            )
        section = scaling if _kind(scaling) != "default" else parameters
        kind = _kind(section)
        if kind not in _KINDS:
            raise UnsupportedError(f"{name} uses rope scaling {kind!r}; supported are {', '.join(_KINDS)}.")
        if section.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedError(
                f"{name} rotates only a part of each head; a DFlash drafter rotates all of it."
            )
        original = section.get("original_max_position_embeddings")
        if kind in ("yarn", "llama3") and original is None:
            original = config.get("max_position_embeddings")
        factor = section.get("factor")
        if kind == "yarn" and factor is None and original and config.get("max_position_embeddings"):
            factor = config["max_position_embeddings"] / original
        if kind != "default" and (factor is None or (kind != "linear" and original is None)):
            raise CheckpointError(f"The config of {name} asks for {kind} rope scaling without its factor.")
        optional = {
            key: section[key]
            for key in ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor")
            + ("low_freq_factor", "high_freq_factor")
            if section.get(key) is not None
        }
        return cls(
            theta=float(theta),
            kind=kind,
            factor=float(factor or 1.0),
            original_max_positions=original,
            **optional,
        )

    def amplitude(self) -> float:
        """What YaRN multiplies queries and keys with, each; 1.0 for the other kinds.

        Transformers' rule: an explicit `attention_factor`, else the ratio of both mscales, else
        0.1 ln(factor) + 1.
        """
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return float(self.attention_factor)

        def grown(mscale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return grown(self.mscale) / grown(self.mscale_all_dim)
        return grown(1.0)

    def wavelengths(self, dims: int) -> list[float]:
        """Positions per radian of each of the dims/2 pairs; the inverse of Transformers' `inv_freq`."""
        plain = [float(self.theta ** (2 * pair / dims)) for pair in range(dims // 2)]
        if self.kind == "linear":
            return [self.factor * length for length in plain]
        if self.kind == "yarn":
            return self._yarn(plain, dims)
        if self.kind == "llama3":
            return [self._llama3(length) for length in plain]
        return plain

    def _yarn(self, plain: list[float], dims: int) -> list[float]:
        """YaRN (2309.00071), section 3.2: slow pairs are stretched by the factor, fast ones are not."""
        assert self.original_max_positions is not None
        original = self.original_max_positions

        def pair_that_turns(times: float) -> float:
            return dims * math.log(original / (times * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        span = high - low if high != low else 0.001
        lengths = []
        for pair, length in enumerate(plain):
            stretched = min(max((pair - low) / span, 0.0), 1.0)
            lengths.append(1 / (stretched / (self.factor * length) + (1 - stretched) / length))
        return lengths

    def _llama3(self, length: float) -> float:
        """Llama 3.1's rule: long waves are stretched, short ones kept, those between mixed."""
        assert self.original_max_positions is not None
        turns = self.original_max_positions / (2 * math.pi * length)
        if turns < self.low_freq_factor:
            return self.factor * length
        if turns > self.high_freq_factor:
            return length
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return length / ((1 - kept) / self.factor + kept)


class Rope:
    """Rotates [1, H, S, hd]; the amplitude is left to the attention scale, where it costs nothing."""

    def __init__(self, config: RopeConfig, dims: int) -> None:
        self.dims = dims
        self.amplitude = config.amplitude()
        # The rotation in radians per position, float32 [dims / 2], for the kernels.
        self.inverse_frequencies = mx.array(
            [1 / length for length in config.wavelengths(dims)], dtype=mx.float32
        )
        self._theta = config.theta if config.kind == "default" else None
        self._wavelengths = None if self._theta else mx.array(config.wavelengths(dims), dtype=mx.float32)

    def __call__(self, rows: mx.array, *, offset: int | mx.array) -> mx.array:
        """Rotate rows that stand at positions offset, offset + 1, ...; an array [1st axis] gives each its own."""
        return mx.fast.rope(
            rows,
            self.dims,
            traditional=False,
            base=self._theta,
            scale=1.0,
            offset=offset,
            freqs=self._wavelengths,
        )


def _kind(section: Mapping[str, Any]) -> str:
    return str(section.get("rope_type") or section.get("type") or "default")
