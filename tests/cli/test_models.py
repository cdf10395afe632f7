"""`dflash-mlx models`: what there is on stdout, nothing loaded, nothing fetched."""

import json
import socket

import pytest
from huggingface_hub import constants

from tests.loading.checkpoints import write_draft, write_target


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_it_lists_the_known_pairs_on_stdout_and_loads_none(console):
    result = console("models")
    assert (result.exit_code, result.stderr, console.made) == (0, "", [])
    lines = result.stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == ["machine", "pairs"]
    [row] = [line.split() for line in lines if line.startswith("  smollm2-135m ")]
    assert row[2] == "smollm2-135m-dflash" and row[-1] == "yes"


def test_json_is_one_object_with_the_same_rows(console):
    found = json.loads(console("models", "--json").stdout)
    rows = {row["alias"]: row for row in found["pairs"]}
    assert rows.keys() >= {"smollm2-135m", "Qwen3-8B"}
    assert rows["Qwen3-8B"] | {"fits": None} == {
        "alias": "Qwen3-8B",
        "target": "Qwen/Qwen3-8B",
        "draft": "z-lab/Qwen3-8B-DFlash-b16",
        "target_gb": 16.38,
        "draft_gb": 2.1,
        "thinking": False,
        "verified": True,
        "target_here": "no",
        "draft_here": "no",
        "fits": None,
    }
    assert found["machine"]["recommended_gb"] > 0


def test_a_target_is_told_with_the_drafters_held_against_it(console, tmp_path):
    target = str(write_target(tmp_path / "target"))
    result = console("models", "--target-model", target)
    assert result.exit_code == 0 and "  caches       KVCache\n" in result.stdout
    assert "hidden size 576 against 64" in result.stdout
    found = json.loads(console("--json", "models", "--target-model", target).stdout)
    assert found["target"]["caches"] == ["KVCache"] and found["target"]["undoable"] is True
    assert [(row["draft"], row["fits"]) for row in found["drafters"]] == [("smollm2-135m-dflash", False)]


def test_what_cannot_be_told_is_one_sentence(console, tmp_path):
    draft = str(write_draft(tmp_path / "draft"))
    for arguments, code, says in (
        (["models", "--target-model", "owner/none"], 1, "Nothing of owner/none is on this machine"),
        (["models", "--target-model", draft], 1, "is a drafter, not a target"),
        (["models", "--target-model", " "], 2, "The name of the target is empty"),
        (["models", "extra"], 2, "extra"),
        (["--target-model", "x", "models"], 2, "has no meaning for models"),
    ):
        result = console(*arguments)
        assert (result.exit_code, result.stdout) == (code, ""), arguments
        assert says in result.stderr and "Traceback" not in result.stderr
