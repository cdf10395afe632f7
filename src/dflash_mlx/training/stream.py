"""Which prompts make up which shard: prompts, shares and a seed in, the same prompts for the same shard every time.

Every place of the endless list has a random generator of its own, so a stopped run can go on at any shard. Nothing
is answered here; prompts that the target makes up come from outside.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

from dflash_mlx.training.prompts import Prompt, asked
from dflash_mlx.training.templates import made_up

OWN = "own"  # the class of prompts that the target makes up

Source = Literal["given", "template", "own"]
_TRIES = 20  # at a template, until it gives something new


class Slot(NamedTuple):
    """One place of the list."""

    source: Source
    sampled: bool  # answered by drawing, not greedily
    number: int  # of the given prompt in its shuffled order; else of the place


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Shares of the list."""

    seed: int
    own_share: float  # of prompts that the target makes up
    sampled_share: float
    given: int  # prompts that were given; 0: templates stand in


def slots(mixture: Mixture, shard: int, size: int) -> list[Slot]:
    """The places of a shard; fewer than `size`, or none, where the given prompts come to their end."""
    found: list[Slot] = []
    used = 0
    for place in range((shard + 1) * size):
        random = Random(f"{mixture.seed}:{place}")
        own, sampled = random.random() < mixture.own_share, random.random() < mixture.sampled_share
        if mixture.given and not own:
            if used == mixture.given:
                break
            used += 1
        if place >= shard * size:
            source: Source = "own" if own else "given" if mixture.given else "template"
            found.append(Slot(source, sampled, used - 1 if source == "given" else place))
    return found


def shuffled(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """The given prompts in the order in which they are asked."""
    order = list(prompts)
    Random(f"{seed}:order").shuffle(order)
    return order


def template_prompts(seed: int, place: int) -> Iterator[Prompt]:
    """What a place offers, in case the first is known already."""
    random = Random(f"{seed}:{place}:words")
    for _ in range(_TRIES):
        text, kind = made_up(random)
        yield asked(text, kind, f"template {place}")


class Fresh:
    """Takes prompts that are new and short enough; remembers what it took.

    Args:
        seen: hashes of the prompts of earlier shards; grows.
        render: a prompt to its ids.
        most_tokens: of a prompt.
    """

    def __init__(self, seen: set[int], render: Callable[[Prompt], list[int]], most_tokens: int):
        self._seen, self._render, self._most = seen, render, most_tokens
        self.repeated = 0
        self.too_long = 0

    def first(self, prompts: Iterator[Prompt]) -> tuple[Prompt, list[int]] | None:
        """The first of these that is new, with its ids."""
        for prompt in prompts:
            ids = self._render(prompt)
            if len(ids) > self._most:
                self.too_long += 1
            elif (key := hash(tuple(ids))) in self._seen:
                self.repeated += 1
            else:
                self._seen.add(key)
                return prompt, ids
        return None
