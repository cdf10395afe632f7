"""The verifier: stock mlx-lm models, their taps, their caches, and what undoes a rejected tail."""

from dflash_mlx.target.load import build, load_target, set_dtype
from dflash_mlx.target.model import MLXTarget
from dflash_mlx.target.plain import plain_tokens

__all__ = ["MLXTarget", "build", "load_target", "plain_tokens", "set_dtype"]
