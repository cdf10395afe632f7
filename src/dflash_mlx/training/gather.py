"""The data stage: a target and prompts in, a folder of the target's own answers out.

Shard by shard, so that a stopped run loses one shard at most and goes on where it was. Knows no drafter.
"""

import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from dflash_mlx.errors import UsageError, WriteError
from dflash_mlx.loading import LoadedTarget, render
from dflash_mlx.loading.turns import check_template, user_turn
from dflash_mlx.runtime import GB
from dflash_mlx.target.batched import Drawing, Finished, batched_answers
from dflash_mlx.target.quick import quick_forward
from dflash_mlx.training.gather_estimate import BYTES_PER_TOKEN, estimate, work_left
from dflash_mlx.training.identity import identity
from dflash_mlx.training.manifest import AnswerFolder, Counts
from dflash_mlx.training.prompts import Prompt, asked, digest
from dflash_mlx.training.records import Answer
from dflash_mlx.training.stream import OWN, Fresh, Mixture, Slot, shuffled, slots, template_prompts

_OWN_TOKENS = 64  # most in a prompt that the target makes up
_OWN_LEAST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How answers are made; a folder is of one recipe."""

    max_answer_tokens: int = 512
    max_prompt_tokens: int = 2048  # longer prompts are left out
    sampled_share: float = 0.3  # of the answers that are drawn; the others are greedy
    temperature: float = 0.7  # of those that are drawn
    min_p: float = 0.02  # the tail that is never drawn, relative to the most probable token
    own_share: float = 0.12  # of prompts that the target makes up itself, at temperature 1
    seed: int = 0
    shard_prompts: int = 256
    batch_size: int = 32  # may differ from run to run: answers do not hang on it

    def check(self) -> None:
        """Refuse what means nothing.

        Raises:
            UsageError: naming the value and what was expected.
        """
        for name in ("max_answer_tokens", "max_prompt_tokens", "shard_prompts", "batch_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; expected 1 or more.")
        for name, below in (("sampled_share", 1.0), ("min_p", 1.0), ("own_share", 0.9)):
            if not 0 <= getattr(self, name) <= below:
                raise UsageError(f"{name} is {getattr(self, name)}; expected a number from 0 to {below:g}.")
        if self.temperature <= 0:
            raise UsageError(
                f"temperature is {self.temperature}; expected a number above 0 for drawn answers."
            )


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the gathering is."""

    answers: int
    tokens: int  # of answers, those of earlier runs included
    goal: int
    tokens_per_second: float  # of this run
    seconds_left: float | None  # None: nothing measured yet


@dataclass(frozen=True, slots=True)
class Gathered:
    """What the folder holds now."""

    folder: Path
    counts: Counts
    new_answers: int
    seconds: float
    notes: tuple[str, ...]


def gather(
    target: LoadedTarget,
    folder: str | Path,
    *,
    tokens: int,
    prompts: Sequence[Prompt] = (),
    think: bool | None = None,
    recipe: Recipe | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    tell: Callable[[str], None] = lambda text: None,
) -> Gathered:
    """Let the target answer until the folder holds so many answer tokens.

    Args:
        target: exactly the one that the drafter is for: these weights, this template.
        folder: for shards and manifest; one that was begun with the same target and recipe goes on.
        tokens: of answers, held-out ones included; a larger number than before makes the folder grow.
        prompts: each is asked once; none: prompts are made up from templates.
        think: the thinking mode of the template; None takes that of the known pair, else the template's default.
        recipe: how answers are made.
        on_progress: told after each pass.
        tell: told what it will take, before it begins.

    Raises:
        UsageError: a target that cannot be asked, or a folder of another target or recipe.
        WriteError: a folder or shard that cannot be written; whole shards stay.
    """
    recipe = recipe or Recipe()
    recipe.check()
    if tokens < 1:
        raise UsageError(f"tokens is {tokens}; expected 1 or more tokens of answers.")
    check_template(target.tokenizer, target.name)
    run = _Gathering(target, Path(folder), tokens, prompts, think, recipe, on_progress)
    with quick_forward(target.model.model, target.model.dtype):
        return run.gathered(tell)


