"""Two processes on loopback that train together."""

import json
import os
import socket
import subprocess
import sys

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from dflash_mlx.errors import UsageError
from dflash_mlx.training.checkpoint import load_checkpoint
from dflash_mlx.training.loop import Trainer
from dflash_mlx.training.records import Answer
from tests.training.kit import target_folder
from tests.training.test_loop import ANSWERS, HELD, OPTIONS, trained, weights
from tests.training.toys import small_network, small_target

SCRIPT = """
import os, sys
from pathlib import Path
from tests.training.test_loop import OPTIONS, stopping_at, trained, weights
from tests.training.toys import small_network
import mlx.core as mx
folder, stop = Path(sys.argv[1]), int(sys.argv[2])
rank = int(os.environ["MLX_RANK"])
network, steps = small_network(), []
def report(progress):
    steps.append(progress.step)
    if stop:
        stopping_at(stop)(progress)
result = trained(folder / "run", network, report=report)
mx.savez(str(folder / f"{rank}.npz"), **weights(network))
print(result.steps, result.finished, len(steps), result.measured is not None)
"""


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def launched(folder, *arguments):
    """Two processes in one group, as `mlx.launch -n 2` starts them; their exit codes and what they said."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    started = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=120) for process in started]
    return [process.returncode for process in started], said


def together(folder, *, stop=0):
    codes, said = launched(folder, "-c", SCRIPT, str(folder), str(stop))
    assert codes == [0, 0], said
    parts = [mx.load(str(folder / f"{rank}.npz")) for rank in (0, 1)]
    return [answer.split() for answer, _ in said], parts


def alone_with_both_batches(steps):
    """The weights of one process that takes the mean of the gradients of two batches."""
    network = small_network()
    trainer = Trainer(small_target(), network, ANSWERS, OPTIONS, held_out=HELD)
    stepper, place, workers = trainer.stepper, trainer.place, trainer.workers
    plans = trainer.plans(0)
    for _ in range(steps):
        parts = []
        for workers.rank in (0, 1):
            batch = trainer.batch(plans[place.batch + workers.rank])
            inputs = stepper.inputs(batch, trainer.frequent, trainer.rng(1))
            parameters = network.trainable_parameters()
            parts.append(stepper._value(parameters, *inputs)[1])
            network.update(parameters)
        mean = tree_map(lambda one, other: (one + other) / 2, *parts)
        workers.rank, stepper.average = 0, lambda gradients, mean=mean: mean
        trainer._step(batch, trainer._rate())
        place.batch += 1  # a step of two
    return weights(network)


def test_two_processes_take_steps_of_both_batches_and_one_of_them_reports(tmp_path):
    said, (first, second) = together(tmp_path)
    assert said == [["7", "True", "7", "True"], ["7", "True", "0", "False"]]
    for key in first:
        assert mx.array_equal(first[key], second[key]).item(), key


@pytest.mark.slow
def test_the_steps_are_those_of_the_mean_gradient_and_a_stopped_run_goes_on(tmp_path):
    (leader, other), (first, second) = together(tmp_path, stop=1)
    assert leader == ["1", "False", "1", "False"] and other == ["1", "False", "0", "False"]
    expected = alone_with_both_batches(1)
    apart = whole = 0
    for key in first:
        assert mx.array_equal(first[key], second[key]).item(), key
        # Adam's first step is the gradient's sign, which rounding decides where the gradient is next to nothing.
        apart += mx.sum(mx.abs(first[key] - expected[key]) > 1e-6).item()
        whole += first[key].size
    assert apart < 0.005 * whole
    assert load_checkpoint(tmp_path / "run").facts["place"]["batch"] == 2
    said, parts = together(tmp_path)
    assert said[0][:3] == ["7", "True", "6"]
    (tmp_path / "whole").mkdir()
    _, whole = together(tmp_path / "whole")
    for key in first:
        assert mx.array_equal(parts[0][key], whole[0][key]).item(), key


def test_the_command_writes_one_drafter_and_one_process_speaks(tmp_path):
    out = tmp_path / "out"
    (out / "data").mkdir(parents=True)
    lines = [Answer((5, 6, n), tuple(range(7 + n, 20 + n)), 0.0, "code").line() for n in range(8)]
    (out / "data" / "answers-00000.jsonl").write_text("\n".join(lines) + "\n")
    shape = ["--layers", "1", "--block-size", "4", "--taps", "1,2", "--anchors", "4", "--batch-rows", "64"]
    command = [
        "-c",
        "from dflash_mlx_console import main; main()",
        "train",
        "--target-model",
        str(target_folder()),
        "--out",
        str(out),
    ]
    codes, ((first, notes), second) = launched(tmp_path, *command, "--stage", "train", *shape, "--steps", "2")
    assert codes == [0, 0], notes
    assert "steps" in first and str(out / "drafter") in first and "of memory" in notes
    assert second == ("", "")
    assert (out / "drafter" / "model.safetensors").exists()
    codes, said = launched(tmp_path, *command)
    assert codes == [2, 2], said
    assert "only the train stage is for several" in said[0][1]


def test_more_processes_than_batches_are_refused():
    trainer = Trainer(small_target(), small_network(), ANSWERS, OPTIONS, held_out=HELD)
    trainer.workers.size = 1000
    with pytest.raises(UsageError, match="1000 processes.*batch_rows"):
        trainer.run(lambda progress: None)


def test_a_process_alone_sends_nothing(tmp_path, monkeypatch):
    def sent(*arguments, **options):
        raise AssertionError("nobody listens")

    monkeypatch.setattr(mx.distributed, "all_sum", sent)
    assert trained(tmp_path, small_network()).steps == 7
