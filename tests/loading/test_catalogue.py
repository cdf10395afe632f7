"""What there is to load is told from what is here; nothing is fetched."""

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from huggingface_hub import constants

from dflash_mlx.errors import CheckpointError, LoadError, PairError
from dflash_mlx.loading import catalogue
from dflash_mlx.loading.catalogue import known_pairs, target_report
from dflash_mlx.loading.registry import KnownPair
from dflash_mlx.runtime import Machine
from tests.kit.families import FAMILIES
from tests.loading.checkpoints import split_into_shards, write_config, write_draft, write_target

MAC = Machine("gpu", "chip", 16.0, "macOS", "none", None, working_set_gb=12.0)
GB = 10**9


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of the hub, and no network."""

    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tmp_path / "cache"


def put(cache: Path, repo: str, folder: Path, *, weights: bool = True) -> Path:
    """A folder as the hub's client lays a repository down; gives the snapshot."""
    place = cache / f"models--{repo.replace('/', '--')}"
    snapshot = place / "snapshots" / ("a" * 40)
    shutil.copytree(folder, snapshot)
    (place / "blobs").mkdir()
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("a" * 40)
    if not weights:
        for file in snapshot.glob("*.safetensors"):
            file.unlink()
    return snapshot


def give_words(target: Path, draft: Path) -> None:
    """Let a drafter bring its target's tokenizer along."""
    for file in target.glob("tokenizer*"):
        shutil.copy(file, draft)


@pytest.fixture
def row(monkeypatch) -> KnownPair:
    """The one known pair, beside the bundled one."""
    row = KnownPair(
        alias="Tiny", target="owner/Tiny", draft="owner/Tiny-draft", target_4bit="mlx-community/Tiny-4bit"
    )
    bundled = catalogue.PAIRS[0]
    for room in ("catalogue", "names"):
        monkeypatch.setattr(f"dflash_mlx.loading.{room}.PAIRS", (bundled, row))
    return row


def only(machine: Machine) -> catalogue.Listed:
    return next(listed for listed in known_pairs(machine) if listed.alias == "Tiny")


def test_a_pair_is_listed_with_what_of_it_is_here(row, cache, tmp_path):
    assert (only(MAC).target_here, only(MAC).draft_here, only(MAC).target_gb, only(MAC).fits) == (
        "no",
        "no",
        None,
        None,
    )
    put(cache, row.draft, write_draft(tmp_path / "draft"), weights=False)
    put(cache, row.target_4bit, write_target(tmp_path / "target"))
    listed = only(MAC)
    assert (listed.target_here, listed.draft_here, listed.draft_gb) == ("yes", "partly", None)
    shutil.rmtree(cache)
    put(cache, row.draft, tmp_path / "draft")
    put(cache, row.target, tmp_path / "target", weights=False)
    listed = only(MAC)
    assert (listed.target_here, listed.draft_here, listed.draft_gb) == ("partly", "yes", 0.0)


def test_the_bundled_pair_is_always_here():
    listed = known_pairs(MAC)[0]
    assert (listed.draft_here, listed.verified, listed.fits) == ("yes", True, "yes")


@pytest.mark.parametrize(
    "target, draft, machine, fits",
    [
        (10, 1, MAC, "yes"),
        (12, 1, MAC, "in 4 bits"),
        (60, 1, MAC, "no"),
        (3, 1, replace(MAC, device="cpu", default_dtype=mx.float32, working_set_gb=None), "yes"),
        (6, 1, replace(MAC, device="cpu", default_dtype=mx.float32, working_set_gb=None), "no"),
    ],
)
def test_what_fits_the_memory_is_told(target, draft, machine, fits, row, monkeypatch):
    sized = replace(row, target_bytes=target * GB, draft_bytes=draft * GB)
    monkeypatch.setattr(catalogue, "PAIRS", (sized,))
    [listed] = known_pairs(machine)
    assert (listed.fits, listed.target_gb, listed.draft_gb) == (fits, target, draft)


