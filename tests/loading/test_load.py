"""Two names to a loaded pair: what comes out, and what is refused before anything is loaded."""

import threading
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.errors import CheckpointError, PairError, UnsupportedError, UsageError
from dflash_mlx.loading import LoadedTarget, load, load_pair, names, registry
from tests.loading.checkpoints import TARGET, split_into_shards, write_config, write_draft, write_target
from tests.loading.hub_server import Hub


@pytest.fixture
def folders(tmp_path):
    return write_target(tmp_path / "tiny"), write_draft(tmp_path / "tiny-drafter")


@pytest.fixture
def no_weights(monkeypatch):
    """Loading weights is an error: what a test refuses, it must refuse before."""

    def loads(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("dflash_mlx.loading.checkpoint.load_target", loads)
    monkeypatch.setattr("dflash_mlx.loading.checkpoint.load_draft", loads)


def weights_of(model):
    return dict(tree_flatten(model.parameters()))


def test_local_folders_become_a_pair(folders, cpu):
    pair = load_pair(*folders, machine=cpu)
    assert (pair.target.name, pair.draft.name) == ("tiny", "tiny-drafter")
    assert (pair.thinking, pair.notes) == (None, ())
    assert pair.draft.config.target_layer_ids == (1, 2)
    arrays = [*weights_of(pair.target.model.model).values(), *weights_of(pair.draft).values()]
    assert {array.dtype for array in arrays} == {mx.float32}  # bf16 files, expanded on a CPU
    assert pair.nbytes == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtype_is_honoured_for_both(folders, cpu, dtype):
    pair = load_pair(*folders, machine=cpu, dtype=dtype)
    wanted = getattr(mx, dtype)
    assert pair.target.model.dtype == wanted
    assert {array.dtype for array in weights_of(pair.draft).values()} == {wanted}


def test_on_a_gpu_weights_stay_as_they_are_stored(folders, cpu):
    pair = load_pair(*folders, machine=replace(cpu, device="gpu", default_dtype=None))
    assert pair.target.model.dtype == mx.bfloat16


def test_shards_are_loaded(folders, cpu):
    whole = load_pair(*folders, machine=cpu)
    split_into_shards(folders[0])
    sharded = load_pair(*folders, machine=cpu)
    theirs = weights_of(sharded.target.model.model)
    assert all(
        mx.array_equal(array, theirs[name]) for name, array in weights_of(whole.target.model.model).items()
    )


def test_nothing_lazy_is_left_for_another_thread(folders, cpu):
    pair = load_pair(*folders, machine=cpu)
    sums: list[float] = []

    def use():
        arrays = [*weights_of(pair.target.model.model).values(), *weights_of(pair.draft).values()]
        sums.extend(array.tolist() and 1.0 for array in arrays)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(sums) == len(weights_of(pair.target.model.model)) + len(weights_of(pair.draft))


def test_mode_off_needs_no_drafter(folders, cpu):
    pair = load_pair(folders[0], machine=cpu, mode="off")
    assert pair.draft is None and pair.notes == ()


def test_mode_auto_without_a_known_drafter_says_so(folders, cpu):
    pair = load_pair(folders[0], machine=cpu)
    assert pair.draft is None and pair.notes == ("No drafter is known for tiny: decoding plainly.",)


def test_mode_on_without_a_known_drafter_is_refused(folders, cpu, no_weights):
    with pytest.raises(PairError, match="No drafter is known for tiny; name one with draft_model"):
        load_pair(folders[0], machine=cpu, mode="on")


@pytest.fixture
def known_pair(folders, hub: Hub, monkeypatch):
    """The registry knows the tiny folder by name; its drafter is on the loopback hub."""
    row = registry.KnownPair(alias="tiny", target="owner/tiny", draft="owner/tiny-drafter", thinking=False)
    monkeypatch.setattr(names, "PAIRS", (*registry.PAIRS, row))
    return hub.add("owner/tiny-drafter", folders[1])


def test_a_known_pair_says_the_mode_it_was_trained_for(known_pair, folders, cpu):
    pair = load_pair(folders[0], machine=cpu)
    assert pair.draft.name == "owner/tiny-drafter" and pair.thinking is False
    assert (
        load_pair(folders[0], machine=cpu, mode="off").thinking is False
    )  # the same text without the drafter


def test_mode_auto_goes_on_plainly_when_a_drafter_nobody_named_cannot_be_had(known_pair, folders, cpu):
    known_pair.error = (401, "GatedRepo")
    pair = load_pair(folders[0], machine=cpu)
    assert pair.draft is None
    assert pair.notes[-1].startswith(
        "Decoding plainly, without a drafter. The drafter owner/tiny-drafter is gated"
    )
    for options in ({"mode": "on"}, {"draft_model": "owner/tiny-drafter"}):
        with pytest.raises(Exception, match="is gated"):
            load_pair(folders[0], machine=cpu, **options)


def test_a_loaded_target_is_shared(folders, cpu):
    first = load_pair(*folders, machine=cpu)
    again = load_pair(first.target, folders[1], machine=cpu)
    assert isinstance(first.target, LoadedTarget) and again.target is first.target
    with pytest.raises(UsageError, match="the shared target tiny has mlx.core.float32"):
        load_pair(first.target, folders[1], machine=cpu, dtype="bfloat16")


def test_a_multimodal_target_is_used_for_text_and_that_is_said_once(tmp_path, cpu):
    """Content that is no text is refused with the prompt: test_tokenizer.py."""
    folder = write_target(tmp_path / "seeing", vision_config={"depth": 2}, audio_config={"depth": 2})
    first = load_pair(folder, machine=cpu, mode="off")
    assert first.notes == ("seeing was made for images and sound too; it is used for text alone.",)
    assert load_pair(first.target, machine=cpu, mode="off").notes == ()
    assert load_pair(write_target(tmp_path / "plain"), machine=cpu, mode="off").notes == ()


def packed_target(folder, cpu):
    model = load_pair(folder, machine=replace(cpu, default_dtype=None), mode="off").target.model.model
    nn.quantize(model, 32, 4)
    mx.save_safetensors(str(folder / "model.safetensors"), weights_of(model))
    write_config(folder, TARGET | {"quantization": {"group_size": 32, "bits": 4}})


def test_a_packed_target_is_what_its_file_holds_whatever_its_config_says(tmp_path, cpu):
    """mlx-lm reads bits and groups off the tensors."""
    folder, ids = write_target(tmp_path / "packed"), mx.array([[3, 1, 4, 1, 5]])
    packed_target(folder, cpu)
    right = load_pair(folder, machine=cpu, mode="off").target.model.forward(ids)
    write_config(folder, TARGET | {"quantization": {"group_size": 64, "bits": 8}})
    assert mx.array_equal(load_pair(folder, machine=cpu, mode="off").target.model.forward(ids), right)


@pytest.mark.parametrize("part", ["weight", "scales"])
def test_packed_shapes_that_no_config_makes_are_refused_by_name(tmp_path, cpu, part):
    folder = write_target(tmp_path / "packed")
    packed_target(folder, cpu)
    tensors = mx.load(str(folder / "model.safetensors"))
    name = f"model.layers.1.mlp.up_proj.{part}"
    mx.save_safetensors(str(folder / "model.safetensors"), {**tensors, name: tensors[name][:-1]})
    with pytest.raises(CheckpointError, match="packed: the weights in .* do not fit .*layers.1.mlp.up_proj"):
        load_pair(folder, machine=cpu, mode="off")


def test_a_drafter_that_does_not_fit_a_shared_target_is_refused(folders, cpu, tmp_path):
    first = load_pair(*folders, machine=cpu)
    other = write_draft(tmp_path / "other", num_target_layers=9)
    with pytest.raises(PairError, match="made for 9 target layers, the target has 4"):
        load_pair(first.target, other, machine=cpu)


def test_target_and_drafter_swapped_are_refused(folders, cpu, no_weights):
    with pytest.raises(PairError, match="tiny-drafter is a drafter, not a target"):
        load_pair(folders[1], folders[0], machine=cpu)


def test_a_model_as_drafter_is_refused(folders, cpu, tmp_path, no_weights):
    with pytest.raises(UnsupportedError, match="is not a drafter"):
        load_pair(folders[0], write_target(tmp_path / "other"), machine=cpu)


@pytest.mark.parametrize("which", [0, 1])
def test_the_same_folder_for_both_is_refused(folders, cpu, no_weights, which):
    with pytest.raises(PairError, match="Target and drafter are both|is a drafter, not a target"):
        load_pair(folders[which], folders[which], machine=cpu)


def test_a_drafter_for_another_target_is_refused(folders, cpu, tmp_path, no_weights):
    other = write_draft(tmp_path / "other", hidden_size=128, num_target_layers=36)
    with pytest.raises(
        PairError, match="hidden size 128 against 64; made for 36 target layers, the target has 4"
    ):
        load_pair(folders[0], other, machine=cpu)


def test_a_drafter_that_brings_another_tokenizer_is_refused(folders, cpu, no_weights):
    tokenizer = (folders[0] / "tokenizer.json").read_text()
    (folders[1] / "tokenizer.json").write_text(tokenizer)
    (folders[1] / "tokenizer_config.json").write_text((folders[0] / "tokenizer_config.json").read_text())
    with pytest.raises(AssertionError, match="weights were loaded"):
        load_pair(*folders, machine=cpu)  # the same tokenizer passes
    swapped = tokenizer.replace('"!"', '"~~"').replace('"a"', '"!"').replace('"~~"', '"a"')
    assert swapped != tokenizer
    (folders[1] / "tokenizer.json").write_text(swapped)
    with pytest.raises(PairError, match="was made with another tokenizer than tiny"):
        load_pair(*folders, machine=cpu)


@pytest.mark.parametrize("which", [0, 1])
def test_a_truncated_file_is_refused_before_any_weights(folders, cpu, no_weights, which):
    with (folders[which] / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(CheckpointError, match=f"{folders[which].name}.*1,000 bytes"):
        load_pair(*folders, machine=cpu)


def test_weights_that_contradict_their_config_are_refused(folders, cpu, tmp_path):
    with pytest.raises(CheckpointError, match="wrong"):
        load_pair(write_target(tmp_path / "wrong", intermediate_size=48), folders[1], machine=cpu)
    with pytest.raises(CheckpointError, match="wider"):
        load_pair(folders[0], write_draft(tmp_path / "wider", intermediate_size=48), machine=cpu)


def test_a_target_without_a_tokenizer_is_refused(folders, cpu, no_weights):
    (folders[0] / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tiny has no tokenizer"):
        load_pair(*folders, machine=cpu)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; expected one of float32, bfloat16, float16"),
        ({"draft_bits": 3}, "draft_bits 3"),
        ({"target_model": None}, "without a target_model"),
        ({"target_model": ""}, "name of the target is empty"),
    ],
)
def test_options_that_cannot_be_honoured(folders, cpu, no_weights, options, words):
    with pytest.raises(UsageError, match=words):
        load_pair(**{"target_model": folders[0], "draft_model": folders[1], "machine": cpu, **options})


def test_draft_bits_are_honoured(folders, cpu):
    packed = load_pair(*folders, machine=cpu, draft_bits=4)
    assert packed.draft.bits == 4
    assert packed.nbytes < load_pair(*folders, machine=cpu).nbytes


def test_dtypes_offered_are_those_of_mlx():
    assert {name: getattr(mx, name) for name in load.DTYPES} == load.DTYPES
