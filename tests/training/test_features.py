"""What the trainer reads of the target is what the engine reads of it."""

import json

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.errors import UsageError
from dflash_mlx.runtime import Machine
from dflash_mlx.training import features as module
from dflash_mlx.training import stage
from dflash_mlx.training.features import FeatureComputer, likeliest, shared_beginning
from dflash_mlx.training.identity import fingerprint
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.records import Answer
from dflash_mlx.training.store import FeatureStore
from dflash_mlx.training.workspace import Workspace
from tests.training.toys import as_features, small_network, small_target, some_answers

TAPS, TOP = (0, 2), 5


@pytest.mark.parametrize("chunk", [3, 64])
def test_features_and_likeliest_tokens_are_those_of_one_pass_over_all(monkeypatch, chunk):
    """With what the prompts share read once, in chunks, by quick exponentials; the engine's pass has none of these."""
    monkeypatch.setattr(module, "_CHUNK", chunk)
    monkeypatch.setattr(module, "_LOGIT_ROWS", chunk)
    target, answers = small_target(), some_answers(4)
    shared = shared_beginning(answers)
    assert shared[:2] == (5, 6)
    computer = FeatureComputer(target, TAPS, top_k=TOP, shared=shared)
    for answer in answers:
        got = computer.compute(answer)
        whole = target.verify(mx.array(answer.ids[:-1]), target.make_cache(), TAPS)
        expected = whole.features.astype(mx.bfloat16).astype(mx.float32)
        assert mx.allclose(as_features(got), expected, rtol=1e-2, atol=1e-4)
        rows = whole.logits[len(answer.prompt_ids) :]
        best = np.argsort(-np.array(rows), axis=-1)[:, :TOP]
        assert [sorted(row) for row in got.top_ids.tolist()] == [sorted(row) for row in best.tolist()]
        scores = np.take_along_axis(
            np.array(rows - mx.logsumexp(rows, axis=-1, keepdims=True)), got.top_ids, axis=-1
        )
        np.testing.assert_allclose(got.top_logprobs.astype(np.float32), scores, atol=1e-2)


@pytest.mark.parametrize("vocab", [TOP, 40, 5000])
def test_the_likeliest_are_found_wherever_they_lie(vocab):
    logits = mx.random.normal((7, vocab), key=mx.random.key(3))
    logits[:, vocab - 1] = 9.0  # the last group is padded
    ids, logprobs = likeliest(logits, TOP)
    best = np.argsort(-np.array(logits), axis=-1)[:, :TOP]
    assert [sorted(row) for row in ids.tolist()] == [sorted(row) for row in best.tolist()]
    expected = mx.take_along_axis(logits - mx.logsumexp(logits, axis=-1, keepdims=True), ids, axis=-1)
    assert mx.allclose(logprobs.astype(mx.float32), expected, atol=1e-2)


def test_a_shared_beginning_leaves_each_prompt_a_token():
    assert shared_beginning([]) == ()
    assert shared_beginning([Answer((1, 2, 3), (9, 9)), Answer((1, 2, 4, 5), (9, 9))]) == (1, 2)
    assert shared_beginning([Answer((1, 2), (9, 9)), Answer((1, 2), (8, 9))]) == (1,)


def store_of(tmp_path, *, memory_gb, answers, free, monkeypatch):
    workspace = Workspace(tmp_path)
    said = []
    monkeypatch.setattr(stage.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": free})())
    machine = Machine("cpu", "test", memory_gb, "test", "test", mx.float32)
    store = stage._store(
        small_target(),
        small_network(),
        workspace,
        answers,
        TrainOptions(),
        machine,
        said.append,
        stage.Workers(),
    )
    return store, said[0]


def test_features_are_kept_where_they_fit(tmp_path, monkeypatch):
    answers = some_answers(6)
    store, said = store_of(tmp_path, memory_gb=1, answers=answers, free=0, monkeypatch=monkeypatch)
    assert store is not None and not store.on_disk and "kept in memory" in said
    size = sum(store.bytes_of(answer) for answer in answers)
    store, said = store_of(tmp_path, memory_gb=0, answers=answers, free=2 * size, monkeypatch=monkeypatch)
    assert store is not None and store.on_disk and "kept in" in said
    computer = FeatureComputer(small_target(), TAPS, top_k=16)
    for answer in answers:
        store.put(answer, computer.compute(answer))
    store.close()
    # What lies there already needs no room: the disk is as full as the run itself has made it.
    store, _ = store_of(tmp_path, memory_gb=0, answers=answers, free=size // 2, monkeypatch=monkeypatch)
    assert store is not None and all(answer in store for answer in answers)
    store.close()
    more = [*answers, *some_answers(60, seed=9)]
    store, said = store_of(tmp_path, memory_gb=0, answers=more, free=size // 2, monkeypatch=monkeypatch)
    assert store is None and "fit nowhere" in said


def test_a_broken_note_beside_features_is_named(tmp_path):
    about = {"target": fingerprint(small_target()), "taps": list(TAPS)}
    FeatureStore(tmp_path, width=128, top_k=16, about=about).close()
    note = tmp_path / "features.json"
    assert json.loads(note.read_text())["taps"] == list(TAPS)
    note.write_text("")
    with pytest.raises(UsageError, match="is broken; remove"):
        FeatureStore(tmp_path, width=128, top_k=16, about=about)
