"""Checkpoint files that are truncated, missing, pointers or nonsense: each named, with its numbers, before any load."""

import json
import struct

import mlx.core as mx
import pytest

from dflash_mlx.errors import CheckpointError
from dflash_mlx.loading.files import check_weights, complete, read_json
from tests.loading.checkpoints import split_into_shards, write_target

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    return write_target(tmp_path / "model")


def refused(folder):
    with pytest.raises(CheckpointError) as caught:
        check_weights(folder, name="Tiny")
    assert "Tiny" in str(caught.value)
    return str(caught.value)


def test_whole_files_pass_and_are_counted(folder):
    size = (folder / WEIGHTS).stat().st_size
    assert check_weights(folder, name="Tiny") == size
    split_into_shards(folder)
    assert check_weights(folder, name="Tiny") == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize("lost", [1, 1000])
def test_a_truncated_file_is_refused_with_both_sizes(folder, lost):
    size = (folder / WEIGHTS).stat().st_size
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate(size - lost)
    message = refused(folder)
    assert WEIGHTS in message and f"{size - lost:,} bytes, {size:,} expected" in message


def test_a_file_cut_inside_its_header(folder):
    with (folder / WEIGHTS).open("r+b") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        file.truncate(100)
    assert f"100 bytes, at least {8 + length:,} expected" in refused(folder)


def test_a_file_with_bytes_after_its_end(folder):
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"more")
    assert "has bytes after its end" in refused(folder)


def test_a_git_lfs_pointer(folder):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 16381470720\n"
    (folder / WEIGHTS).write_text(pointer)
    message = refused(folder)
    assert "Git LFS pointer" in message and "16381470720" in message and str(len(pointer)) in message


@pytest.mark.parametrize("content", [b"<html>not found</html>" * 10, b"\x80\x02}q\x00" * 50, b"abc"])
def test_bytes_that_are_no_safetensors(folder, content):
    (folder / WEIGHTS).write_bytes(content)
    assert "is not a safetensors file" in refused(folder)


def test_an_empty_file(folder):
    (folder / WEIGHTS).write_bytes(b"")
    assert "is empty (0 bytes)" in refused(folder)


def test_a_header_that_is_no_json(folder):
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 10) + b"{not json}" + b"data")
    assert "header that is not readable" in refused(folder)


def test_no_weights_at_all(folder):
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").touch()
    assert "only safetensors are read" in refused(folder)


def test_a_shard_that_the_index_names_and_the_folder_lacks(folder):
    first, second = split_into_shards(folder)
    second.unlink()
    message = refused(folder)
    assert second.name in message and "its index names 2 files" in message and "holds 1" in message


def test_a_tensor_that_the_index_places_in_a_shard_without_it(folder):
    first, _ = split_into_shards(folder)
    tensors = mx.load(str(first))
    lost = sorted(tensors)[0]
    del tensors[lost]
    mx.save_safetensors(str(first), tensors)
    message = refused(folder)
    assert lost in message and first.name in message


@pytest.mark.parametrize("index", ['{"weight_map": {}}', "{}", "[1]", "{broken"])
def test_an_index_that_says_nothing(folder, index):
    (folder / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refused(folder)


def test_the_weights_are_not_read(folder, monkeypatch):
    """A file of 40 GB of zeros, none of them on the disk, is checked at once."""
    length = 40 * 10**9
    header = json.dumps({"w": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + length)
    assert check_weights(folder, name="Tiny") == 8 + len(header) + length


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no config.json"),
        (b"{broken", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b"[1, 2]", "holds a JSON list, expected an object"),
        (b"version https://git-lfs.github.com/spec/v1\nsize 12\n", "Git LFS pointer"),
    ],
)
def test_a_config_that_cannot_be_used(folder, content, words):
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_json(folder / "config.json", name="Tiny")
    assert "Tiny" in str(caught.value) and "config.json" in str(caught.value)


def test_complete_tells_whole_folders_from_parts(folder):
    assert complete(folder, tokenizer=True)
    first, second = split_into_shards(folder)
    assert complete(folder, tokenizer=True)
    second.unlink()
    assert not complete(folder, tokenizer=True)
