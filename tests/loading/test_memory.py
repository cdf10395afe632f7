"""How much memory a pair takes is told before it is loaded, with the sizes."""

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from dflash_mlx import runtime
from dflash_mlx.drafter import DraftConfig, Drafter, load_draft
from dflash_mlx.errors import LoadError
from dflash_mlx.loading import load_pair, memory
from dflash_mlx.loading.checkpoint import FolderCheckpoint, open_target
from dflash_mlx.loading.memory import Need, context_bytes, draft_context_bytes, packed_bytes, verdict
from dflash_mlx.loading.names import Source
from dflash_mlx.runtime import Machine
from dflash_mlx.target import caches, load_target
from tests.drafter.toys import ToyEnds, toy_config, toy_network
from tests.kit.families import family
from tests.loading.checkpoints import TARGET, split_into_shards, write_config, write_draft, write_target

MAC = Machine("gpu", "chip", 16.0, "macOS", "none", None, working_set_gb=11.5)
GB = 10**9


def checkpoint(folder: Path) -> FolderCheckpoint:
    return FolderCheckpoint(Source("T", path=folder), "target")


@pytest.mark.parametrize("dtype", [None, mx.float32, mx.bfloat16])
def test_a_folder_s_size_is_what_loading_leaves(tmp_path, dtype):
    folder = write_target(tmp_path / "target")
    loaded = load_target(folder, dtype=dtype, name="T")
    assert checkpoint(folder).held_bytes(dtype=dtype) == loaded.nbytes


@pytest.mark.parametrize("dtype", [None, mx.float32])
def test_packed_weights_are_counted_as_they_will_be_held(tmp_path, dtype):
    """As mlx-lm writes them, one matrix with a group of its own; a CPU expands them."""
    folder = write_target(tmp_path / "target")
    model = load_target(folder, dtype=None, name="T").model
    odd = {"model.layers.0.mlp.up_proj": {"group_size": 64, "bits": 8}}

    def packs(path: str, module: nn.Module) -> bool | dict[str, int]:
        return hasattr(module, "to_quantized") and odd.get(path, True)

    nn.quantize(model, 32, 4, class_predicate=packs)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    write_config(folder, TARGET | {"quantization": {"group_size": 32, "bits": 4, **odd}})
    assert checkpoint(folder).held_bytes(dtype=dtype) == load_target(folder, dtype=dtype, name="T").nbytes


@pytest.mark.parametrize("dtype", [None, mx.float32])
def test_the_bundled_file_s_size_is_known_before_it_is_expanded(dtype):
    from dflash_mlx.loading.names import bundled_gguf

    opened = open_target(Source("S", path=bundled_gguf()))
    if dtype is None:
        numbers = sum(
            2 * a.size if a.dtype == mx.float32 else a.nbytes for a in opened._model.arrays.values()
        )
        assert opened.held_bytes(dtype=None) == numbers
    else:
        assert opened.held_bytes(dtype=dtype) == 4 * 134_515_008


@pytest.mark.parametrize(
    "stored, dtype, factor",
    [
        ({"torch_dtype": "bfloat16"}, mx.float32, 2.0),
        ({"dtype": "float32"}, mx.bfloat16, 0.5),
        ({"quantization": {"bits": 4, "group_size": 64}}, mx.float32, 32 / 4.5),
        ({"quantization": {"bits": 4, "group_size": 64}}, None, 1.0),
    ],
)
def test_an_index_tells_the_size_before_the_weights_are_fetched(tmp_path, stored, dtype, factor):
    folder = write_target(tmp_path / "target")
    for shard in split_into_shards(folder):
        shard.unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"metadata": {"total_size": 9000}}))
    config = {key: value for key, value in TARGET.items() if key not in ("dtype", "torch_dtype")}
    write_config(folder, config | stored)
    assert checkpoint(folder).held_bytes(dtype=dtype) == int(9000 * factor)
    index.unlink()
    assert checkpoint(folder).held_bytes(dtype=dtype) is None


