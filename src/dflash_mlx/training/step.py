"""One training step: a batch in, changed weights and what was seen on the way out.

Everything that reads the frozen target (embeddings, rows of the head, soft targets) is done before; the step itself is
a function of arrays that MLX may compile. Changes the network and the optimiser.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_map

from dflash_mlx.drafter import DraftNetwork
from dflash_mlx.target import MLXTarget
from dflash_mlx.training.batches import Batch
from dflash_mlx.training.blocks import slot_weights
from dflash_mlx.training.loss import (
    Head,
    candidate_losses,
    choose_candidates,
    dpace_weights,
    vocabulary_losses,
)
from dflash_mlx.training.network import context_rows, drafted, sights
from dflash_mlx.training.options import TrainOptions

_SOFT_CHUNK = 512  # soft targets whose rows of the head exist at once


class StepResult(NamedTuple):
    """What a step saw; lazy."""

    loss: mx.array
    gradient_norm: mx.array  # before clipping
    right: mx.array  # [B - 1] labels that the draft found likeliest
    seen: mx.array  # [B - 1] labels


class _Inputs(NamedTuple):
    """The arrays of a step besides weights; R = N * A * (B - 1) rows of labels."""

    features: mx.array  # [N, S, F * D]
    anchors: mx.array  # [N, A]
    anchor_rows: mx.array  # [N, A, D] embedded
    labels: mx.array  # [R]
    valid: mx.array  # float32 [N, A, B - 1]
    meant: mx.array  # [R, D], or [0] where the whole vocabulary is taken
    label_rows: mx.array  # [R, D], likewise
    head: mx.array  # [C, D], likewise
    bias: mx.array  # [C], likewise


class Stepper:
    """A network, its optimiser and the target that it learns from."""

    def __init__(
        self,
        network: DraftNetwork,
        target: MLXTarget,
        options: TrainOptions,
        *,
        average: Callable[[Any], Any] = lambda gradients: gradients,
    ) -> None:
        """Start with a fresh optimiser; `average` makes one gradient of several processes'."""
        self.network, self.target, self.options, self.average = network, target, options, average
        self.head = Head(target)
        self.by_candidates = options.candidates > 0 and self.head.has_rows and target.logit_softcap is None
        self.optimizer = optim.AdamW(
            learning_rate=0.0,
            betas=list(options.betas),
            weight_decay=options.weight_decay,
            bias_correction=True,
        )
        self.optimizer.init(network.trainable_parameters())
        self._scale = network.config.input_embedding_scale
        self._mask_row = self.embedded(np.array([network.config.mask_token_id], np.int32))[0]
        mx.eval(self._mask_row)
        state = [network.state, self.optimizer.state]
        compiled = options.compiled
        if compiled is None:
            compiled = mx.default_device().type == mx.DeviceType.gpu
        self._run = mx.compile(self._step, inputs=state, outputs=state) if compiled else self._step
        self._value = mx.value_and_grad(self._loss)

    def __call__(
        self, batch: Batch, frequent: npt.NDArray[np.int32], rate: float, rng: np.random.Generator
    ) -> StepResult:
        """Take a step; evaluated, so that its memory is free again."""
        inputs = self.inputs(batch, frequent, rng)
        result = StepResult(*self._run(mx.array(rate, mx.float32), *inputs))
        mx.eval(result, self.network.parameters(), self.optimizer.state)
        return result

    def state(self) -> tuple[Any, Any]:
        """Weights and optimiser as they are, for `restore`; costs nothing, as arrays do not change."""
        kept: Callable[[mx.array], mx.array] = lambda array: array  # noqa: E731
        return tree_map(kept, self.network.parameters()), tree_map(kept, self.optimizer.state)

    def restore(self, state: tuple[Any, Any]) -> None:
        """Bring back what `state` gave, or what a checkpoint held; in place, where a compiled step looks for it."""
        self.network.update(state[0])
        self.optimizer.state.update(state[1])

    def loss(self, batch: Batch, frequent: npt.NDArray[np.int32], rng: np.random.Generator) -> mx.array:
        """The loss of a batch, nothing changed; lazy."""
        return self._loss(self.network.trainable_parameters(), *self.inputs(batch, frequent, rng))[0]

    def inputs(self, batch: Batch, frequent: npt.NDArray[np.int32], rng: np.random.Generator) -> _Inputs:
        """Everything of a step that comes from the batch and the frozen target."""
        blocks = batch.blocks
        labels = mx.array(blocks.labels.reshape(-1))
        shape = blocks.anchor_ids.shape
        anchor_rows = self.embedded(blocks.anchor_ids.reshape(-1)).reshape(*shape, -1)
        common = (batch.features, mx.array(blocks.anchors), anchor_rows, labels)
        valid = mx.array(blocks.valid.astype(np.float32))
        if not self.by_candidates:
            return _Inputs(*common, valid, *[mx.zeros((0,))] * 4)
        wanted = np.concatenate([blocks.labels[blocks.valid], batch.soft_ids.reshape(-1)])
        chosen = choose_candidates(
            wanted, frequent, vocab=self.target.vocab_size, count=self.options.candidates, rng=rng
        )
        label_rows = self.head.rows(labels)
        meant, soft = label_rows, self.options.soft if batch.soft_ids.shape[1] else 0.0
        if soft:
            followed = self._soft_rows(batch)[mx.array(batch.soft_rows.reshape(-1))]
            meant = (1 - soft) * label_rows + soft * followed
        ids = mx.array(chosen.ids)
        inputs = _Inputs(*common, valid, meant, label_rows, self.head.rows(ids), mx.array(chosen.bias))
        mx.eval(inputs)
        return inputs

    def embedded_blocks(self, anchor_rows: mx.array, block_size: int) -> mx.array:
        """Anchors [N, A, D] and masks to the rows of blocks [N, A, B, D]."""
        answers, count, width = anchor_rows.shape
        masks = mx.broadcast_to(self._mask_row, (answers, count, block_size - 1, width))
        return mx.concatenate([anchor_rows[:, :, None], masks], axis=2)

    def embedded(self, ids: npt.NDArray[np.int32]) -> mx.array:
        """Tokens [n] to rows [n, D] as they enter the draft, in its type."""
        rows = self.target.embed(mx.array(ids)) * self._scale
        return rows.astype(self.network.dtype)

    def hidden(self, batch: Batch) -> mx.array:
        """What the head is to read of a batch, [N, A, B - 1, D] float32; nothing changed; lazy."""
        blocks = batch.blocks
        anchor_rows = self.embedded(blocks.anchor_ids.reshape(-1)).reshape(*blocks.anchor_ids.shape, -1)
        return self._drafted(
            batch.features, mx.array(blocks.anchors), anchor_rows, blocks.labels.shape[2] + 1
        )

    def _drafted(
        self, features: mx.array, anchors: mx.array, anchor_rows: mx.array, block_size: int
    ) -> mx.array:
        network = self.network
        hidden = drafted(
            network,
            self.embedded_blocks(anchor_rows, block_size),
            context_rows(network, features),
            anchors,
            sights(network.config, anchors, features.shape[1], block_size),
            checkpoint=self.options.gradient_checkpointing,
        )
        return hidden.astype(mx.float32) * network.config.output_multiplier

    def _soft_rows(self, batch: Batch) -> mx.array:
        """[U, D]: what each soft target means, as a mixture of rows of the head."""
        parts = []
        for at in range(0, len(batch.soft_ids), _SOFT_CHUNK):
            ids, weights = (mx.array(a[at : at + _SOFT_CHUNK]) for a in (batch.soft_ids, batch.soft_weights))
            parts.append((weights[:, None] @ self.head.rows(ids))[:, 0])
            mx.eval(parts[-1])
        return mx.concatenate(parts)

    def _step(self, rate: mx.array, *inputs: mx.array) -> tuple[mx.array, ...]:
        parameters = self.network.trainable_parameters()
        (loss, right, seen), gradients = self._value(parameters, *inputs)
        self.network.update(parameters)
        gradients, norm = optim.clip_grad_norm(self.average(gradients), self.options.clip)
        self.optimizer.learning_rate = rate
        self.optimizer.update(self.network, gradients)
        return loss, norm, right, seen

    def _loss(self, parameters: Any, *arrays: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """The batch's loss, and by slot the labels found and the labels there were."""
        inputs = _Inputs(*arrays)
        self.network.update(tree_map(lambda a: a.astype(self.network.dtype), parameters))
        answers, count, slots = inputs.valid.shape
        hidden = self._drafted(inputs.features, inputs.anchors, inputs.anchor_rows, slots + 1)
        rows = hidden.reshape(-1, hidden.shape[-1])
        if self.by_candidates:
            losses = candidate_losses(rows, inputs.meant, inputs.label_rows, inputs.head, inputs.bias)
        else:
            losses = vocabulary_losses(rows, inputs.labels, self.head)
        shape = (answers, count, slots)
        if self.options.dpace:
            weights = dpace_weights(losses.label_logprob.reshape(shape), inputs.valid)
        else:
            weights = inputs.valid * mx.array(slot_weights(slots + 1, self.options.decay(slots + 1)))
        loss = mx.sum(weights * losses.loss.reshape(shape)) / mx.maximum(mx.sum(weights), 1e-6)
        right = mx.sum(losses.right.reshape(shape) * inputs.valid, axis=(0, 1))
        return loss, right, mx.sum(inputs.valid, axis=(0, 1))
