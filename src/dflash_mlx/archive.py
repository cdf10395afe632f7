"""Conversations of a loaded pair put into files and taken up again, with what is kept of them.

In: messages and the states that are kept. Out: a file, or messages and a state more. Runs no model.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dflash_mlx import saved
from dflash_mlx.chat import Loaded
from dflash_mlx.conversation import Conversations, Mark, State, marks_within, place_in, state_of
from dflash_mlx.engine import Engine
from dflash_mlx.prompting import next_prompt
from dflash_mlx.saved import Held, Holder, Saved
from dflash_mlx.target import kept


def save(
    path: str | Path, messages: Sequence[Mapping[str, Any]], engine: Engine, conversations: Conversations
) -> Path:
    """Write messages, and what is kept of them and of nothing else, to a safetensors file; gives its name.

    Raises:
        OSError: it cannot be written.
    """
    prompt = next_prompt(engine.pair, messages) if messages else []
    with conversations.lent(prompt) as lent:
        held = _held(*lent, engine) if lent else None
        return saved.write(path, Saved(saved.spoken(messages), _holder(engine), held))


def load(path: str | Path, engine: Engine, conversations: Conversations) -> Loaded:
    """Read the messages of a file; what it holds of them is kept here where it fits this pair.

    Raises:
        UsageError: no such file, or one that is no conversation.
    """
    found, here = saved.read(path), _holder(engine)
    messages = found.messages
    if found.holder.target != here.target:  # ids of another tokenizer, perhaps
        messages = [{name: m[name] for name in m if name != "token_ids"} for m in messages]
    differs = saved.difference(found.holder, here)
    if found.held is None:
        return Loaded(messages, None)
    if differs is None:
        try:
            state = _state(found.held, engine)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            state = None
        if state is not None:
            conversations.keep(state)
            return Loaded(messages, None)
        differs = "does not hold what such a pair keeps"
    return Loaded(
        messages,
        f"What {Path(path).name} holds of this conversation {differs}: its messages are taken up, and read again "
        "with the next one.",
    )


def _held(state: State, shared: int, engine: Engine) -> Held | None:
    """The state as far as the messages share it."""
    drafter = engine.drafter()
    place = place_in(state, shared, drafter)
    if place is None:
        return None
    marks = [m for m in marks_within(state, place.length) if m is not place]
    context = {}
    if drafter:
        drafter.settle()
        marks = [m for m in marks if m.context is not None]
        context = drafter.arrays([drafter.snapshot(), *(m.context for m in marks)])
    cache = kept.arrays(state.cache, place.length, [place.cache, *(m.cache for m in marks)])
    lengths = (place.length, *(m.length for m in marks))
    return Held(state.ids[: place.length], lengths, cache, context)


def _state(held: Held, engine: Engine) -> State | None:
    """What was held, evaluated.

    Raises:
        ValueError, KeyError, IndexError, TypeError, AttributeError: it is of another pair.
    """
    target, drafter = engine.pair.target.model, engine.drafter()
    cache = target.make_cache()
    places = kept.fill(cache, held.cache, len(held.ids), len(held.lengths))
    contexts = drafter.fill(held.context, held.lengths) if drafter else [None] * len(places)
    marks = [Mark(*mark) for mark in zip(held.lengths, places, contexts, strict=True)]
    return state_of(target, cache, drafter, held.ids, marks[1:])


def _holder(engine: Engine) -> Holder:
    target, draft = engine.pair.target, engine.pair.draft
    return Holder(
        target=target.name,
        draft=draft.name if draft else None,
        weights=engine.pair.nbytes,
        dtype=str(target.model.dtype).removeprefix("mlx.core."),
        kv_bits=target.model.kv_bits,
        draft_window=draft.config.draft_window if draft else None,
        versions=", ".join(f"{name} {version(name)}" for name in ("dflash-mlx", "mlx", "mlx-lm")),
    )
