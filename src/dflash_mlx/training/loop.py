"""The training run: answers and a network in, a trained network, checkpoints and figures out.

Features are computed when a batch first needs them and kept where the store keeps them. Whatever is random depends on
the seed and on the place in the run, so that a stopped and resumed run gives the weights of an unstopped one.
"""

import hashlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from dflash_mlx.drafter import DraftNetwork
from dflash_mlx.errors import NumericalError, UsageError
from dflash_mlx.target import MLXTarget
from dflash_mlx.training.batches import Batch, BatchPlan, make_batch, plan_epoch
from dflash_mlx.training.checkpoint import load_checkpoint, save_checkpoint
from dflash_mlx.training.estimate import Estimate, foreseen
from dflash_mlx.training.features import AnswerFeatures, FeatureComputer, shared_beginning
from dflash_mlx.training.identity import fingerprint
from dflash_mlx.training.network import check_trainable
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.progress import Place, Progress, TrainResult
from dflash_mlx.training.records import Answer, is_held_out
from dflash_mlx.training.selection import digest, frequent, some, usable
from dflash_mlx.training.simulate import Measured, measure
from dflash_mlx.training.step import Stepper
from dflash_mlx.training.store import FeatureStore
from dflash_mlx.training.workers import Workers

_RECENT = 0.95  # how much of the running figures a step keeps of what was before


