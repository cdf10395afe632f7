"""Which target this is, whatever it is called: a loaded target in, short hashes out.

Answers and checkpoints belong to one target, its quantisation and its template; a name says nothing of these.
"""

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from dflash_mlx.loading import LoadedTarget, render
from dflash_mlx.target import MLXTarget

_QUESTION = [{"role": "user", "content": "What is the date on a calendar?"}]


@dataclass(frozen=True, slots=True)
class Identity:
    """What has to be the same for answers to be this target's."""

    name: str  # for people; two names may mean one target
    weights: str  # `fingerprint`
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
    return Identity(target.name, fingerprint(target.model), template, think)


def fingerprint(target: MLXTarget) -> str:
    """A short word that changes with any tensor of the target, whatever type holds it; read from the start of each."""
    digest = hashlib.blake2b(digest_size=12)
    tensors: dict[str, mx.array] = dict(tree_flatten(target.model.parameters()))
    for name, tensor in tensors.items():
        part = tensor.reshape(-1)[:256]
        if part.dtype != mx.uint32:
            part = part.astype(mx.float32)
        digest.update(f"{name} {tensor.shape}".encode())
        digest.update(np.array(part).tobytes())
    return digest.hexdigest()
