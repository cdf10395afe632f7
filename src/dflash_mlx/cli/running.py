"""The pair that a chat runs: names and options in, a generator out, and another in its place when one is asked for.

The running pair is given up only when the other one is there, or when the memory does not hold both. Knows no
conversation; the view shows how far loading is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dflash_mlx.cli.view import View

if TYPE_CHECKING:  # the generator loads MLX
    from dflash_mlx.core import LoadStep, OnLoad
    from dflash_mlx.generator import DFlashGenerator

Factory = Callable[..., "DFlashGenerator"]


class RunningPair:
    """At most one loaded pair.

    Args:
        factory: makes generators.
        arguments: of the first one, as they were given.
        view: shows what happens.
    """

    def __init__(self, factory: Factory, arguments: Mapping[str, Any], view: View):
        self._factory = factory
        self._arguments = dict(arguments)
        self._view = view
        self._generator: DFlashGenerator | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether a message can be answered without loading anything first."""
        return self._generator is not None

    @property
    def name(self) -> str:
        """What runs, or would."""
        if self._generator is None:
            return str(self._arguments.get("target_model") or "the default pair of this machine")
        drafter = self._generator.draft_name
        return self._generator.target_name + (f" with {drafter}" if drafter else ", decoded plainly")

    def open(self) -> DFlashGenerator:
        """The generator; loaded now if there is none.

        Raises:
            DFlashError: as the generator's.
        """
        if self._generator is None:
            with self._view.loaded():
                self._generator = self._factory(
                    **self._arguments, on_note=self._view.note, on_load=self._view.loading
                )
        return self._generator

    def switch(self, target: str, draft: str | None) -> DFlashGenerator:
        """Load another pair with the same options and give up the old one.

        Raises:
            DFlashError: as the generator's; the old pair is kept, or is loaded again by the next `open`.
        """
        wanted = {**self._arguments, "target_model": target, "draft_model": draft}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        old = self._generator
        with self._view.loaded():
            new = self._factory(**self._shared(wanted), on_note=self._view.note, on_load=self._making_room)
        if old is not None and self._generator is old:
            old.close()
        self._generator, self._arguments = new, wanted
        return new

    def close(self) -> None:
        """Release what is loaded."""
        if self._generator is not None:
            self._generator.close()
        self._generator = None

    def _shared(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, with the target that is loaded already where it is the same."""
        old = self._generator
        same = old is not None and wanted["target_model"] in (
            old.target_name,
            self._arguments.get("target_model"),
        )
        return {**wanted, "target_model": old.target} if old is not None and same else dict(wanted)

    @property
    def _making_room(self) -> OnLoad:
        """Shows each step; gives the old pair up before the other's weights are read, where both do not fit."""

        def step(at: LoadStep) -> None:
            old = self._generator
            if old is not None and at.stage == "read" and at.role == "target":
                if short := _too_much(old.weights_gb, at.pair_nbytes):
                    self._view.say(f"{short}: {self.name} is given up first.")
                    self.close()
            self._view.loading(at)

        return step

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def on_this_machine() -> list[str]:
    """The pairs and other models that can be loaded without fetching anything, a line each."""
    from dflash_mlx import runtime
    from dflash_mlx.loading import catalogue, hub

    pairs = catalogue.known_pairs(runtime.machine())
    here = [pair for pair in pairs if pair.target_here == "yes"]
    lines = [
        f"{pair.alias}: {pair.target}"
        + (f" with {pair.draft}" if pair.draft_here == "yes" else ", no drafter here")
        for pair in here
    ]
    known = {name for pair in pairs for name in (pair.target, pair.draft)}
    return lines + [
        name for name in hub.cached_repos() if name not in known and hub.cached(name, tokenizer=True)
    ]


def known_names() -> list[str]:
    """Aliases that /model takes."""
    from dflash_mlx.loading import PAIRS

    return [pair.alias for pair in PAIRS]


def _too_much(held_gb: float, wanted: int | None) -> str | None:
    """A sentence's beginning where both pairs are more than this machine should hold, as far as that is known."""
    if wanted is None:
        return None
    from dflash_mlx import runtime
    from dflash_mlx.loading.memory import recommended_bytes

    limit = recommended_bytes(runtime.machine()) / runtime.GB
    both = held_gb + wanted / runtime.GB
    if both <= limit:
        return None
    return f"Both pairs together take {both:.1f} GB of the {limit:.1f} GB that this machine should hold"