class _Gathering:
    """One run."""

    def __init__(
        self,
        target: LoadedTarget,
        folder: Path,
        tokens: int,
        prompts: Sequence[Prompt],
        think: bool | None,
        recipe: Recipe,
        on_progress: Callable[[Progress], None],
    ):
        known = target.known.thinking if target.known else None
        self.think = known if think is None else think
        self.target, self.goal, self.recipe, self.on_progress = target, tokens, recipe, on_progress
        self.prompts = shuffled(prompts, recipe.seed)
        self.notes: list[str] = []
        self.mixture = self._mixture()
        about = {
            **{name: value for name, value in asdict(recipe).items() if name != "batch_size"},
            "own_share": self.mixture.own_share,
            "prompts": len(prompts),
            "prompts_digest": digest(prompts) if prompts else None,
        }
        self.folder = AnswerFolder(folder, identity(target, think=self.think), about)
        self.started = time.perf_counter()
        self.new_tokens = self.in_shard = 0

    def gathered(self, tell: Callable[[str], None]) -> Gathered:
        self.counts, seen = self.folder.read(self.target.eos_ids)
        before = self.counts.answers
        limit = self.target.model.max_positions or self.recipe.max_prompt_tokens
        most = min(self.recipe.max_prompt_tokens, limit - self.recipe.max_answer_tokens)
        if most < 1:
            raise UsageError(
                f"{self.target.name} takes {limit} tokens, and answers of {self.recipe.max_answer_tokens} leave no "
                "room for a prompt; take a smaller max_answer_tokens."
            )
        for prompt in self.prompts:
            self._render(prompt)
        self._check_disk()
        # Claims the folder for this recipe: whatever is refused was refused before.
        self.folder.start(self.counts)
        fresh = Fresh(seen, self._render, most)
        if self.counts.answer_tokens < self.goal:
            tell(self._foreseen())
        while self.counts.answer_tokens < self.goal:
            answers = list(self._shard(self.counts.shards, fresh))
            if not answers:
                self.notes.append(
                    f"The prompts are used up after {self.counts.answer_tokens:,} of {self.goal:,} tokens; give more "
                    "of them, or raise own_share or max_answer_tokens in a new folder."
                )
                break
            self.folder.write(answers, self.counts, self.target.eos_ids)
            self.in_shard = 0
            self._tell(0)
        if fresh.too_long:
            self.notes.append(f"{fresh.too_long} prompts of more than {most} tokens were left out.")
        seconds = time.perf_counter() - self.started
        return Gathered(
            self.folder.path, self.counts, self.counts.answers - before, seconds, tuple(self.notes)
        )

    def _mixture(self) -> Mixture:
        recipe = self.recipe
        self.turn = user_turn(self.target.tokenizer) if recipe.own_share else None
        own = recipe.own_share if self.turn else 0.0
        if recipe.own_share and not self.turn:
            self.notes.append(
                f"The template of {self.target.name} does not tell where a user's words stand: it makes up no prompts."
            )
        return Mixture(
            seed=recipe.seed, own_share=own, sampled_share=recipe.sampled_share, given=len(self.prompts)
        )

    def _check_disk(self) -> None:
        missing = max(0, self.goal - self.counts.answer_tokens) * BYTES_PER_TOKEN
        free = shutil.disk_usage(self.folder.path).free
        if free < missing:
            raise WriteError(
                f"{self.folder.path} has {free / GB:.2f} GB free, and {self.goal:,} tokens of answers take about "
                f"{missing / GB:.2f} GB more; make room, or gather fewer tokens."
            )

    def _foreseen(self) -> str:
        """What is there, and what the rest will take."""
        some = self.prompts[: self.recipe.batch_size]
        some = some or [next(template_prompts(self.recipe.seed, i)) for i in range(self.recipe.batch_size)]
        missing = self.goal - self.counts.answer_tokens
        recipe = self.recipe
        batches = math.ceil(_tries(round(self.mixture.own_share * recipe.shard_prompts)) / recipe.batch_size)
        needs = estimate(
            self.target,
            [self._render(prompt)[-recipe.max_prompt_tokens :] for prompt in some],
            work_left(
                missing,
                shard_answers=recipe.shard_prompts,
                own_passes=batches * _OWN_TOKENS,  # one in each batch comes to no end
                max_answer_tokens=recipe.max_answer_tokens,
                known=(self.counts.answers, self.counts.answer_tokens),
            ),
            batch_size=recipe.batch_size,
            max_answer_tokens=recipe.max_answer_tokens,
        )
        self.started = time.perf_counter()
        begun = f"{self.counts.answer_tokens:,} tokens of answers are there; " if self.counts.answers else ""
        return f"{begun}gathering {missing:,} tokens of answers will take {needs.sentence()}."

    def _render(self, prompt: Prompt) -> list[int]:
        try:
            return render(self.target.tokenizer, prompt.messages, think=self.think)
        except UsageError as error:
            raise UsageError(f"{prompt.place}: {error}") from None

    def _shard(self, shard: int, fresh: Fresh) -> Iterator[Answer]:
        """The answers of one shard, in the order of its places."""
        places = slots(self.mixture, shard, self.recipe.shard_prompts)
        own = self._made_up(sum(slot.source == "own" for slot in places), shard)
        taken: list[tuple[Prompt, list[int], bool]] = []
        for slot in places:
            if found := fresh.first(self._offers(slot, own)):
                taken.append((*found, slot.sampled))
        temperatures = [self.recipe.temperature if sampled else 0.0 for _, _, sampled in taken]
        answered = self._answers(
            [ids for _, ids, _ in taken],
            temperatures,
            (shard, "answers"),
            self.recipe.max_answer_tokens,
            on_tokens=self._tell,
        )
        by_prompt = {one.prompt: one.ids for one in answered}
        for index, (prompt, ids, _) in enumerate(taken):
            yield Answer(tuple(ids), by_prompt[index], temperatures[index], prompt.prompt_class)

    def _offers(self, slot: Slot, own: Iterator[Prompt]) -> Iterator[Prompt]:
        if slot.source == "given":
            return iter([self.prompts[slot.number]])
        if slot.source == "own":
            return (prompt for prompt in [next(own, None)] if prompt)
        return template_prompts(self.recipe.seed, slot.number)

    def _made_up(self, count: int, shard: int) -> Iterator[Prompt]:
        """Prompts that the target writes when it continues an empty question; what comes to no end is dropped."""
        if not count or self.turn is None:
            return
        tries = _tries(count)
        found = self._answers(
            [self.turn.opening] * tries,
            [1.0] * tries,
            (shard, "prompts"),
            _OWN_TOKENS,
            stop_ids=self.turn.stop_ids,
        )
        tokenizer = self.target.tokenizer
        specials = set(tokenizer.all_special_ids)
        for one in sorted(found):
            words = one.ids[:-1]
            text = tokenizer.decode(list(words)).strip()
            if one.stopped and len(words) >= _OWN_LEAST and text and specials.isdisjoint(words):
                yield asked(text, OWN, "a prompt of the target's own")

    def _answers(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        seed: tuple[int, str],
        most: int,
        *,
        stop_ids: Sequence[int] | None = None,
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> Iterator[Finished]:
        """What the target says, as it is complete; `seed` tells these draws from those of others."""
        random = Random(f"{self.recipe.seed}:{seed}")
        drawings = [
            Drawing(temperature=temperature, min_p=self.recipe.min_p, seed=random.getrandbits(32))
            for temperature in temperatures
        ]
        return batched_answers(
            self.target.model,
            prompts,
            stop_ids=self.target.eos_ids if stop_ids is None else stop_ids,
            max_new_tokens=most,
            drawings=drawings,
            batch_size=self.recipe.batch_size,
            on_tokens=on_tokens,
        )

    def _tell(self, count: int) -> None:
        self.new_tokens += count
        self.in_shard += count
        speed = self.new_tokens / (time.perf_counter() - self.started)
        done = self.counts.answer_tokens + self.in_shard
        left = max(0, self.goal - done) / speed if speed else None
        self.on_progress(Progress(self.counts.answers, done, self.goal, speed, left))


def _tries(count: int) -> int:
    """Prompts begun for so many wanted: some come to no end."""
    return count + count // 2
