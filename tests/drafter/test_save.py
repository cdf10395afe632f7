"""A drafter that is written and read again drafts as before."""

import json

import mlx.core as mx
import pytest

from dflash_mlx.drafter import load_draft, save_draft
from dflash_mlx.errors import UsageError
from tests.drafter.test_checkpoint import WIDE, logits
from tests.drafter.toys import toy_config, toy_network, write_toy


@pytest.fixture
def wide(tmp_path):
    return write_toy(tmp_path / "wide", toy_network(**WIDE), toy_config(**WIDE, torch_dtype="bfloat16"))


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_saved_drafter_drafts_as_before(wide, tmp_path, bits, dtype):
    network = load_draft(wide, name="wide", bits=bits, dtype=dtype)
    save_draft(network, tmp_path / "new" / "place")
    again = load_draft(tmp_path / "new" / "place", name="again", dtype=dtype)
    assert (again.bits, again.dtype) == (bits, dtype)
    assert mx.array_equal(logits(again), logits(network))


def test_a_saved_config_keeps_the_values_of_its_source_and_says_how_weights_are_packed(wide, tmp_path):
    source = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(source | {"auto_map": {"AutoModel": "dflash.Model"}}))
    save_draft(load_draft(wide, name="wide", bits=4), tmp_path / "new")
    saved = json.loads((tmp_path / "new" / "config.json").read_text())
    packed = {"group_size": 64, "bits": 4, "mode": "affine"}
    narrow = {f"layers.{i}.mlp.down_proj": packed | {"group_size": 32} for i in range(2)}
    assert saved.pop("quantization") == packed | narrow
    assert saved == source | {"torch_dtype": "float32"}


def test_weights_that_lie_in_a_folder_are_not_mixed_with_others(wide):
    with pytest.raises(UsageError, match=r"holds model\.safetensors already"):
        save_draft(load_draft(wide, name="wide"), wide)
    load_draft(wide, name="wide")


def test_an_interrupted_write_leaves_no_file_that_looks_whole(wide, tmp_path, monkeypatch):
    network = load_draft(wide, name="wide")

    def interrupted(file, weights, metadata):
        (tmp_path / "new" / "partial.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(mx, "save_safetensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_draft(network, tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
