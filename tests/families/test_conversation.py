"""Conversations kept with every kind of cache: each turn's text is that of mlx-lm's own loop over the same ids."""

from collections.abc import Sequence

import pytest

from dflash_mlx.conversation import Conversations, mark, state_of
from dflash_mlx.core import SamplingParams
from dflash_mlx.target import kept
from tests.families.support import SAMPLED, decoder, family_of, plain, tokens_of
from tests.kit.families import FAMILIES
from tests.kit.models import VOCAB
from tests.kit.planned import PlannedDrafter

FIRST = [(31 * j * j + 7 * j + 3) % VOCAB for j in range(40)]  # longer than any window of the models
FAST = ["gemma3_text", "qwen3_5"]


class Turns:
    """Turns over one store, without text."""

    def __init__(self, name: str):
        self.target = family_of(name)
        self.store = Conversations(10**9)

    def take(
        self, prompt: Sequence[int], settled: int, plan: Sequence[int], count: int, rounds: int | None = None
    ) -> tuple[list[int], list[int], int]:
        """Answer a prompt, leaving after so many rounds; gives the tokens, the truth and how many were re-used."""
        params: SamplingParams = SAMPLED
        truth = plain(self.target, params, count, prompt)
        drafter = PlannedDrafter([*prompt, *truth], plan, vocab_size=VOCAB)
        start = self.store.resume(prompt, self.target, drafter)
        assert drafter.context_length == start.reused < len(prompt)
        made = decoder(self.target, drafter, params, count, held=start.cache)
        made.ids = list(prompt[: start.reused])
        marks = list(start.marks)
        if start.reused < settled:
            list(made.read(prompt[start.reused : settled]))
            marks.append(mark(made.cache, drafter, settled))
        list(made.prefill(prompt[len(made.ids) :]))
        stream, seen = made.rounds(), []
        for number, one in enumerate(stream, 1):
            seen.append(one)
            if number == rounds:
                break
        stream.close()
        state = state_of(self.target, made.cache, drafter, made.ids, marks)
        assert state is not None and list(state.ids) == made.ids[:-1]
        self.store.keep(state)
        return tokens_of(seen), truth, start.reused


def _converse(name: str) -> None:
    """Five turns: one that goes on, one that is left, one whose history was rewritten, one undone, a new talk."""
    turns = Turns(name)
    told, truth, _ = turns.take(FIRST, 38, [3, 0, 7, 1], 13)
    assert told == truth
    second = [*FIRST, *told, 9, 8, 7, 6]
    told, truth, reused = turns.take(second, len(second) - 2, [7, 2], 12, rounds=3)
    assert told == truth[: len(told)] and reused == len(FIRST) + 12
    third = [*second, *told, 5, 4, 3]
    told, truth, reused = turns.take(third, len(third) - 2, [1, 7, 0], 9)
    assert told == truth and reused == len(third) - 4
    rewritten = [*third[:-2], 11, 12, 13, 14]
    told, truth, reused = turns.take(rewritten, len(rewritten) - 1, [2, 5], 8)
    assert told == truth and reused == len(third) - 2, "the last two tokens of the prompt were taken back"
    undone = [*second[:-3], 20, 21, 22]
    told, truth, reused = turns.take(undone, len(undone) - 1, [4], 8)
    goes_back = kept.goes_back(turns.target.make_cache())
    assert told == truth and reused == (len(undone) - 3 if goes_back else 0)
    other = [*FIRST[:4], 1, 2, 3]
    told, truth, _ = turns.take(other, len(other) - 1, [6], 30)
    assert told == truth
    told, truth, reused = turns.take([*rewritten, *[50, 51]], len(rewritten), [3], 8)
    assert told == truth


@pytest.mark.parametrize("name", FAST)
def test_every_turn_is_that_of_a_cold_run(name: str) -> None:
    _converse(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(FAST)))
def test_every_turn_is_that_of_a_cold_run_in_every_family(name: str) -> None:
    _converse(name)
