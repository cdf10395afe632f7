"""What one generation is asked for: options and prompt, checked before any model work."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dflash_mlx import sampling
from dflash_mlx.core import SamplingParams
from dflash_mlx.errors import UsageError
from dflash_mlx.sampling import LogitsProcessor
from dflash_mlx.text import check_stop_strings

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""Text for the chat template, or messages, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one generation; each is honoured or refused."""

    max_new_tokens: int = 2048
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: a fresh one, reported in the stats
    stop: str | Sequence[str] = ()
    system: str | None = None
    think: bool | None = None  # None: as the drafter was trained
    raw: bool = False  # a text prompt goes to the model as it is, without the chat template
    logits_processors: Sequence[LogitsProcessor] = ()
    profile: bool = False  # measure drafting and verifying with barriers

    @classmethod
    def checked(cls, options: Mapping[str, Any]) -> "Options":
        """Build from keyword arguments.

        Raises:
            TypeError: an unknown name, as for any function.
            UsageError: a value out of range, naming what was found and expected.
        """
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise TypeError(f"unknown option '{name}'; the options are {', '.join(known)}")
        made = cls(**options)
        _check_integer("max_new_tokens", made.max_new_tokens, least=1)
        _check_integer("top_k", made.top_k, least=0)
        if made.seed is not None:
            _check_integer("seed", made.seed, least=0)
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            value = getattr(made, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"{name} is {value!r}; expected a number.")
        for name, kind, expected in (
            ("raw", bool, "True or False"),
            ("profile", bool, "True or False"),
            ("think", bool | None, "True, False or None"),
            ("system", str | None, "text"),
        ):
            if not isinstance(value := getattr(made, name), kind):
                raise UsageError(f"{name} is {value!r}; expected {expected}.")
        if not isinstance(made.logits_processors, Sequence) or not all(map(callable, made.logits_processors)):
            raise UsageError(
                f"logits_processors is {made.logits_processors!r}; expected a list of functions of tokens and logits."
            )
        check_stop_strings(made.stop)
        sampling.check(made.sampling(0))
        return made

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return check_stop_strings(self.stop)

    def sampling(self, seed: int) -> SamplingParams:
        """The part that the draws are made of."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation, ready to run."""

    prompt: list[int]
    settled: int  # so many tokens of it begin the next turn's prompt too; at most all but the last
    inside_thought: bool  # the prompt ends with an opening think tag
    params: SamplingParams
    budget: int  # new tokens, the context limit respected
    options: Options
    notes: tuple[str, ...]


def fresh_seed() -> int:
    """A seed nobody chose."""
    return secrets.randbits(32)


def as_messages(prompt: Prompt, system: str | None) -> list[Mapping[str, Any]] | None:
    """A text or messages as messages, the system text first; None for token ids.

    Raises:
        UsageError: nothing to answer, or something that is no prompt.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UsageError("The prompt is empty; expected some text, messages or token ids.")
        messages: list[Mapping[str, Any]] = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        if len(prompt) == 0:
            raise UsageError("The prompt is empty; expected some text, messages or token ids.")
        if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            return None
        if not all(isinstance(item, Mapping) for item in prompt):
            raise UsageError(
                "The prompt is a list of neither messages (mappings) nor token ids (whole numbers)."
            )
        messages = [item for item in prompt if isinstance(item, Mapping)]
    else:
        raise UsageError(f"The prompt is a {type(prompt).__name__}; expected text, messages or token ids.")
    if system is None:
        return messages
    if messages[0].get("role") == "system":
        raise UsageError("There is a system message and a `system` option; give one of them.")
    return [{"role": "system", "content": system}, *messages]


def _check_integer(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} is {value!r}; expected a whole number from {least} up.")
