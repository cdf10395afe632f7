"""Messages to ids where answers keep the ids they were emitted with: text need not come apart the way it was made.

A message `{"role": "assistant", "content": text, "token_ids": ids}` stands in the prompt as those ids. Comes in:
messages and a tokenizer; goes out: ids. Knows no model and no cache.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.loading.tokenizer import Message, render

_LOOK_BACK = 64  # emitted tokens that may lie behind the end of the text: a stop string, half a character


def render_history(
    tokenizer: TokenizerWrapper, messages: Sequence[Message], *, think: bool | None = None
) -> list[int]:
    """Like `render`, with `token_ids` of assistant messages in place of what their content would become.

    Where the template does more with a content than to write it down once, the content is encoded as any other.

    Raises:
        UsageError: as `render`.
    """
    plain = [_without_ids(message) for message in messages]
    kept = [message["token_ids"] for message in messages if _has_ids(message)]
    if kept:
        letter = _unused_letter(plain)
        needle = tokenizer.encode(letter, add_special_tokens=False)
        holes = [
            {**bare, "content": letter} if _has_ids(message) else bare
            for bare, message in zip(plain, messages, strict=True)
        ]
        parts = _split(render(tokenizer, holes, think=think), needle)
        if len(parts) == len(kept) + 1:
            ids = parts[0]
            for answer, rest in zip(kept, parts[1:], strict=True):
                ids += [*answer, *rest]
            return ids
    return render(tokenizer, plain, think=think)


def answer_ids(
    tokenizer: TokenizerWrapper, emitted: Sequence[int], text: str, eos_ids: Sequence[int]
) -> tuple[int, ...]:
    """The emitted ids that make up an answer: without thoughts, the stop id and what lies behind the text's end."""
    end = len(emitted) - (bool(emitted) and emitted[-1] in eos_ids)
    for start in _starts(tokenizer, emitted):
        for stop in range(end, max(start, end - _LOOK_BACK), -1):
            said = tokenizer.decode(
                list(emitted[start:stop]), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            if text.startswith(said):
                rest = text[len(said) :]
                return (*emitted[start:stop], *tokenizer.encode(rest, add_special_tokens=False))
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _starts(tokenizer: TokenizerWrapper, emitted: Sequence[int]) -> list[int]:
    """Where the answer may begin: after the last closing think tag and the newlines behind it, or at once."""
    tag = list(tokenizer.think_end_tokens or ()) if tokenizer.has_thinking else []
    ends = [i + len(tag) for i in range(len(emitted)) if tag and list(emitted[i : i + len(tag)]) == tag]
    return [ends[-1], ends[-1] + 1, ends[-1] + 2] if ends else [0]


def _has_ids(message: Message) -> bool:
    return message.get("role") == "assistant" and message.get("token_ids") is not None


def _without_ids(message: Message) -> Mapping[str, Any]:
    return {name: value for name, value in message.items() if name != "token_ids"}


def _unused_letter(messages: Sequence[Message]) -> str:
    """A letter of the private use area that no message holds."""
    held = "".join(str(message.get("content")) for message in messages)
    return next(letter for letter in map(chr, range(0xE000, 0xF8FF)) if letter not in held)


def _split(ids: Sequence[int], needle: Sequence[int]) -> list[list[int]]:
    """What stands between the places where `needle` stands."""
    parts: list[list[int]] = [[]]
    at = 0
    while at < len(ids):
        if list(ids[at : at + len(needle)]) == list(needle):
            parts.append([])
            at += len(needle)
        else:
            parts[-1].append(ids[at])
            at += 1
    return parts
