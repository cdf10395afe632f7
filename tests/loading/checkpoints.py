"""Tiny checkpoints on disk, as a hub would serve them: a random Qwen3 target with a tokenizer, and a drafter for it."""

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash_mlx.drafter import DraftConfig, DraftNetwork
from tests.kit.models import CONFIGS, tiny_target
from tests.kit.tokenizers import build_bpe

VOCAB = 320  # rows of the embedding; the tokenizer has fewer
TARGET = {
    **CONFIGS["qwen3"],
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "eos_token_id": 7,
}
DRAFT = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "block_size": 8,
    "num_target_layers": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [1, 2]},
}


def write_target(folder: Path, **changes: Any) -> Path:
    """A target folder; `changes` go to its config alone, the weights stay."""
    shutil.copytree(_made("target").name, folder, dirs_exist_ok=True)
    write_config(folder, {**TARGET, **changes})
    return folder


def write_wide_target(folder: Path, **changes: Any) -> Path:
    """A target like it whose heads are 32 wide, as wide as those that can be quantised."""
    shutil.copytree(_made("wide").name, folder, dirs_exist_ok=True)
    write_config(folder, {**TARGET, "head_dim": 32, **changes})
    return folder


def write_draft(folder: Path, **changes: Any) -> Path:
    """A drafter folder for `write_target`'s target; `changes` go to its config alone, the weights stay."""
    shutil.copytree(_made("draft").name, folder, dirs_exist_ok=True)
    write_config(folder, {**DRAFT, **changes})
    return folder


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def split_into_shards(folder: Path) -> list[Path]:
    """Replace model.safetensors by two shards and their index."""
    tensors = mx.load(str(folder / "model.safetensors"))
    names = sorted(tensors)
    halves = {"1": names[: len(names) // 2], "2": names[len(names) // 2 :]}
    weight_map = {}
    for number, part in halves.items():
        shard = f"model-0000{number}-of-00002.safetensors"
        mx.save_safetensors(str(folder / shard), {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sorted(folder.glob("model-*.safetensors"))


@cache
def _made(kind: str) -> "TemporaryDirectory[str]":
    """Made once a test run and removed with it."""
    made = TemporaryDirectory(prefix=f"dflash-{kind}-")
    folder = Path(made.name)
    if kind in ("target", "wide"):
        head_dim = 32 if kind == "wide" else 16
        model = tiny_target("qwen3", vocab_size=VOCAB, dtype=mx.bfloat16, head_dim=head_dim).model
        tokenizer = build_bpe(vocab_size=300)
        assert len(tokenizer) <= VOCAB
        tokenizer.save_pretrained(folder)
    else:
        mx.random.seed(3)
        model = DraftNetwork(DraftConfig.from_dict(DRAFT, name="tiny"), name="tiny")
        model.set_dtype(mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return made
