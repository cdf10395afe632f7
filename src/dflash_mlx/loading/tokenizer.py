"""Tokenizers: a checkpoint folder -> mlx-lm's TokenizerWrapper; messages or text -> token ids.

Knows chat templates and stop ids; knows nothing of models. Whatever a tokenizer returns from its template
(a list, a nested list, a dict-like object), a plain list of ids leaves here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer as load_wrapped

from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.loading.files import read_json

Message = Mapping[str, Any]

NO_TEMPLATE = (
    "This looks like a base model: it has no chat template. "
    "Use raw=True (--raw) to continue plain text, or an instruct model."
)


def load_tokenizer(folder: Path, eos_ids: Sequence[int], *, name: str) -> TokenizerWrapper:
    """The tokenizer of a checkpoint folder, nothing fetched.

    Args:
        folder: a local checkpoint folder.
        eos_ids: what ends an answer, as `eos_token_ids` found it.
        name: of the checkpoint, for messages.

    Raises:
        CheckpointError: no tokenizer files, or files that cannot be read.
    """
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise CheckpointError(
            f"{name} has no tokenizer in {folder} (none of tokenizer.json, tokenizer.model, vocab.json); "
            "is it the whole checkpoint?"
        )
    try:
        return load_wrapped(folder, eos_token_ids=list(eos_ids) or None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"The tokenizer of {name} in {folder} could not be loaded: {first_line}."
        ) from error


def eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end an answer: the generation config's, else the config's; () when neither has any."""
    found = generation.get("eos_token_id")
    if found is None:
        found = config.get("eos_token_id")
    if found is None:
        found = (config.get("text_config") or {}).get("eos_token_id")
    if found is None:
        return ()
    return tuple(int(i) for i in found) if isinstance(found, list) else (int(found),)


def generation_config(folder: Path, *, name: str) -> dict[str, Any]:
    """The folder's generation_config.json; {} without one.

    Raises:
        CheckpointError: a file that is no JSON object.
    """
    path = folder / "generation_config.json"
    return read_json(path, name=name) if path.exists() else {}


def has_template(tokenizer: TokenizerWrapper) -> bool:
    """Whether messages can be rendered with this tokenizer."""
    return bool(tokenizer.has_chat_template)


def render(
    tokenizer: TokenizerWrapper, messages: Sequence[Message], *, think: bool | None = None
) -> list[int]:
    """Token ids of a conversation, up to where the answer begins.

    Args:
        tokenizer: of the target.
        messages: `{"role": ..., "content": ...}`; content is a string or a list of text parts.
        think: passed to the template; None leaves the template's own default.

    Raises:
        UsageError: no chat template, no messages, content that is not text, or roles the template refuses.
    """
    if not has_template(tokenizer):
        raise UsageError(NO_TEMPLATE)
    if not messages:
        raise UsageError("There are no messages to answer; give at least one, such as {'role': 'user', ...}.")
    plain = [_text_only(message) for message in messages]
    inner = tokenizer._tokenizer
    # The wrapper turns an unset thinking switch into a set one, which overrides the template's default.
    direct = think is None and tokenizer._chat_template is None
    options: dict[str, Any] = {} if think is None else {"enable_thinking": think}
    if direct:
        options["return_dict"] = False
    apply = inner.apply_chat_template if direct else tokenizer.apply_chat_template
    try:
        return _ids(apply(plain, add_generation_prompt=True, tokenize=True, **options))
    except TemplateError as error:
        raise UsageError(f"The model's chat template refuses these messages: {error}.") from error


def encode_raw(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    """Token ids of plain text, with the special tokens that the tokenizer itself puts around it."""
    return _ids(tokenizer.encode(text))


def _text_only(message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UsageError(f"A message is a mapping with 'role' and 'content'; found {message!r}.")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(_part_text(part) for part in content)
    if not isinstance(content, str):
        raise UsageError(
            f"The content of the {message['role']} message is a {type(content).__name__}; "
            "expected a string or a list of text parts."
        )
    return {**message, "content": content}


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UsageError(f"A message has a part of type {kind!r}; only text parts can be answered.")


def _ids(out: object) -> list[int]:
    """Transformers 4 and 5 and custom tokenizers differ in what a template gives back."""
    if isinstance(out, Mapping) or hasattr(out, "input_ids"):
        out = out["input_ids"]  # type: ignore[index]
    if hasattr(out, "tolist"):
        out = out.tolist()
    assert isinstance(out, list | tuple), f"a tokenizer returned {type(out).__name__}"
    if out and isinstance(out[0], list | tuple):
        out = out[0]
    return [int(i) for i in out]