def _has_tokens(layer) -> bool:
    return hasattr(layer, "offset")


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "gemma3", "qwen3_next", "qwen3_5", "deepseek_v3"])
def test_the_context_is_counted_as_the_caches_fill(name):
    """Windows, layers without keys and latent keys included; the states of the latter hold no tokens."""
    target = family(name)
    cache = target.make_cache()
    for _ in range(16):
        target.verify(mx.arange(16), cache)
        target.settle(cache)
    arrays = [a for layer in caches.parts(cache) for _, a in tree_flatten(layer.state) if _has_tokens(layer)]
    held = sum(a.nbytes for a in arrays if isinstance(a, mx.array))
    told = context_bytes(target.config, itemsize=4, tokens=256)
    assert told is not None and 0.8 * held <= told <= 1.25 * held


def test_a_drafter_s_context_and_packed_weights_are_counted():
    network = toy_network(layer_types=["full_attention", "sliding_attention"], sliding_window=32)
    drafter = Drafter(network, ToyEnds())
    drafter.inject(mx.zeros((256, 32)), 256)
    drafter.settle()
    assert draft_context_bytes(network.config, itemsize=4, tokens=256) == 2 * (256 + 64) * 2 * 8 * 4
    assert packed_bytes(2000, 2, None) == 2000 and packed_bytes(2000, 2, 4) == 562
    assert DraftConfig.from_dict(toy_config(), name="toy").window(0) is None


def test_what_is_held_easily_is_not_spoken_of():
    assert verdict(Need(8 * GB, GB, GB), MAC, target_name="T", draft_name="D") is None


def test_above_the_working_set_is_a_note_with_the_sizes():
    note = verdict(Need(10 * GB, GB, GB), MAC, target_name="T", draft_name="D")
    assert note == (
        "The pair takes 12.0 GB (T 10.0 GB, D 1.0 GB, 4,096 tokens of context 1.0 GB); more than 11.5 GB is slow on "
        "this machine of 16.0 GB. Take a 4-bit target, draft_bits 4, or a smaller pair."
    )
    cpu = Machine("cpu", "chip", 10.0, "Linux", "BLAS", mx.float32)
    alone = verdict(Need(9 * GB, 0, None), cpu, target_name="T", draft_name=None)
    assert (
        alone
        and alone.startswith("The target takes 9.0 GB (T 9.0 GB); more than 8.0 GB")
        and "float32" in alone
    )


def test_only_what_is_more_than_memory_and_swap_is_an_error():
    over = Need(15 * GB, 2 * GB, None)
    with pytest.raises(
        LoadError, match=r"takes 17.0 GB \(T 15.0 GB, D 2.0 GB\) and this machine has 16.0 GB: it ca"
    ):
        verdict(over, MAC, target_name="T", draft_name="D")
    assert verdict(over, replace(MAC, swap_gb=4.0), target_name="T", draft_name="D")


def test_loading_says_it_and_an_impossible_pair_is_never_read(tmp_path, monkeypatch, cpu):
    target, draft = write_target(tmp_path / "target"), write_draft(tmp_path / "draft")
    parameters = sum(t.nbytes for t in memory.files.tensors(target, name="T").values()) / 2
    parameters += sum(t.nbytes for t in memory.files.tensors(draft, name="D").values()) / 2
    tight = replace(cpu, memory_gb=4 * parameters * 1.01 / GB)
    assert not [note for note in load_pair(target, draft, machine=cpu).notes if "takes" in note]
    [note] = [note for note in load_pair(target, draft, machine=tight).notes if "takes" in note]
    assert note.startswith("The pair takes") and "target" in note and "draft" in note
    monkeypatch.setattr(FolderCheckpoint, "target", lambda *_, **__: pytest.fail("the weights were read"))
    with pytest.raises(LoadError, match="it cannot be loaded"):
        load_pair(target, draft, machine=replace(cpu, memory_gb=4 * parameters * 0.9 / GB))
    assert load_draft(draft, name="D")


def test_an_impossible_target_is_refused_before_it_is_fetched(tmp_path, hub, cpu):
    folder = write_target(tmp_path / "target")
    split_into_shards(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"metadata": {"total_size": 40 * GB}}))
    repo = hub.add("owner/target", folder)
    with pytest.raises(LoadError, match="owner/target 80.0 GB"):
        load_pair("owner/target", machine=cpu, mode="off")
    assert repo is not None and not list((tmp_path / "cache").rglob("*.safetensors"))


def test_this_machine_has_memory():
    here = runtime.machine()
    assert here.swap_gb >= 0 and 0 < memory.recommended_bytes(here) <= here.memory_gb * GB
