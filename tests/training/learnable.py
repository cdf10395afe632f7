"""A tiny target with text that can be learned: each token has one successor, which depends on the prompt's dialect."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import numpy.typing as npt

from dflash_mlx.drafter import DraftNetwork
from dflash_mlx.target import MLXTarget
from dflash_mlx.training.records import Answer
from tests.kit.models import tiny_target
from tests.training.toys import small_network

WORDS = 48  # ids 2..49; 0 and 1 are the dialects
LENGTH = 24


def successors(seed: int) -> npt.NDArray[np.int32]:
    """[2, WORDS + 2]: the token after each token, in both dialects."""
    rng = np.random.default_rng(seed)
    return np.stack([np.concatenate([[0, 0], 2 + rng.permutation(WORDS)]) for _ in range(2)]).astype(np.int32)


def changed(rules: npt.NDArray[np.int32], share: float, seed: int = 9) -> npt.NDArray[np.int32]:
    """The same rules, some of them others."""
    rng, other = np.random.default_rng(seed), rules.copy()
    for row in other:
        some = 2 + rng.choice(WORDS, int(share * WORDS), replace=False)
        row[some] = row[np.roll(some, 1)]
    return other


def texts(rules: npt.NDArray[np.int32], count: int, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    """[count, LENGTH]: a dialect, a first word and what follows."""
    rows = np.zeros((count, LENGTH), np.int32)
    rows[:, 0], rows[:, 1] = rng.integers(0, 2, count), 2 + rng.integers(0, WORDS, count)
    for at in range(2, LENGTH):
        rows[:, at] = rules[rows[:, 0], rows[:, at - 1]]
    return rows


def new_target() -> MLXTarget:
    return tiny_target("llama", num_hidden_layers=2, vocab_size=64, tie_word_embeddings=True)


def teach(target: MLXTarget, rules: npt.NDArray[np.int32], steps: int) -> None:
    """Let the target learn the rules."""
    rng, model = np.random.default_rng(0), target.model
    optimizer = optim.AdamW(learning_rate=3e-3)

    def loss(model: nn.Module, rows: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(rows[:, :-1])[:, 1:], rows[:, 2:]).mean()

    gradient = nn.value_and_grad(model, loss)
    for _ in range(steps):
        _, slopes = gradient(model, mx.array(texts(rules, 48, rng)))
        optimizer.update(model, slopes)
        mx.eval(model.parameters(), optimizer.state)


def answers_of(target: MLXTarget, count: int, seed: int = 1) -> list[Answer]:
    """The target's own greedy answers; a prompt is a dialect and a word."""
    rng = np.random.default_rng(seed)
    rows = np.stack([rng.integers(0, 2, count), 2 + rng.integers(0, WORDS, count)], axis=1)
    for _ in range(LENGTH - 2):
        following = mx.argmax(target.model(mx.array(rows))[:, -1], axis=-1)
        rows = np.concatenate([rows, np.array(following)[:, None]], axis=1)
    return [Answer(tuple(row[:2].tolist()), tuple(row[2:].tolist()), 0.0) for row in rows]


def new_drafter(seed: int = 0) -> DraftNetwork:
    """Random weights of a usual size."""
    mx.random.seed(seed)
    config = small_network(
        vocab_size=64,
        num_target_layers=2,
        block_size=4,
        dflash_config={"mask_token_id": 63, "target_layer_ids": [0, 1]},
    ).config
    network = DraftNetwork(config, name="new")
    network.norm.weight *= 0.1  # rows of the tiny head are long: logits of a usual size
    return network