def train(
    target: MLXTarget,
    network: DraftNetwork,
    answers: Sequence[Answer],
    options: TrainOptions,
    *,
    held_out: Sequence[Answer] | None = None,
    checkpoints: Path | None = None,
    store: FeatureStore | None = None,
    begun_from: str = "",
    foresee: Callable[[Estimate], None] | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> TrainResult:
    """Train the network in place; resumes from the newest checkpoint where there is one.

    Processes that `mlx.launch` started train together: a step is one of all their batches. The first one reports,
    measures and saves.

    Args:
        target: frozen; its answers are those trained on.
        network: float32 weights are changed and evaluated after each step.
        answers: the target's own.
        options: how.
        held_out: answers to measure on; None holds out every 50th of `answers`, see `is_held_out`.
        checkpoints: folder for them; None saves nothing.
        store: where features are kept; None computes them for every batch anew.
        begun_from: what `network` is, in a word; a checkpoint of a run that began otherwise is refused.
        foresee: told what the run will take, after a few pieces of it were timed; None: not timed. A run that was
            finished before tells nothing.
        report: called after each step, in this thread.

    Raises:
        UsageError: no answers to train on, a checkpoint of another target, network or beginning, or processes whose
            checkpoints are of different steps.
        WriteError: a full disk; the newest checkpoint stays.
        NumericalError: the loss is no number any more; the newest checkpoint stays.
        UnsupportedError: a network beyond the v1 format.
    """
    trainer = Trainer(
        target,
        network,
        answers,
        options,
        held_out=held_out,
        checkpoints=checkpoints,
        store=store,
        begun_from=begun_from,
    )
    if foresee is not None and not trainer.finished:
        foresee(foreseen(trainer))
    return trainer.run(report)


class Trainer:
    """One run; `train` is all that most need."""

    def __init__(
        self,
        target: MLXTarget,
        network: DraftNetwork,
        answers: Sequence[Answer],
        options: TrainOptions,
        *,
        held_out: Sequence[Answer] | None = None,
        checkpoints: Path | None = None,
        store: FeatureStore | None = None,
        begun_from: str = "",
    ) -> None:
        """Sort the answers, and take up the newest checkpoint; arguments as `train`."""
        check_trainable(network.config, network.name)
        fitting = usable(answers, options.longest)
        if held_out is None:
            held_out = [answer for answer in fitting if is_held_out(answer)]
            fitting = [answer for answer in fitting if not is_held_out(answer)]
        self.answers = fitting
        self.held_out = some(usable(held_out, options.longest), options.evaluate_answers)
        if not self.answers:
            raise UsageError(
                "There is no answer to train on: each needs two tokens or more, and those held out do not count."
            )
        self.target, self.options, self.checkpoints, self.store = target, options, checkpoints, store
        self.workers = Workers()
        self.stepper = Stepper(network, target, options, average=self.workers.average)
        taps = network.config.target_layer_ids
        shared = shared_beginning(self.answers + self.held_out)
        self.computer = FeatureComputer(target, taps, top_k=options.kept_top, shared=shared)
        self.frequent = frequent(self.answers, target.vocab_size)
        self.identity = {"target": fingerprint(target), "taps": list(taps), "network": _shapes(network)}
        self.begun_from = begun_from
        self._data = digest(self.answers)
        self.place = Place()
        self._plans: list[BatchPlan] = []
        self._running: dict[str, Any] = {}
        self._resumed: Path | None = None
        self._resume()
        if not self.workers.agree(self.place.step):
            raise UsageError(
                f"The processes go on from different steps, this one from {self.place.step}; all need the newest "
                "checkpoint at the same path."
            )

    @property
    def steps(self) -> int:
        """All steps of the run."""
        if self.options.steps is not None:
            return self.options.steps
        if not self._plans:
            self._plans = self.plans(self.place.epoch)
        return math.ceil(self.options.epochs * max(1, len(self._plans) // self.workers.size))

    @property
    def finished(self) -> bool:
        """No step is left."""
        return self._fraction() >= 1

    def run(self, report: Callable[[Progress], None]) -> TrainResult:
        """Train to the end, or to Ctrl-C; see `train`."""
        place, path, measured, stopped = self.place, None, None, False
        first = place.step
        saved_at = started = time.monotonic()
        before = place.seconds
        with _until_interrupted() as interrupted:
            for plan in self._batches():
                batch = self.batch(plan)
                if stopped := self.workers.any(interrupted.is_set()):
                    break
                rate = self._rate()
                progress = self._step(batch, rate)
                place.seconds = self.workers.leading(before + time.monotonic() - started)
                if not self.workers.leads:
                    continue
                every = self.options.evaluate_steps
                measuring = bool(every) and place.step % every == 0
                path = None
                # Saved before it measures, which takes long, and may be broken off by a second Ctrl-C.
                if measuring or time.monotonic() - saved_at > 60 * self.options.checkpoint_minutes:
                    path, saved_at = self.save(), time.monotonic()
                measured = self.measure() if measuring else None
                report(self._timed(progress, measured, path))
        place.seconds = before + time.monotonic() - started
        new = place.step - first
        if self.workers.leads:
            path = self.save() if new else self._resumed
            if not stopped and measured is None and self.held_out:
                measured = self.measure()
        epochs = place.epoch + place.batch / max(1, len(self._plans))
        return TrainResult(place.step, new, epochs, place.seconds, not stopped, measured, path)

    def measure(self) -> Measured | None:
        """What the network does on the held-out answers now."""
        if not self.held_out:
            return None
        return measure(self.stepper, self.held_out, [self.features(answer) for answer in self.held_out])

    def save(self) -> Path | None:
        """Write a checkpoint, if there is a folder for them."""
        if self.checkpoints is None:
            return None
        arrays = _named("network", self.stepper.network.parameters())
        arrays |= _named("optimizer", self.stepper.optimizer.state)
        facts = {"identity": self.identity, "data": self._data, "place": asdict(self.place)}
        facts["options"], facts["begun_from"] = asdict(self.options), self.begun_from
        return save_checkpoint(self.checkpoints, self.place.step, arrays, facts)

    def _resume(self) -> None:
        found = load_checkpoint(self.checkpoints) if self.checkpoints else None
        if found is None:
            return
        for key, ours in self.identity.items():
            if found.facts.get("identity", {}).get(key) != ours:
                raise UsageError(
                    f"{found.path} is the checkpoint of another {key}; give another folder, or the {key} of that run."
                )
        theirs = found.facts.get("begun_from", self.begun_from)
        if theirs != self.begun_from:
            raise UsageError(
                f"{found.path} is of a run that began from {theirs}, and this one is to begin from {self.begun_from}; "
                "begin as that run did, or give another folder."
            )
        self._resumed = found.path
        self.stepper.restore((_tree("network", found.arrays), _tree("optimizer", found.arrays)))
        self.place = Place(**found.facts["place"])
        if found.facts["data"] != self._data or found.facts["options"]["seed"] != self.options.seed:
            # Other answers have another order: begin it at its beginning.
            self.place.epoch, self.place.batch = self.place.epoch + 1, 0

    def plans(self, epoch: int) -> list[BatchPlan]:
        """The batches of an epoch, in order."""
        options, block_size = self.options, self.stepper.network.config.block_size
        return plan_epoch(
            self.answers,
            seed=options.seed,
            epoch=epoch,
            anchors=options.anchors,
            block_size=block_size,
            batch_rows=options.batch_rows,
        )

    def _batches(self) -> Iterator[BatchPlan]:
        """The batches from where the run is to its end; a step moves on to the next."""
        place = self.place
        while True:
            self._plans = self.plans(place.epoch)
            if len(self._plans) < self.workers.size:
                raise UsageError(
                    f"{self.workers.size} processes train together, but there are only {len(self._plans)} batches of "
                    "answers; start fewer, gather more answers, or give fewer batch_rows."
                )
            while place.batch + self.workers.size <= len(self._plans):
                if self.finished:
                    return
                yield self._plans[place.batch + self.workers.rank]
            place.epoch, place.batch = place.epoch + 1, 0

    def batch(self, plan: BatchPlan) -> Batch:
        """The plan's arrays; features that are not kept are computed."""
        members = [self.answers[i] for i in plan.members]
        return make_batch(
            plan,
            members,
            [self.features(answer) for answer in members],
            block_size=self.stepper.network.config.block_size,
            rng=self.rng(0),
            soft_top=self.options.kept_top,
            surprising=self.options.surprising,
        )

    def features(self, answer: Answer) -> AnswerFeatures:
        """The answer's features, computed and kept where they are not kept yet."""
        if self.store is not None and (kept := self.store.get(answer)) is not None:
            return kept
        features = self.computer.compute(answer)
        if self.store is not None:
            self.store.put(answer, features)
        return features

    def rng(self, purpose: int) -> np.random.Generator:
        """What decides the batch at this place: 0 its anchors, 1 its candidates."""
        number = self.place.batch + self.workers.rank
        return np.random.default_rng([self.options.seed, self.place.epoch, number, purpose])

    def _fraction(self) -> float:
        """How much of the run is done, by steps or by the clock."""
        done = self.place.step / self.steps
        if self.options.minutes is not None:
            done = max(done, self.place.seconds / (60 * self.options.minutes))
        return done

    def _rate(self) -> float:
        """Linear warm-up, then half a cosine."""
        options, done = self.options, self._fraction()
        if done < options.warm_up:
            return options.learning_rate * (done + 1 / self.steps) / (options.warm_up + 1 / self.steps)
        along = (done - options.warm_up) / (1 - options.warm_up) if options.warm_up < 1 else 0.0
        least = options.final_learning_rate
        return options.learning_rate * (least + (1 - least) * 0.5 * (1 + math.cos(math.pi * min(along, 1.0))))

    def _step(self, batch: Batch, rate: float) -> Progress:
        started = time.monotonic()
        result = self.stepper(batch, self.frequent, rate, self.rng(1))
        loss, seen = _number(result.loss), np.array(result.seen)
        if not math.isfinite(loss):
            raise NumericalError(
                f"The loss is {loss} at step {self.place.step + 1}; resume from the checkpoint before with a lower "
                "learning_rate."
            )
        self.place.step += 1
        self.place.batch += self.workers.size
        agreeing = np.array(result.right) / np.maximum(seen, 1)
        speed = self.workers.size * float(seen.sum()) / (time.monotonic() - started)
        return Progress(
            step=self.place.step,
            steps=self.steps,
            epoch=self.place.epoch,
            loss=float(self._mean("loss", loss)),
            agreeing=tuple(self._mean("agreeing", agreeing).tolist()),
            gradient_norm=_number(result.gradient_norm),
            learning_rate=rate,
            tokens_per_second=float(self._mean("speed", speed)),
            seconds=0.0,
            seconds_left=0.0,
        )

    def _timed(self, progress: Progress, measured: Measured | None, path: Path | None) -> Progress:
        done, spent = self._fraction(), self.place.seconds
        left = spent * (1 - done) / done if done else 0.0
        return replace(progress, seconds=spent, seconds_left=left, measured=measured, checkpoint=path)

    def _mean(self, name: str, value: Any) -> Any:
        before = self._running.get(name, value)
        self._running[name] = _RECENT * before + (1 - _RECENT) * value
        return self._running[name]


@contextmanager
def _until_interrupted() -> Iterator[threading.Event]:
    """Let Ctrl-C set the event, so that a step is finished before the run ends; a second one raises."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def stop(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def _shapes(network: DraftNetwork) -> str:
    digest = hashlib.blake2b(digest_size=12)
    tensors: dict[str, mx.array] = dict(tree_flatten(network.parameters()))
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.shape}".encode())
    digest.update(repr((network.config.block_size, network.config.mask_token_id)).encode())
    return digest.hexdigest()


def _number(scalar: mx.array) -> float:
    value: float = scalar.item()  # type: ignore[assignment]
    return value


def _named(prefix: str, tree: Any) -> dict[str, mx.array]:
    flat: dict[str, mx.array] = dict(tree_flatten(tree))
    return {f"{prefix}.{name}": array for name, array in flat.items()}


def _tree(prefix: str, arrays: dict[str, mx.array]) -> Any:
    start = prefix + "."
    return tree_unflatten([(k[len(start) :], v) for k, v in arrays.items() if k.startswith(start)])
