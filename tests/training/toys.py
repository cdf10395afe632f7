"""A tiny target, a drafter of its size, and answers of its own."""

from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.drafter import DraftNetwork
from dflash_mlx.target import MLXTarget
from dflash_mlx.training.features import AnswerFeatures, FeatureComputer
from dflash_mlx.training.records import Answer
from tests.drafter.toys import random_network, toy_config
from tests.kit.models import VOCAB, tiny_target


def small_target(kind: str = "qwen3", **changes: Any) -> MLXTarget:
    return tiny_target(kind, **changes)


def small_network(*, seed: int = 0, **changes: Any) -> DraftNetwork:
    """A random drafter that fits `small_target`."""
    config = toy_config(
        **{
            "hidden_size": 64,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "head_dim": 16,
            "vocab_size": VOCAB,
            "num_target_layers": 4,
            "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 2]},
            **changes,
        }
    )
    return random_network(config, seed=seed)


def some_answers(count: int = 6, *, seed: int = 0, longest: int = 24) -> list[Answer]:
    """Random ids; all prompts begin alike."""
    rng = np.random.default_rng(seed)
    return [
        Answer(
            (5, 6, *rng.integers(0, VOCAB - 1, rng.integers(1, 5)).tolist()),
            tuple(rng.integers(0, VOCAB - 1, rng.integers(4, longest)).tolist()),
            0.0,
        )
        for _ in range(count)
    ]


def features_of(
    target: MLXTarget, network: DraftNetwork, answers: list[Answer], top_k: int = 4
) -> list[AnswerFeatures]:
    computer = FeatureComputer(target, network.config.target_layer_ids, top_k=top_k)
    return [computer.compute(answer) for answer in answers]


def as_features(item: AnswerFeatures) -> mx.array:
    """The kept rows [S - 1, F * D] as float32."""
    return mx.array(item.features).view(mx.bfloat16).astype(mx.float32)
