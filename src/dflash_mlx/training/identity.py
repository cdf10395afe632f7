"""Which target this is, whatever it is called: a loaded target in, short hashes out.

Answers and checkpoints belong to one target, its quantisation and its template; a name says nothing of these.
"""

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dflash_mlx.loading import LoadedTarget, render

_LOOKED_AT = 16  # numbers of each tensor
_QUESTION = [{"role": "user", "content": "What is the date on a calendar?"}]


@dataclass(frozen=True, slots=True)
class Identity:
    """What has to be the same for answers to be this target's."""

    name: str  # for people; two names may mean one target
    weights: str  # hash of names, shapes, types and some numbers of all tensors
    template: str  # hash of the ids of a question put through the chat template
    thinking: bool | None

    def record(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    def differences(self, other: "Identity") -> list[str]:
        """What of `other` is not as here, in words; the name does not count."""
        found = []
        if self.weights != other.weights:
            found.append("the weights")
        if self.template != other.template:
            found.append("the chat template")
        if self.thinking != other.thinking:
            found.append("the thinking mode")
        return found


def identity(target: LoadedTarget, *, think: bool | None) -> Identity:
    """Tell a target by its numbers; reads a few of every tensor.

    Args:
        target: with a chat template.
        think: passed to the template; None leaves the template's default.
    """
    question = render(target.tokenizer, _QUESTION, think=think)
    template = hashlib.blake2b(repr(question).encode(), digest_size=8).hexdigest()
    return Identity(target.name, _weights(target.model.model), template, think)


def _weights(model: Any) -> str:
    """A hash of the parameters of an mlx-lm model."""
    arrays: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    looks = {name: _look(array) for name, array in sorted(arrays.items())}
    mx.eval(list(looks.values()))
    hashed = hashlib.blake2b(digest_size=8)
    for name, look in looks.items():
        array = arrays[name]
        hashed.update(f"{name} {array.shape} {array.dtype} {look.tolist()}".encode())
    return hashed.hexdigest()


def _look(array: mx.array) -> mx.array:
    """Some numbers, spread over the tensor."""
    flat = array.reshape(-1)
    return flat[:: max(1, flat.size // _LOOKED_AT)][:_LOOKED_AT]
