"""A drafter becomes a local folder that drafts as its source, or nothing is left behind."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.drafter import load_draft
from dflash_mlx.errors import (
    HubError,
    LoadError,
    NumericalError,
    PairError,
    UnsupportedError,
    UsageError,
    WriteError,
)
from dflash_mlx.loading import convert as room
from dflash_mlx.loading.convert import convert_draft
from tests.drafter.test_checkpoint import WIDE, packed  # noqa: F401
from tests.drafter.test_formats import KINDS, network_of, stored
from tests.drafter.toys import toy_config, toy_network, write_toy
from tests.loading.checkpoints import split_into_shards, write_draft, write_target


@pytest.fixture
def wide(tmp_path):
    """A toy with rows that can be packed, in bfloat16."""
    network = toy_network(**WIDE)
    network.set_dtype(mx.bfloat16)
    return write_toy(tmp_path / "wide", network, toy_config(**WIDE))


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def weights_of(folder: Path) -> dict[str, mx.array]:
    found = mx.load(str(folder / "model.safetensors"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_of_any_format_drafts_as_before_bit_by_bit(kind, tmp_path):
    source = stored(network_of(kind), tmp_path / "source")
    done = convert_draft(source, tmp_path / "out")
    assert (done.agreement.exact, done.agreement.max_difference, done.agreement.same_token) == (
        True,
        0.0,
        1.0,
    )
    again = load_draft(tmp_path / "out", name="out")
    assert done.parameters == again.config.num_parameters()
    assert done.agreement.compared == ("logits" if again.lm_head is not None else "hidden")
    before = dict(tree_flatten(load_draft(source, name="source").parameters()))
    after = dict(tree_flatten(again.parameters()))
    assert before.keys() == after.keys() and all(mx.array_equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("bits, most", [(8, 0.05), (4, 0.7)])
def test_packing_is_bounded_and_its_cost_is_told(wide, tmp_path, bits, most):
    done = convert_draft(wide, tmp_path / "out", bits=bits)
    assert 0 < done.agreement.relative_difference < most and not done.agreement.exact
    assert load_draft(tmp_path / "out", name="out", dtype=mx.bfloat16).bits == done.bits == bits
    assert (
        done.nbytes < done.source_nbytes
        and done.parameters == load_draft(wide, name="wide").config.num_parameters()
    )


@pytest.mark.parametrize("dtype, exact", [("float32", True), ("bfloat16", True), ("float16", False)])
def test_only_a_narrower_type_changes_numbers(wide, tmp_path, dtype, exact):
    done = convert_draft(wide, tmp_path / "out", dtype=dtype)
    assert (done.dtype, done.agreement.exact) == (dtype, exact)
    assert str(weights_of(tmp_path / "out")["norm.weight"].dtype) == f"mlx.core.{dtype}"


def test_a_file_of_two_types_is_written_in_one_that_holds_both(tmp_path):
    network = toy_network(**WIDE)
    network.set_dtype(mx.bfloat16)
    network.norm.weight = network.norm.weight.astype(mx.float16)
    done = convert_draft(write_toy(tmp_path / "mixed", network, toy_config(**WIDE)), tmp_path / "out")
    assert (done.dtype, done.agreement.exact) == ("float32", True)


def test_a_packed_file_is_kept_as_it_is_unless_16_bits_unpack_it(packed, tmp_path):  # noqa: F811
    folder, network = packed
    kept = convert_draft(folder, tmp_path / "kept")
    plain = convert_draft(folder, tmp_path / "plain", bits=16)
    assert (kept.bits, kept.agreement.exact) == (4, True)
    assert (plain.bits, plain.dtype, plain.parameters) == (None, "bfloat16", kept.parameters)
    assert plain.agreement.relative_difference < 0.05
    assert not [key for key in weights_of(tmp_path / "plain") if key.endswith("scales")]
    with pytest.raises(UsageError, match="packed to 4 bits already"):
        convert_draft(folder, tmp_path / "eight", bits=8)


def test_shards_become_one_file_and_a_tokenizer_goes_along(tmp_path):
    source = write_draft(tmp_path / "source")
    split_into_shards(source)
    shutil.copy(write_target(tmp_path / "target") / "tokenizer.json", source)
    convert_draft(source, tmp_path / "new" / "out")
    assert left(tmp_path / "new" / "out") == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_hub_id_is_fetched(hub, tmp_path):
    hub.add("owner/draft", write_draft(tmp_path / "draft"))
    done = convert_draft("owner/draft", tmp_path / "out")
    assert done.source == "owner/draft" and done.agreement.exact
    with pytest.raises(HubError, match="owner/other"):
        convert_draft("owner/other", tmp_path / "none")


def test_what_is_done_is_told_in_order(wide, tmp_path):
    said: list[str] = []
    convert_draft(wide, tmp_path / "out", say=said.append)
    assert [text.split()[0] for text in said] == ["Reading", "Writing", "Reading"]


@pytest.mark.parametrize(
    "options, says",
    [
        ({"bits": 3}, "bits is 3; expected 4, 8 or 16"),
        ({"bits": True}, "bits is True"),
        ({"dtype": "int8"}, "dtype is 'int8'; expected one of"),
        ({"bits": 16, "dtype": "float32"}, "leave one of them out"),
    ],
)
def test_options_are_refused_before_anything_is_looked_for(tmp_path, options, says):
    with pytest.raises(UsageError, match=says):
        convert_draft(tmp_path / "nowhere", tmp_path / "out", **options)


def test_a_target_and_an_unknown_architecture_are_refused_by_name(tmp_path):
    with pytest.raises(PairError, match="Qwen3-8B is a target, not a drafter"):
        convert_draft("Qwen3-8B", tmp_path / "out")
    with pytest.raises(UnsupportedError, match="is not a drafter; give it as the target"):
        convert_draft(write_target(tmp_path / "target"), tmp_path / "out")
    other = write_draft(tmp_path / "other", architectures=["EagleDraftModel"])
    with pytest.raises(UnsupportedError, match="'EagleDraftModel'"):
        convert_draft(other, tmp_path / "out")
    with pytest.raises(LoadError, match="is no folder on this machine"):
        convert_draft(tmp_path / "nowhere", tmp_path / "out")
    assert left(tmp_path) == ["other", "target"]


def test_what_lies_in_the_folder_is_kept_without_force(wide, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    convert_draft(wide, out)
    written = (out / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(UsageError, match=r"is not empty \(it holds config.json\)"):
        convert_draft(wide, out, bits=4)
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    assert convert_draft(wide, out, bits=4, force=True).bits == 4
    assert load_draft(out, name="out", dtype=mx.float32).bits == 4 and left(tmp_path) == ["out", "wide"]


def test_force_replaces_nothing_but_a_drafter(wide, tmp_path):
    (tmp_path / "mine" / "photos").mkdir(parents=True)
    with pytest.raises(UsageError, match="is no drafter's folder"):
        convert_draft(wide, tmp_path / "mine", force=True)
    shutil.copy(wide / "config.json", tmp_path / "mine")
    with pytest.raises(UsageError, match="is no drafter's folder"):
        convert_draft(wide, tmp_path / "mine", force=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        convert_draft(wide, tmp_path / "file", force=True)
    with pytest.raises(UsageError, match="the drafter's own folder"):
        convert_draft(wide, wide, force=True)
    assert (tmp_path / "mine" / "photos").is_dir() and load_draft(wide, name="wide")


Usage = namedtuple("Usage", "total used free")


def test_a_disk_without_room_is_told_before_writing(wide, tmp_path, monkeypatch):
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: Usage(10, 10, 0))
    with pytest.raises(WriteError, match="its disk has 0.00 GB left"):
        convert_draft(wide, tmp_path / "deep" / "out")
    assert left(tmp_path) == ["wide"]


def test_a_file_cut_off_by_a_full_disk_is_not_kept(wide, tmp_path, monkeypatch):
    """MLX's writer does not report every write that failed."""

    def cut(network, folder):
        room_save(network, folder)
        file = folder / "model.safetensors"
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 100)

    room_save = room.save_draft
    convert_draft(wide, tmp_path / "out")
    monkeypatch.setattr(room, "save_draft", cut)
    with pytest.raises(WriteError, match="is the disk full"):
        convert_draft(wide, tmp_path / "out", bits=4, force=True)
    assert left(tmp_path) == ["out", "wide"]
    assert load_draft(tmp_path / "out", name="out").bits is None


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("no file"), KeyboardInterrupt()]
)
def test_an_interrupted_write_leaves_nothing(wide, tmp_path, monkeypatch, error):
    def fail(network, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(room, "save_draft", fail)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else WriteError):
        convert_draft(wide, tmp_path / "out")
    assert left(tmp_path) == ["wide"]


