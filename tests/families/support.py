"""Decoding with planned drafters, plain decoding, and what a cache shows to the next pass."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache

from dflash_mlx.core import Cut, Round, SamplingParams
from dflash_mlx.decoding import Decoder, Meter
from dflash_mlx.policy import WholeBlock
from dflash_mlx.sampling import Sampler
from dflash_mlx.target import MLXTarget, plain_tokens
from dflash_mlx.target import caches as target_caches
from tests.kit.families import family
from tests.kit.models import VOCAB
from tests.kit.planned import PlannedDrafter

BLOCK = 8
GREEDY = SamplingParams(seed=1)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=11)
PENALISED = SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, min_p=0.02, seed=5)
PROMPT = [(31 * j * j + 7 * j + 3) % VOCAB for j in range(21)]  # longer than any window of the models

family_of = cache(family)


def first_fast(*names: str) -> list[Any]:
    """Parameters of which only the first is part of the default run."""
    first, *others = names
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@cache
def truth_of(name: str, params: SamplingParams, count: int) -> list[int]:
    """What mlx-lm's own loop says."""
    return plain(family_of(name), params, count)


def plain(target: MLXTarget, params: SamplingParams, count: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    sampler = Sampler(params)
    return list(
        plain_tokens(
            target,
            prompt,
            max_new_tokens=count,
            draw=sampler.draw,
            draw_whole=sampler.draw_whole,
            prefill_chunk=5,
        )
    )


def planned(truth: Sequence[int], plan: Sequence[int], taps: tuple[int, ...] = (0, 2)) -> PlannedDrafter:
    """Right for `plan[i]` tokens in round i."""
    return PlannedDrafter([*PROMPT, *truth], plan, vocab_size=VOCAB, taps=taps, block_size=BLOCK)


def decoder(
    target: MLXTarget,
    drafter: PlannedDrafter | None,
    params: SamplingParams,
    budget: int,
    *,
    prefill_chunk: int = 5,
    held: Any = None,
) -> Decoder:
    seen: list[int] = []

    def cut(tokens: Sequence[int]) -> Cut:
        keep = min(len(tokens), budget - len(seen))
        seen.extend(tokens[:keep])
        return Cut(keep, "length" if len(seen) == budget else None)

    return Decoder(
        target=target,
        cache=target.make_cache() if held is None else held,
        drafter=drafter,
        sampler=Sampler(params),
        cut=cut,
        policy=WholeBlock(),
        max_new_tokens=budget,
        block_size=BLOCK,
        prefill_chunk=prefill_chunk,
        meter=Meter(),
        ids=[],
    )


def run(made: Decoder, prompt: Sequence[int] = PROMPT) -> list[Round]:
    list(made.prefill(prompt))
    return list(made.rounds())


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    return [token for one in rounds for token in one.tokens]


def drafted(
    target: MLXTarget,
    truth: Sequence[int],
    plan: Sequence[int],
    params: SamplingParams,
    *,
    prefill_chunk: int = 5,
) -> list[int]:
    made = decoder(target, planned(truth, plan), params, len(truth), prefill_chunk=prefill_chunk)
    return tokens_of(run(made))


def read(target: MLXTarget, *pieces: Sequence[int]) -> Any:
    """A cache that has read the pieces, one pass each."""
    held = target.make_cache()
    for ids in filter(None, pieces):
        mx.eval(target.verify(mx.array(list(ids)), held, ()).logits)
    return held


def stepped(target: MLXTarget, ids: Sequence[int], held: Any = None) -> Any:
    """A cache that has read the ids one by one, by mlx-lm's forward alone; a fresh one if none is given."""
    held = target.make_cache() if held is None else held
    for token in ids:
        mx.eval(target.forward(mx.array([[token]]), held))
    return held


def visible(held: Any) -> list[mx.array]:
    """What the next pass reads of a cache: rows of a ring in temporal order and only those in its window."""
    shown: list[mx.array] = []
    for layer in target_caches.parts(held):
        if isinstance(layer, ArraysCache):
            shown += layer.cache
        elif isinstance(layer, RotatingKVCache):
            rows = [layer._temporal_order(rows) for rows in (layer.keys, layer.values)]
            last = min(layer.offset, layer.max_size - 1) - layer.keep
            shown += [mx.concatenate([r[..., : layer.keep, :], r[..., -last:, :]], axis=2) for r in rows]
        else:
            rows = layer.keys_and_values()
            if isinstance(layer, ChunkedKVCache):  # its front is dropped when the next pass begins
                rows = [array[..., -layer.chunk_size :, :] for array in rows]
            shown += [array for _, array in tree_flatten(rows)]
    return shown


def distance(held: Any, other: Any) -> float:
    """The largest difference of two states, relative to the largest number of the array it is in."""
    assert len(visible(held)) == len(visible(other)) > 0
    furthest = 0.0
    for a, b in zip(visible(held), visible(other), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        furthest = max(furthest, (mx.abs(a - b).max() / mx.abs(b).max()).item())
    return furthest
