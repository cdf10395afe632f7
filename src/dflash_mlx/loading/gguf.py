"""A GGUF file of a Llama-like model -> mlx-lm config, weights under mlx-lm names, and the tokenizer it carries.

Knows the file format as `mx.load` gives it and nothing of models: the caller builds the module and loads the
weights. Kept small on purpose: it reads the `llama` architecture with a byte-level BPE tokenizer, which is
what the bundled target is; other files are refused by name.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_mlx.errors import CheckpointError, UnsupportedError

MAGIC = b"GGUF"
GROUP_SIZE = 32  # of every block format that mx.load keeps packed
CONTROL_TOKEN = 3  # token_type of a special token

LAYER_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(slots=True)
class GGUFModel:
    """One file, read; `weights` empties `arrays` as it goes, so that no tensor is held twice."""

    config: dict[str, Any]  # as mlx-lm's llama wants it, with per-tensor `quantization` when packed
    metadata: dict[str, Any]
    arrays: dict[str, mx.array]  # under the names of the file

    def weights(self, *, dtype: mx.Dtype | None) -> Iterator[tuple[str, mx.array]]:
        """Evaluated weights under mlx-lm names; each leaves `arrays` when it is given out.

        Args:
            dtype: None keeps packed tensors packed with their 16-bit scales; any other expands them, one
                tensor at a time, to that dtype.
        """
        for name in [n for n in self.arrays if n.endswith(".weight")]:
            stem = name.removesuffix(".weight")
            parts = {
                key: self.arrays.pop(f"{stem}.{key}")
                for key in ("weight", "scales", "biases")
                if f"{stem}.{key}" in self.arrays
            }
            if heads := self._heads_of(stem):
                parts = {key: half_split_rows(value, heads) for key, value in parts.items()}
            if dtype is None:
                given = {k: v.astype(mx.float16) if v.dtype == mx.float32 else v for k, v in parts.items()}
            else:
                given = {"weight": expand(parts).astype(dtype)}
            mx.eval(given)
            del parts
            for key, value in given.items():
                yield f"{mlx_name(stem)}.{key}", value

    def held_bytes(self, *, dtype: mx.Dtype | None) -> int:
        """Bytes of what `weights` will give out."""
        if dtype is None:
            return sum(2 * a.size if a.dtype == mx.float32 else a.nbytes for a in self.arrays.values())
        numbers = 0
        for name in (n for n in self.arrays if n.endswith(".weight")):
            scales = self.arrays.get(f"{name.removesuffix('.weight')}.scales")
            numbers += self.arrays[name].size if scales is None else scales.size * GROUP_SIZE
        return numbers * dtype.size

    def _heads_of(self, stem: str) -> int | None:
        if stem.endswith("attn_q"):
            return int(self.config["num_attention_heads"])
        if stem.endswith("attn_k"):
            return int(self.config["num_key_value_heads"])
        return None

    def tokenizer(self) -> TokenizerWrapper:
        """The tokenizer rebuilt from the metadata, chat template included."""
        return build_tokenizer(self.metadata)


def read(path: Path, *, name: str) -> GGUFModel:
    """Read a GGUF file whole (still packed).

    Raises:
        CheckpointError: no GGUF file, or one that breaks off.
        UnsupportedError: another architecture or tokenizer than this room reads.
    """
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != MAGIC:
        raise CheckpointError(
            f"{path.name} of {name} is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}."
        )
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} of {name} is truncated or broken ({path.stat().st_size:,} bytes); fetch it again. {error}"
        ) from error
    arrays, metadata = loaded
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedError(
            f"{name} ({path.name}) holds the architecture {architecture!r}; from GGUF only 'llama' is read. "
            "Give the safetensors repository of the model instead."
        )
    try:
        return GGUFModel(_config(metadata, arrays), metadata, arrays)
    except KeyError as error:
        raise CheckpointError(f"{path.name} of {name} lacks {error}, which a Llama model needs.") from error


def _config(metadata: dict[str, Any], arrays: dict[str, mx.array]) -> dict[str, Any]:
    def value(key: str) -> Any:
        found = metadata[f"llama.{key}"]
        return found.item() if isinstance(found, mx.array) else found

    tied = "output.weight" not in arrays
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": value("embedding_length"),
        "num_hidden_layers": value("block_count"),
        "intermediate_size": value("feed_forward_length"),
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("rope.dimension_count"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"),
        "max_position_embeddings": value("context_length"),
        "vocab_size": arrays["token_embd.weight"].shape[0],
        "tie_word_embeddings": tied,
    }
    packed = {}
    for name in arrays:
        if name.endswith(".scales"):
            stem = name.removesuffix(".scales")
            columns = arrays[name].shape[1] * GROUP_SIZE
            bits = arrays[f"{stem}.weight"].shape[1] * 32 // columns
            packed[mlx_name(stem)] = {"group_size": GROUP_SIZE, "bits": bits}
    if packed:
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": 4, **packed}
    return config


def mlx_name(stem: str) -> str:
    """`blk.3.attn_q` -> `model.layers.3.self_attn.q_proj`."""
    if stem in TOP_PARTS:
        return TOP_PARTS[stem]
    kind, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if kind != "blk" or part not in LAYER_PARTS:
        raise UnsupportedError(f"The GGUF file has a tensor {stem!r} that a Llama model does not have.")
    return f"model.layers.{layer}.{LAYER_PARTS[part]}"


def half_split_rows(rows: mx.array, heads: int) -> mx.array:
    """Rows [heads*hd, ...] of q or k from interleaved back to half-split rotation.

    The file stores row 2j+s of a head where the model has row s*(hd/2)+j, because its own runtime rotates
    neighbouring pairs; whole rows move, so packed rows, scales and biases move alike.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return mx.contiguous(pairs.swapaxes(1, 2).reshape(rows.shape))


def expand(parts: dict[str, mx.array]) -> mx.array:
    """A tensor as float32, unpacked when it is packed."""
    weight = parts["weight"]
    if "scales" not in parts:
        return weight.astype(mx.float32)
    scales, biases = (parts[key].astype(mx.float32) for key in ("scales", "biases"))
    bits = weight.shape[1] * 32 // (scales.shape[1] * GROUP_SIZE)
    return mx.dequantize(weight, scales, biases, group_size=GROUP_SIZE, bits=bits)


def build_tokenizer(metadata: dict[str, Any]) -> TokenizerWrapper:
    """Byte-level BPE with the tokens, merges, special tokens and chat template of the metadata.

    Raises:
        UnsupportedError: another kind of tokenizer, or another way to cut text before merging.
    """
    kind, cut = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if (kind, cut) != ("gpt2", "smollm"):
        raise UnsupportedError(
            f"The GGUF file has a tokenizer of kind {kind!r} cut by {cut!r}; only 'gpt2' cut by 'smollm' "
            "is read. Give the safetensors repository of the model instead."
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"].tolist()
    specials = [token for token, type_ in zip(tokens, types, strict=True) if type_ == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    named = {
        key: tokens[int(metadata[f"tokenizer.ggml.{role}_token_id"].item())]
        for key, role in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("pad_token", "padding"),
            ("unk_token", "unknown"),
        )
        if f"tokenizer.ggml.{role}_token_id" in metadata
    }
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **named,
    )
    return TokenizerWrapper(fast, BPEStreamingDetokenizer, eos_token_ids=[fast.eos_token_id])
