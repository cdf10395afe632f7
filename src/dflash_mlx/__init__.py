"""DFlash speculative decoding on MLX."""

from dflash_mlx import runtime

runtime.prepare()
