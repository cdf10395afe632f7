"""Listening to what recurrent layers take in during a pass, so that a part of its rows can be run again.

In: a model. Out: for every array that its recurrent layers left in a cache, in the order in which they ran, what
made it. For the length of a pass the layers have a subclass of their own class that runs the stock code object
with mlx-lm's update function rebound to one that also remembers its arguments, and convolutions one that
remembers its input: nothing is copied, and no class or function of mlx-lm changes. The caller holds the model's
lock. Knows no cache.
"""

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update
from mlx_lm.models.ssm import ssm_update

from dflash_mlx.kernels.choice import NO_KERNELS, Choices
from dflash_mlx.target import replay, taps

MOST_ROWS = 64  # of a pass that is recorded: blocks are, a prompt's chunk would only hold memory

_UPDATES: dict[
    str, tuple[Callable[..., Any], tuple[str, ...]]
] = {  # and which arguments have a row for each token
    "gated_delta_update": (gated_delta_update, ("q", "k", "v", "a", "b", "mask")),
    "ssm_update": (ssm_update, ("hidden_states", "B", "C", "dt", "mask")),
}


class Intake(Protocol):
    """What made one array of a recurrent cache."""

    def state(self, rows: int, of: int) -> mx.array:
        """The array after the first `rows` rows of a pass of `of`."""


class Window(NamedTuple):
    """A short convolution's input [1, K - 1 + S, C]: the window before the pass, then its rows."""

    rows: mx.array

    def state(self, rows: int, of: int) -> mx.array:
        """The last K - 1 rows seen by then."""
        kept: mx.array = self.rows[:, rows : self.rows.shape[1] - of + rows]
        return kept


class Update(NamedTuple):
    """A call of one of mlx-lm's update functions."""

    function: Callable[..., Any]
    by_row: tuple[str, ...]
    arguments: inspect.BoundArguments
    conv: mx.array | None = None  # input of the convolution right before it
    choices: Choices = NO_KERNELS

    def intake(self) -> replay.Inputs | None:
        """What a delta rule's kernel would be given; None for everything else."""
        if self.function is not gated_delta_update or self.conv is None:
            return None
        return replay.taken_in(self.arguments, self.conv)

    def state(self, rows: int, of: int) -> mx.array:
        """What the function makes of the first rows and the state before the pass, in the state's own type."""
        if self.choices.chosen and self.conv is not None and self.function is gated_delta_update:
            replayed = replay.state(self.arguments, self.conv, rows, self.choices)
            if replayed is not None:
                return replayed
        given = {
            name: value[:, :rows] if name in self.by_row and value is not None else value
            for name, value in self.arguments.arguments.items()
        }
        state: mx.array = self.function(**given)[1]
        return state


class Recorder:
    """The recurrent parts of one model; holds nothing between passes."""

    def __init__(self, model: nn.Module):
        self.choices = NO_KERNELS  # for running rows again
        self._heard: list[Intake] | None = None
        self._made: dict[type[nn.Module], type[nn.Module]] = {}
        modules = [module for layer in model.layers for _, module in layer.named_modules()]
        self._convolutions = [module for module in modules if isinstance(module, nn.Conv1d)]
        kinds = {kind for kind in {type(module) for module in modules} if _methods(kind)}
        self._updating = [module for module in modules if type(module) in kinds]

    def __len__(self) -> int:
        """Arrays that a pass is heard to leave."""
        return len(self._convolutions) + len(self._updating)

    @contextmanager
    def recording(self, rows: int) -> Iterator[list[Intake]]:
        """Record one pass: yields a list that fills up as the forward runs; of a single row there is no part."""
        heard: list[Intake] = []
        if not len(self) or not 1 < rows <= MOST_ROWS:
            yield heard
            return
        self._heard = heard
        swaps = [(module, self._listener) for module in self._convolutions]
        swaps += [(module, self._rebound) for module in self._updating]
        try:
            with taps.swapped(swaps):
                yield heard
        finally:
            self._heard = None

    def _hear(self, intake: Intake) -> None:
        if self._heard is not None:
            self._heard.append(intake)

    def _listener(self, base: type[nn.Module]) -> type[nn.Module]:
        def call(module: Any, x: mx.array) -> mx.array:
            self._hear(Window(x))
            return base.__call__(module, x)

        return self._once(base, lambda: {"__call__": call})

    def _rebound(self, base: type[nn.Module]) -> type[nn.Module]:
        return self._once(base, lambda: {name: self._with_ears(f) for name, f in _methods(base).items()})

    def _once(self, base: type[nn.Module], methods: Callable[[], dict[str, Any]]) -> type[nn.Module]:
        if base not in self._made:
            self._made[base] = taps.named_like(base, **methods())
        return self._made[base]

    def _with_ears(self, method: types.FunctionType) -> types.FunctionType:
        """The same code, that finds a listening function under the name of mlx-lm's update."""
        names = {name: self._listening(*_UPDATES[name]) for name in _updates(method)}
        made = types.FunctionType(
            method.__code__,
            {**method.__globals__, **names},
            method.__name__,
            method.__defaults__,
            method.__closure__,
        )
        made.__kwdefaults__ = method.__kwdefaults__
        return made

    def _listening(self, function: Callable[..., Any], by_row: tuple[str, ...]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def update(*args: Any, **kwargs: Any) -> Any:
            last = self._heard[-1] if self._heard else None
            conv = last.rows if isinstance(last, Window) else None
            self._hear(Update(function, by_row, signature.bind(*args, **kwargs), conv, self.choices))
            return function(*args, **kwargs)

        return update


def _methods(kind: type[nn.Module]) -> dict[str, types.FunctionType]:
    """Methods that call an update function of mlx-lm's by its global name."""
    methods = {name: getattr(kind, name) for name in dir(kind)}
    return {
        name: method
        for name, method in methods.items()
        if isinstance(method, types.FunctionType) and _updates(method)
    }


def _updates(method: types.FunctionType) -> list[str]:
    return [
        name
        for name, (stock, _) in _UPDATES.items()
        if name in method.__code__.co_names and method.__globals__.get(name) is stock
    ]
