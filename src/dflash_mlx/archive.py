"""Conversations of a loaded pair put into files and taken up again, with what is kept of them.

In: messages and the states that are kept. Out: a file, or messages and a state more. Runs no model.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx import saved
from dflash_mlx.conversation import Conversations, state_of
from dflash_mlx.engine import Engine
from dflash_mlx.errors import UsageError
from dflash_mlx.prompting import next_prompt
from dflash_mlx.target import kept


def save(
    path: str | Path, messages: Sequence[Mapping[str, Any]], engine: Engine, conversations: Conversations
) -> Path:
    """Write messages, and what is kept of them, to a safetensors file; gives its name.

    Raises:
        OSError: it cannot be written.
    """
    cache: dict[str, mx.array] = {}
    context: dict[str, mx.array] = {}
    state = conversations.find(next_prompt(engine.pair, messages)) if messages else None
    if state is not None and kept.goes_back(state.cache):
        cache = kept.arrays(state.cache)
        if drafter := engine.drafter():
            drafter.restore(state.context)
            context = drafter.visible()
    ids = state.ids if state and cache else ()
    return saved.write(path, saved.Saved(saved.spoken(messages), _holder(engine), ids, cache, context))


def load(path: str | Path, engine: Engine, conversations: Conversations) -> list[dict[str, Any]]:
    """Read the messages of a file; what it holds of them is kept here where this very pair wrote it.

    Raises:
        UsageError: no such file, or one of another target.
    """
    target = engine.pair.target
    found = saved.read(path, target=target.name)
    if found.ids and found.holder == _holder(engine):
        drafter = engine.drafter()
        cache = target.model.make_cache()
        try:
            kept.fill(cache, found.cache, len(found.ids))
            if drafter:
                drafter.fill(found.context, len(found.ids))
            state = state_of(target.model, cache, drafter, found.ids, ())
        except (ValueError, KeyError) as error:
            raise UsageError(f"{path} does not fit {target.name}: {error}.") from None
        if state is not None:
            conversations.keep(state)
    return found.messages


def _holder(engine: Engine) -> saved.Holder:
    target, draft = engine.pair.target, engine.pair.draft
    versions = ", ".join(f"{name} {version(name)}" for name in ("dflash-mlx", "mlx", "mlx-lm"))
    return saved.Holder(target.name, draft.name if draft else None, str(target.model.dtype), versions)
