import os
import threading
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.errors import CheckpointError, UsageError, WriteError
from dflash_mlx.training.checkpoint import load_checkpoint, save_checkpoint
from dflash_mlx.training.identity import fingerprint
from dflash_mlx.training.loop import Trainer, train
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.records import Answer
from dflash_mlx.training.store import FeatureStore
from dflash_mlx.training.workers import Workers
from tests.training.toys import features_of, small_network, small_target, some_answers

OPTIONS = TrainOptions(
    steps=7, anchors=4, batch_rows=128, candidates=64, learning_rate=3e-3, evaluate_answers=3
)
ANSWERS = some_answers(9)
HELD = some_answers(3, seed=4)


def weights(network):
    return dict(tree_flatten(network.parameters()))


def trained(folder, network, options=OPTIONS, **changes):
    arguments = {"held_out": HELD, "checkpoints": folder, **changes}
    return train(small_target(), network, ANSWERS, options, **arguments)


def stopping_at(step):
    """A report that presses Ctrl-C."""

    def report(progress):
        if progress.step == step:
            os.kill(os.getpid(), 2)

    return report


def test_a_stopped_and_resumed_run_gives_the_weights_of_an_unstopped_one(tmp_path):
    whole, first, second = small_network(), small_network(), small_network(seed=5)
    trained(tmp_path / "whole", whole)
    stopped = trained(tmp_path / "parts", first, report=stopping_at(4))
    assert (stopped.steps, stopped.finished) == (4, False)
    steps = []
    ended = trained(tmp_path / "parts", second, report=lambda progress: steps.append(progress.step))
    assert steps == [5, 6, 7] and ended.finished
    for key, expected in weights(whole).items():
        assert mx.array_equal(weights(second)[key], expected).item(), key
        assert not mx.array_equal(weights(first)[key], expected).item(), key


