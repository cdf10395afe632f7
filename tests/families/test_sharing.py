"""One hybrid target and several drafters: one text, whoever drafts, in whatever order, on whatever thread."""

import threading
from collections.abc import Callable
from itertools import zip_longest

import mlx.core as mx
import pytest

from dflash_mlx.core import Round, SamplingParams
from dflash_mlx.decoding import Decoder
from dflash_mlx.target import MLXTarget
from tests.families.support import (
    GREEDY,
    PROMPT,
    SAMPLED,
    decoder,
    family_of,
    first_fast,
    planned,
    run,
    tokens_of,
    truth_of,
)

COUNT = 48
DRAFTERS = {"perfect": [7], "always wrong": [0], "half right": [7, 0, 3, 4]}
HYBRIDS = first_fast("qwen3_5", "gpt_oss", "nemotron_h")


@pytest.mark.parametrize("name", HYBRIDS)
def test_three_drafters_on_one_hybrid_target_give_one_text(name: str) -> None:
    """One after the other on one target, with caches of their own; how much they accept differs, the text does not."""
    target, truth = family_of(name), truth_of(name, SAMPLED, COUNT)
    rounds = {}
    for drafter, plan in DRAFTERS.items():
        rounds[drafter] = run(decoder(target, planned(truth, plan), SAMPLED, COUNT))
        assert tokens_of(rounds[drafter]) == truth, drafter
    counts = [len(rounds[drafter]) for drafter in ("perfect", "half right", "always wrong")]
    assert counts[0] < counts[1] < counts[2] == COUNT


def two(name: str) -> list[Callable[[], tuple[Decoder, list[mx.array]]]]:
    """Two ways to decode with one model: other taps, another plan, other draws, another prompt chunk."""
    shared = family_of(name)
    other = MLXTarget(shared.model, shared.config, "other")

    def make(
        target: MLXTarget, params: SamplingParams, plan: list[int], taps: tuple[int, ...], chunk: int
    ) -> Callable[[], tuple[Decoder, list[mx.array]]]:
        def made() -> tuple[Decoder, list[mx.array]]:
            drafter = planned(truth_of(name, params, COUNT), plan, taps)
            return decoder(target, drafter, params, COUNT, prefill_chunk=chunk), drafter.features

        return made

    return [make(shared, GREEDY, [2, 7, 7, 0], (0, 2), 5), make(other, SAMPLED, [0, 5, 7, 1], (3, 1, 2), 4)]


def alone(make: Callable[[], tuple[Decoder, list[mx.array]]]) -> tuple[list[int], mx.array]:
    made, features = make()
    rounds = run(made)
    return tokens_of(rounds), mx.concatenate(features)


def same(got: tuple[list[int], mx.array], expected: tuple[list[int], mx.array]) -> bool:
    return got[0] == expected[0] and mx.array_equal(got[1], expected[1]).item()


@pytest.mark.parametrize("name", HYBRIDS)
def test_two_generations_with_different_taps_interleaved_are_those_of_each_alone(name: str) -> None:
    """Round by round, on one model: texts and tapped features, bit by bit."""
    makers = two(name)
    expected = [alone(make) for make in makers]
    running = [make() for make in makers]
    streams = [made.rounds() for made, _ in running]
    prefills = [made.prefill(PROMPT) for made, _ in running]
    list(zip_longest(*prefills))
    rounds: list[list[Round]] = [[], []]
    for turn in zip_longest(*streams):
        for got, one in zip(rounds, turn, strict=True):
            got += [one] if one else []
    for got, (_, features), awaited in zip(rounds, running, expected, strict=True):
        assert same((tokens_of(got), mx.concatenate(features)), awaited)


@pytest.mark.parametrize("name", HYBRIDS)
def test_two_generations_with_different_taps_on_two_threads_are_those_of_each_alone(name: str) -> None:
    makers = two(name)
    expected = [alone(make) for make in makers]
    got: dict[int, tuple[list[int], list[float]]] = {}
    failed: list[BaseException] = []

    def work(index: int) -> None:
        try:
            tokens, features = alone(makers[index])
            got[index] = tokens, features.tolist()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert [got[i] for i in (0, 1)] == [(tokens, features.tolist()) for tokens, features in expected]


@pytest.mark.parametrize("name", first_fast("qwen3_5", "gpt_oss"))
def test_a_generation_begun_on_one_thread_goes_on_on_another(name: str) -> None:
    """Nothing lazy is left behind between rounds, replayed states included."""
    truth = truth_of(name, SAMPLED, COUNT)
    made = decoder(family_of(name), planned(truth, [3, 0, 7]), SAMPLED, COUNT)
    list(made.prefill(PROMPT))
    stream = made.rounds()
    rounds = [next(stream) for _ in range(4)]
    thread = threading.Thread(target=lambda: rounds.extend(stream))
    thread.start()
    thread.join()
    assert tokens_of(rounds) == truth