def test_tensors_that_read_back_changed_are_not_kept(wide, tmp_path, monkeypatch):
    def spoil(network, folder):
        room_save(network, folder)
        weights = weights_of(folder)
        mx.eval(weights)
        weights["norm.weight"] = weights["norm.weight"] + 1
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})

    room_save = room.save_draft
    monkeypatch.setattr(room, "save_draft", spoil)
    with pytest.raises(WriteError, match="norm.weight differs"):
        convert_draft(wide, tmp_path / "out")
    assert left(tmp_path) == ["wide"]


def test_a_config_that_drafts_otherwise_is_not_kept(wide, tmp_path, monkeypatch):
    """The tensors are right and the rotation is another: only what is drafted shows it."""

    def turn(network, folder):
        room_save(network, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 10.0}))

    room_save = room.save_draft
    monkeypatch.setattr(room, "save_draft", turn)
    with pytest.raises(WriteError, match="where nothing was to change"):
        convert_draft(wide, tmp_path / "out")
    assert left(tmp_path) == ["wide"]


def test_widths_that_cannot_be_packed_are_named(tmp_path):
    source = write_toy(tmp_path / "source", toy_network(), toy_config())
    with pytest.raises(
        UsageError, match="bits 4: .* has rows of 16 values, no multiple of 32; leave bits out"
    ):
        convert_draft(source, tmp_path / "out", bits=4)
    assert left(tmp_path) == ["source"]


def test_numbers_beyond_float16_are_refused(tmp_path):
    network = toy_network(**WIDE)
    network.norm.weight = network.norm.weight * 1e6
    source = write_toy(tmp_path / "source", network, toy_config(**WIDE))
    with pytest.raises(NumericalError, match="give bfloat16 or float32"):
        convert_draft(source, tmp_path / "out", dtype="float16")
    assert left(tmp_path) == ["source"]
