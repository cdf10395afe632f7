"""Where a user's words stand in the target's chat template: a tokenizer in, the ids around them out."""

from typing import NamedTuple

from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.errors import UsageError
from dflash_mlx.loading.tokenizer import render

_MARK = "\ue000"  # of the private use area: no template writes it


class UserTurn(NamedTuple):
    """The ids around the words of a first question."""

    opening: tuple[int, ...]  # from the beginning up to the first word
    stop_ids: tuple[int, ...]  # what ends the words: an answer's stop ids, and what the template puts there


def user_turn(tokenizer: TokenizerWrapper) -> UserTurn | None:
    """The turn of a user; None where the template does more with the words than to write them down once.

    Raises:
        UsageError: no chat template.
    """
    ids = render(tokenizer, [{"role": "user", "content": _MARK}])
    mark = tokenizer.encode(_MARK, add_special_tokens=False)
    places = [i for i in range(len(ids)) if ids[i : i + len(mark)] == mark]
    if len(places) != 1:
        return None
    behind = ids[places[0] + len(mark) :]
    specials = set(tokenizer.all_special_ids)
    stops = {*tokenizer.eos_token_ids, *(i for i in behind[:1] if i in specials)}
    return UserTurn(tuple(ids[: places[0]]), tuple(sorted(stops)))


def check_template(tokenizer: TokenizerWrapper, name: str) -> None:
    """Refuse a target that cannot be asked.

    Raises:
        UsageError: it has no chat template.
    """
    if not tokenizer.has_chat_template:
        raise UsageError(
            f"{name} has no chat template, so nothing can be asked of it as its users will; "
            "take the instruct model, or put chat_template.jinja beside its tokenizer."
        )
