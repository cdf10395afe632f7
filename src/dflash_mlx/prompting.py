"""A prompt for a loaded pair: text, messages or ids in, a request with ids and limits out; no model work."""

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_mlx.conversation import common_prefix
from dflash_mlx.errors import UsageError
from dflash_mlx.loading import LoadedPair, encode_raw, render_history
from dflash_mlx.request import Options, Prompt, Request, as_messages, fresh_seed

_NEXT_TURN = ({"role": "assistant", "content": "x"}, {"role": "user", "content": "x"})


def next_prompt(pair: LoadedPair, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """These messages and one more question as ids."""
    return render_history(pair.target.tokenizer, [*messages, _NEXT_TURN[1]], think=pair.thinking)


def requested(pair: LoadedPair, prompt: Prompt, options: Options) -> Request:
    """Render the prompt and hold everything against the models' limits.

    Raises:
        UsageError: nothing to answer, ids that the target does not have, or more than its context takes.
    """
    target = pair.target
    messages = as_messages(prompt, options.system)
    if messages is None or options.raw:
        ids = _plain_ids(target.tokenizer, prompt, options)
        settled = len(ids) - 1
    else:
        ids, settled = _rendered(pair, messages, options)
    rows = target.model.vocab_size
    if out := next((i for i in ids if not 0 <= i < rows), None):
        raise UsageError(f"The prompt holds the token id {out}; {target.name} has ids from 0 to {rows - 1}.")
    budget = options.max_new_tokens
    notes: tuple[str, ...] = ()
    limit = target.model.max_positions
    if limit is not None and limit - len(ids) < 1:
        raise UsageError(
            f"The prompt has {len(ids)} tokens; {target.name} takes {limit}, the answer included."
        )
    if limit is not None and limit - len(ids) < budget:
        budget = limit - len(ids)
        notes = (
            f"The context of {target.name} ends after {limit} tokens: {budget} are left for the answer.",
        )
    seed = fresh_seed() if options.seed is None else options.seed
    return Request(
        prompt=ids,
        settled=settled,
        inside_thought=_opens_thought(target.tokenizer, ids),
        params=options.sampling(seed),
        budget=budget,
        options=options,
        notes=notes,
    )


def _rendered(
    pair: LoadedPair, messages: Sequence[Mapping[str, Any]], options: Options
) -> tuple[list[int], int]:
    """Messages as ids, and how many of them the prompt of a next turn will begin with.

    Templates end a prompt with what the history of the next turn may lack, such as an empty thought.
    """
    think = options.think if options.think is not None else pair.thinking
    tokenizer = pair.target.tokenizer
    ids = render_history(tokenizer, messages, think=think)
    try:
        later = render_history(tokenizer, [*messages, *_NEXT_TURN], think=think)
    except UsageError:  # a template that takes no further turn
        later = ids
    return ids, min(common_prefix(ids, later), len(ids) - 1)


def _plain_ids(tokenizer: Any, prompt: Prompt, options: Options) -> list[int]:
    if options.system is not None:
        raise UsageError("`system` needs the chat template: leave it out with raw text or token ids.")
    if isinstance(prompt, str):
        return encode_raw(tokenizer, prompt)
    if any(not isinstance(item, int) for item in prompt):
        raise UsageError("`raw` takes text or token ids, not messages.")
    return [int(item) for item in prompt if isinstance(item, int)]


def _opens_thought(tokenizer: Any, ids: Sequence[int]) -> bool:
    tag = tokenizer.think_start_tokens
    if not tag:
        return False
    tail = tokenizer.decode(list(ids[-len(tag) - 4 :]))
    return bool(tail.rstrip().endswith(tokenizer.think_start))
