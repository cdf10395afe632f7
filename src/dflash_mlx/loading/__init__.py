"""Names -> files -> a loaded pair: registry, hub, pair checks, safetensors, GGUF, tokenizers."""

from dflash_mlx.loading.history import answer_ids, render_history
from dflash_mlx.loading.load import LoadedPair, LoadedTarget, find_target, load_pair, weight_bytes
from dflash_mlx.loading.memory import recommended_bytes
from dflash_mlx.loading.names import default_pair
from dflash_mlx.loading.registry import PAIRS, KnownPair
from dflash_mlx.loading.tokenizer import encode_raw, has_template, render
from dflash_mlx.loading.vocabulary import by_frequency

__all__ = [
    "PAIRS",
    "KnownPair",
    "LoadedPair",
    "LoadedTarget",
    "answer_ids",
    "by_frequency",
    "default_pair",
    "encode_raw",
    "find_target",
    "has_template",
    "load_pair",
    "recommended_bytes",
    "render",
    "render_history",
    "weight_bytes",
]
