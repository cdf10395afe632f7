"""Listening to a model's own forward, without a copy of it and without a trace left behind.

For the length of a `with` block the layers asked for have a subclass of their own class that does one thing
more: record an output, or stop at an input. Parameter tree, names and forward stay the model's. The caller holds
the model's lock, since a class is swapped on the instance.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Subclass = Callable[[type[nn.Module]], type[nn.Module]]


class Reached(BaseException):
    """Raised by a stopping layer: the rows that entered it."""

    def __init__(self, rows: mx.array):
        super().__init__()
        self.rows = rows


@contextmanager
def recording(layers: Sequence[nn.Module], taps: Sequence[int]) -> Iterator[dict[int, mx.array]]:
    """Record the output of each tapped layer: yields a dict that fills up as the forward runs."""
    outputs: dict[int, mx.array] = {}

    def keep(index: int, output: Any) -> Any:
        outputs[index] = output[0] if isinstance(output, tuple) else output
        return output

    with _listening([(layers[i], _recorder, functools.partial(keep, i)) for i in dict.fromkeys(taps)]):
        yield outputs


@contextmanager
def stopping(layer: nn.Module) -> Iterator[None]:
    """Make the layer raise `Reached` with what enters it instead of running."""

    def stop(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise Reached(next(a for a in (*args, *kwargs.values()) if isinstance(a, mx.array)))

    with _listening([(layer, _stopper, stop)]):
        yield


@contextmanager
def returning(module: nn.Module, output: mx.array) -> Iterator[None]:
    """Make the module return `output` instead of running."""
    with _listening([(module, _returner, lambda: output)]):
        yield


@contextmanager
def swapped(swaps: Sequence[tuple[nn.Module, Subclass]]) -> Iterator[None]:
    """Give each module the subclass that is made of its class, and its own class back at the end."""
    originals = [type(module) for module, _ in swaps]
    try:
        for module, subclass in swaps:
            module.__class__ = subclass(type(module))
        yield
    finally:
        for (module, _), original in zip(swaps, originals, strict=True):
            module.__class__ = original


def named_like(base: type[nn.Module], **methods: Any) -> type[nn.Module]:
    """A subclass with the name and place of `base`."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, **methods}
    return type(base.__name__, (base,), names)


@contextmanager
def _listening(swaps: Sequence[tuple[nn.Module, Subclass, Any]]) -> Iterator[None]:
    try:
        for module, _, listener in swaps:
            # Not an array, list or dict: those would enter the parameter tree.
            object.__setattr__(module, "_listener", listener)
        with swapped([(module, subclass) for module, subclass, _ in swaps]):
            yield
    finally:
        for module, _, _ in swaps:
            module.__dict__.pop("_listener", None)


@functools.cache
def _recorder(base: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._listener(base.__call__(self, *args, **kwargs))

    return named_like(base, __call__=call)


@functools.cache
def _stopper(base: type[nn.Module]) -> type[nn.Module]:
    return named_like(base, __call__=lambda self, *args, **kwargs: self._listener(args, kwargs))


@functools.cache
def _returner(base: type[nn.Module]) -> type[nn.Module]:
    return named_like(base, __call__=lambda self, *args, **kwargs: self._listener())