def test_epochs_follow_each_other_batch_by_batch():
    epochs = []
    trainer = Trainer(small_target(), small_network(), ANSWERS, OPTIONS, held_out=HELD)
    batches = len(trainer.plans(0))
    assert 1 < batches < 7
    trainer.run(lambda progress: epochs.append(progress.epoch))
    assert epochs == [step // batches for step in range(7)]


def test_a_checkpoint_between_two_steps_is_as_good(tmp_path):
    whole, resumed = small_network(), small_network(seed=5)
    saved = []

    def copied(progress):
        if progress.step == 3:
            saved.append(progress.checkpoint)
            (tmp_path / "other").mkdir()
            os.rename(progress.checkpoint, tmp_path / "other" / progress.checkpoint.name)

    trained(tmp_path / "whole", whole, replace(OPTIONS, checkpoint_minutes=1e-9), report=copied)
    assert saved[0] is not None
    trained(tmp_path / "other", resumed)
    for key, expected in weights(whole).items():
        assert mx.array_equal(weights(resumed)[key], expected).item(), key


def test_an_estimate_changes_nothing_and_tells_the_disk(tmp_path):
    plain, timed, told = small_network(), small_network(), []
    target = small_target()
    store = FeatureStore(
        tmp_path / "features", width=128, top_k=16, about={"target": fingerprint(target), "taps": [0, 2]}
    )
    trained(None, plain)
    trained(tmp_path / "run", timed, store=store, foresee=told.append)
    for key, expected in weights(plain).items():
        assert mx.array_equal(weights(timed)[key], expected).item(), key
    (estimate,) = told
    assert "of memory" in str(estimate) and estimate.seconds > 0
    found = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    # A third checkpoint lies there for a moment only, and the finished drafter is not written here.
    one = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*.safetensors"))
    assert estimate.disk_bytes == pytest.approx(found + 2 * one, rel=0.3)


def test_a_finished_run_foretells_and_writes_nothing(tmp_path):
    told = []
    first = trained(tmp_path, small_network(), foresee=told.append)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    again = trained(tmp_path, small_network(), foresee=told.append)
    assert len(told) == 1
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before
    assert (first.new_steps, again.new_steps, again.steps) == (7, 0, 7)
    assert again.checkpoint == first.checkpoint and again.measured == first.measured


def test_the_result_tells_how_often_all_answers_were_seen(tmp_path):
    batches = len(Trainer(small_target(), small_network(), ANSWERS, OPTIONS, held_out=HELD).plans(0))
    assert trained(tmp_path, small_network()).epochs == pytest.approx(7 / batches)


def test_a_run_that_began_otherwise_is_refused(tmp_path):
    trained(tmp_path, small_network(), begun_from="random", report=stopping_at(2))
    with pytest.raises(UsageError, match="began from random, and this one is to begin from target"):
        trained(tmp_path, small_network(), begun_from="target")
    assert trained(tmp_path, small_network(), begun_from="random").finished


def test_processes_at_different_steps_are_refused(monkeypatch):
    monkeypatch.setattr(Workers, "agree", lambda self, number: False)
    with pytest.raises(UsageError, match="go on from different steps"):
        Trainer(small_target(), small_network(), ANSWERS, OPTIONS, held_out=HELD)


def test_other_answers_begin_an_epoch_of_their_own(tmp_path):
    network, places = small_network(), []
    trained(tmp_path, network, report=stopping_at(2))
    train(
        small_target(),
        network,
        [*ANSWERS, *some_answers(2, seed=8)],
        OPTIONS,
        held_out=HELD,
        checkpoints=tmp_path,
        report=lambda progress: places.append((progress.step, progress.epoch)),
    )
    assert places[0] == (3, 1) and places[-1][0] == 7


@pytest.mark.parametrize("other", ["target", "network"])
def test_a_checkpoint_of_another_is_refused(tmp_path, other):
    trained(tmp_path, small_network(), report=stopping_at(2))
    target = small_target(seed=3) if other == "target" else small_target()
    network = small_network(block_size=4) if other == "network" else small_network()
    with pytest.raises(UsageError, match=f"step-0000002 is the checkpoint of another {other}"):
        train(target, network, ANSWERS, OPTIONS, held_out=HELD, checkpoints=tmp_path)


def test_features_of_another_target_are_refused(tmp_path):
    about = {"target": fingerprint(small_target()), "taps": [0, 2]}
    FeatureStore(tmp_path, width=128, top_k=4, about=about).close()
    changed = {**about, "target": fingerprint(small_target(seed=3))}
    with pytest.raises(UsageError, match="another target"):
        FeatureStore(tmp_path, width=128, top_k=4, about=changed)
    assert fingerprint(small_target()) == about["target"]


def test_no_answers_are_one_sentence():
    with pytest.raises(UsageError, match="no answer to train on"):
        train(small_target(), small_network(), [Answer((1,), (2,))], OPTIONS)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_kept_features_are_those_computed(tmp_path, where):
    target, network = small_target(), small_network()
    folder = tmp_path if where == "disk" else None
    about = {"target": fingerprint(target), "taps": [0, 2]}
    store = FeatureStore(folder, width=128, top_k=4, about=about)
    computed = features_of(target, network, ANSWERS)
    for answer, features in zip(ANSWERS[:5], computed, strict=False):
        store.put(answer, features)
    if where == "disk":
        # A run that broke off while it wrote.
        (tmp_path / "features.bin").open("ab").write(b"half of an answer")
        (tmp_path / "features.jsonl").open("ab").write(b'{"key": "ab')
        (tmp_path / "features.jsonl").open("ab").write(b"\n")
        store.close()
        store = FeatureStore(folder, width=128, top_k=4, about=about)
    for answer, features in zip(ANSWERS[5:], computed[5:], strict=True):
        assert answer not in store and store.get(answer) is None
        store.put(answer, features)
    for answer, features in zip(ANSWERS, computed, strict=True):
        assert answer in store
        for found, expected in zip(store.get(answer), features, strict=True):
            assert found.dtype == expected.dtype and np.array_equal(found, expected)


def test_the_newest_checkpoint_is_taken_and_two_are_kept(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, {"a": mx.full((2,), step)}, {"step": step})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000002", "step-0000003"]
    found = load_checkpoint(tmp_path)
    assert found is not None and found.facts == {"step": 3} and found.arrays["a"].tolist() == [3, 3]
    (tmp_path / "step-0000003" / "state.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="step-0000003 cannot be read"):
        load_checkpoint(tmp_path)


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, {"a": mx.zeros((2,))}, {"step": 1})

    def full(file, arrays):
        open(file, "wb").write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(WriteError, match="step 2 cannot be written .* No space left on device.* is kept"):
        save_checkpoint(tmp_path, 2, {"a": mx.zeros((2,))}, {"step": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000001"]
    # A disk that says nothing and takes half.
    monkeypatch.setattr(mx, "save_safetensors", lambda file, arrays: open(file, "wb").write(b"half"))
    with pytest.raises(WriteError, match="shorter than what was written"):
        save_checkpoint(tmp_path, 2, {"a": mx.zeros((2,))}, {"step": 2})
    store = FeatureStore(tmp_path / "features", width=128, top_k=4, about={})
    (features,) = features_of(small_target(), small_network(), ANSWERS[:1])

    def no_room(descriptor, data, offset):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_room)
    with pytest.raises(WriteError, match="Features cannot be kept"):
        store.put(ANSWERS[0], features)
    assert ANSWERS[0] not in store


def test_a_run_in_another_thread_needs_no_signals(tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(trained(tmp_path, small_network())))
    thread.start()
    thread.join()
    assert results[0].finished