def test_drafters_are_held_against_a_target_with_the_reasons(row, cache, cpu, tmp_path):
    target = write_target(tmp_path / "target")
    put(cache, row.target, target)
    put(cache, row.draft, write_draft(tmp_path / "draft"))
    put(cache, "other/same-shape", tmp_path / "draft", weights=False)
    put(cache, "other/wide", write_draft(tmp_path / "wide", hidden_size=128))
    put(cache, "other/unknown", write_draft(tmp_path / "unknown", architectures=["EagleDraftModel"]))
    give_words(target, put(cache, "other/words", write_draft(tmp_path / "words")))
    report = target_report("tiny", cpu)
    assert (report.model_type, report.hidden_size, report.num_layers, report.vocab_size) == (
        "qwen3",
        64,
        4,
        320,
    )
    assert (report.caches, report.undoable, report.here) == (("KVCache",), True, "yes")
    found = {candidate.draft: candidate for candidate in report.drafters}
    assert (found[row.draft].fits, found[row.draft].why, found[row.draft].here) == (
        True,
        "made for it",
        "yes",
    )
    assert found["other/same-shape"].fits and found["other/same-shape"].here == "partly"
    assert found["other/same-shape"].why.startswith("of the same shape")
    assert found["other/words"].fits is True
    assert (found["other/wide"].fits, found["other/wide"].why) == (False, "hidden size 128 against 64")
    assert not found["other/unknown"].fits and "'EagleDraftModel'" in found["other/unknown"].why
    assert not found["smollm2-135m-dflash"].fits and "576 against 64" in found["smollm2-135m-dflash"].why
    assert [c.fits for c in report.drafters] == [True] * 3 + [False] * 3 and "owner/Tiny" not in found


def test_a_drafter_with_another_tokenizer_does_not_fit(row, cache, cpu, tmp_path):
    target = write_target(tmp_path / "target")
    snapshot = put(cache, "other/words", write_draft(tmp_path / "words"))
    give_words(target, snapshot)
    words = json.loads((snapshot / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (snapshot / "tokenizer.json").write_text(json.dumps(words))
    [found] = [c for c in target_report(target, cpu).drafters if c.draft == "other/words"]
    assert found.fits is False and "another tokenizer" in found.why


def test_a_drafter_made_for_another_target_of_the_same_shape_is_told_apart(row, cache, cpu, tmp_path):
    put(cache, row.draft, write_draft(tmp_path / "draft"))
    [found] = [c for c in target_report(write_target(tmp_path / "mine"), cpu).drafters if c.fits]
    assert found.draft == row.draft and "made for owner/Tiny" in found.why


def test_a_known_target_that_is_not_here_names_its_drafter(row, cpu):
    report = target_report("Tiny", cpu)
    assert (report.here, report.model_type, report.undoable) == ("no", None, None)
    assert [(c.draft, c.fits, c.here) for c in report.drafters] == [(row.draft, None, "no")]


def test_a_config_alone_is_enough(row, cache, cpu, tmp_path):
    folder = write_target(tmp_path / "target")
    split_into_shards(folder)
    put(cache, row.target_4bit, folder, weights=False)
    report = target_report("owner/Tiny", cpu)
    assert (report.here, report.hidden_size, report.loaded_gb) == ("partly", 64, None)


def test_a_state_that_cannot_be_undone_is_told_with_its_kinds(tmp_path, cpu, monkeypatch):
    folder = write_target(tmp_path / "target")
    write_config(folder, {"model_type": "mamba2", **MAMBA})
    report = target_report(folder, cpu)
    assert report.undoable is False and report.why_not and "ArraysCache" in report.why_not
    assert all(c.fits is False and "The target itself" in c.why for c in report.drafters)


def test_what_is_no_target_is_refused(row, tmp_path, cpu):
    with pytest.raises(LoadError, match="Nothing of owner/none is on this machine"):
        target_report("owner/none", cpu)
    with pytest.raises(LoadError, match="No target is known as 'none'"):
        target_report("none", cpu)
    with pytest.raises(PairError, match="is a drafter, not a target"):
        target_report(write_draft(tmp_path / "draft"), cpu)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has no config.json"):
        target_report(tmp_path / "empty", cpu)


def test_damaged_repositories_of_others_are_passed_over(row, cache, cpu, tmp_path):
    broken = write_draft(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    put(cache, "other/broken", broken)
    cut = put(cache, "other/cut", write_draft(tmp_path / "cut"))
    (cut / "model.safetensors").write_bytes(b"12345678{")
    found = {c.draft: c for c in target_report(write_target(tmp_path / "target"), cpu).drafters}
    assert "other/broken" not in found and found["other/cut"].gb is None


def test_families_say_what_they_keep_their_state_in(tmp_path, cpu):
    folder = write_target(tmp_path / "target")
    write_config(folder, FAMILIES["qwen3_next"])
    assert target_report(folder, cpu).caches == ("ArraysCache", "KVCache")


MAMBA = {
    "num_heads": 4,
    "head_dim": 16,
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "state_size": 16,
    "num_hidden_layers": 2,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
    "time_step_limit": [0.0, 10.0],
    "time_step_rank": "auto",
    "max_position_embeddings": 512,
}
