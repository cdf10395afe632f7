"""The console's options: declared once here, merged, and refused where they make no sense.

A field that was not given is None or False, so every default lives in the generator alone. Long names are the
names of the Python parameters. MLX is not loaded.
"""

import inspect
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_MODELS, _TEXT, _DRAWS, _OUTPUT = "Models", "Text", "Draws", "Output"


def option(group: str, help: str, *names: str, metavar: str | None = None) -> Any:
    """An option as Typer wants it; `Any` because that is what Typer's own `Option` returns."""
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=group, show_default=False)


def _show_version(wanted: bool) -> bool:
    if wanted:
        parts = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))
        typer.echo(f"dflash-mlx {version('dflash-mlx')} ({parts}, Python {platform.python_version()})")
        raise typer.Exit()
    return False


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """What is loaded, and how."""

    target_model: Annotated[
        str | None,
        option(_MODELS, "Target: folder, hub id or alias. Unset: this machine's default pair."),
    ] = None
    draft_model: Annotated[
        str | None, option(_MODELS, "Drafter: a folder or a hub id. Unset: the one known for the target.")
    ] = None
    mode: Annotated[
        str | None,
        option(_MODELS, "auto drafts where it can, on insists, off does not.", metavar="auto|on|off"),
    ] = None
    block_size: Annotated[
        int | None, option(_MODELS, "Tokens in a drafted block, its anchor included. Unset: as trained.")
    ] = None
    draft_bits: Annotated[
        str | None,
        option(_MODELS, "Quantise the drafter at load; auto where that pays.", metavar="4|8|auto"),
    ] = None
    draft_vocab: Annotated[
        str | None,
        option(
            _MODELS,
            "Words to propose besides those of the text. Unset: auto, as many as pay.",
            metavar="auto|full|N",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        option(
            _MODELS,
            "Type of the weights. Unset: as stored on a GPU, float32 on a CPU.",
            metavar="float32|bfloat16|float16",
        ),
    ] = None
    kv_bits: Annotated[
        int | None, option(_MODELS, "Quantise the target's keys and values.", metavar="4|8")
    ] = None
    draft_window: Annotated[
        int | None, option(_MODELS, "Tokens of the context that the drafter keeps. Unset: all.")
    ] = None

    def model(self) -> dict[str, Any]:
        """The given arguments of `DFlashGenerator`."""
        given = self._given(*(option.name for option in fields(PairOptions)))
        return {name: _number(value) if name in _NUMBERS_OR_WORDS else value for name, value in given.items()}

    def given(self) -> dict[str, Any]:
        """Every option that was given, by name."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        unset = {option.name: option.default for option in fields(self)}
        return {name: value for name, value in values.items() if value != unset[name] and value != []}

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name, value in self.given().items() if name in names}


@dataclass(frozen=True, kw_only=True)
class ChatOptions(PairOptions):
    """What a chat understands: the pair, and how it answers."""

    kept_gb: Annotated[
        float | None,
        option(_MODELS, "Memory for conversations between turns. Unset: a quarter of the machine's."),
    ] = None
    system: Annotated[str | None, option(_TEXT, "System message.")] = None
    think: Annotated[
        bool | None,
        option(
            _TEXT, "Let a thinking model think, or not. Unset: as the pair was trained.", "--think/--no-think"
        ),
    ] = None
    max_new_tokens: Annotated[int | None, option(_TEXT, "Most tokens in an answer. Unset: 2048.")] = None
    stop: Annotated[
        list[str] | None,
        option(_TEXT, r"End the answer before this text (repeatable; \n is two characters).", "--stop"),
    ] = None
    temperature: Annotated[
        float | None,
        option(_DRAWS, "0 takes the most probable token. Unset: 0; in a chat the model's own."),
    ] = None
    top_p: Annotated[
        float | None, option(_DRAWS, "Draw among the tokens that hold this share of the probability.")
    ] = None
    top_k: Annotated[int | None, option(_DRAWS, "Draw among this many tokens (0: all).")] = None
    min_p: Annotated[
        float | None, option(_DRAWS, "Draw among tokens at least this probable, relative to the best.")
    ] = None
    repetition_penalty: Annotated[
        float | None, option(_DRAWS, "Makes recent tokens less likely (1: off).")
    ] = None
    presence_penalty: Annotated[
        float | None, option(_DRAWS, "Subtracted from the logits of recent tokens (0: off).")
    ] = None
    frequency_penalty: Annotated[float | None, option(_DRAWS, "The same, once for each time (0: off).")] = (
        None
    )
    seed: Annotated[int | None, option(_DRAWS, "Seed of the draws. Unset: a fresh one, reported.")] = None
    stats: Annotated[
        bool | None,
        option(_OUTPUT, "A line of figures on stderr. Unset: only on a terminal.", "--stats/--no-stats"),
    ] = None
    plain: Annotated[
        bool, option(_OUTPUT, "In a chat: show answers as they are, not as Markdown.", "--plain")
    ] = False
    history: Annotated[
        bool | None,
        option(
            _OUTPUT, "In a chat: keep what is typed for the next run. Unset: yes.", "--history/--no-history"
        ),
    ] = None
    debug: Annotated[bool, option(_OUTPUT, "Show tracebacks.", "--debug")] = False
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions and leave.",
            is_eager=True,
            callback=_show_version,
            rich_help_panel=_OUTPUT,
            show_default=False,
        ),
    ] = False

    def model(self) -> dict[str, Any]:
        """The given arguments of `DFlashGenerator`."""
        return super().model() | self._given("kept_gb")

    def answer(self) -> dict[str, Any]:
        """The given arguments of `DFlashGenerator.stream`; a chat holds its system message itself."""
        return self._given("think", "max_new_tokens", "stop", *_DRAW_NAMES)


@dataclass(frozen=True, kw_only=True)
class Options(ChatOptions):
    """What `dflash-mlx` itself understands: a chat's options and those of a single answer."""

    prompt: Annotated[
        str | None,
        option(_TEXT, "The prompt; - reads stdin. A pipe beside it is added after it.", "--prompt", "-p"),
    ] = None
    prompt_file: Annotated[
        str | None,
        option(_TEXT, "Read the prompt from a file; - reads stdin.", metavar="PATH"),
    ] = None
    interactive: Annotated[
        bool, option(_TEXT, "Go on as a chat after the answer.", "--interactive", "-i")
    ] = False
    raw: Annotated[bool, option(_TEXT, "Continue the prompt as it is, without template.", "--raw")] = False
    json: Annotated[bool, option(_OUTPUT, "Print one JSON object instead of text.", "--json")] = False
    compare: Annotated[
        bool, option(_OUTPUT, "Decode plainly and drafted, and say whether they agree.", "--compare")
    ] = False
    profile: Annotated[bool, option(_OUTPUT, "Also time draft and verify (slower).", "--profile")] = False

    def answer(self) -> dict[str, Any]:
        """The given arguments of `DFlashGenerator.stream`."""
        return super().answer() | self._given("system", "raw", "profile")


_DRAW_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)

Shape = TypeVar("Shape", bound="DataclassInstance")


def takes(shape: type[Shape]) -> Callable[[Callable[[typer.Context, Shape], None]], Callable[..., None]]:
    """Make a Typer command of a function of (context, options): the fields of `shape` become its options."""

    def decorate(body: Callable[[typer.Context, Shape], None]) -> Callable[..., None]:
        def command(ctx: typer.Context, **values: Any) -> None:
            body(ctx, shape(**values))

        parameters = [
            inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        ]
        for option in fields(shape):
            parameters.append(
                inspect.Parameter(
                    option.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=option.default,
                    annotation=option.type,
                )
            )
        command.__name__ = body.__name__
        command.__doc__ = body.__doc__
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def inherit(outer: Options, inner: ChatOptions) -> ChatOptions:
    """The options of a chat with those that stood before its name.

    Raises:
        UsageError: where one stands in both places or has no meaning in a chat.
    """
    twice = outer.given().keys() & inner.given().keys() - {"debug"}
    for name in twice:
        raise UsageError(f"{flag(name)} is given before and after `chat`; give it once.")
    return replace(inner, **for_chat(outer).given())


def for_chat(options: Options) -> ChatOptions:
    """The options of `dflash-mlx` as those of a chat.

    Raises:
        UsageError: for one that has no meaning in a chat.
    """
    known = {option.name for option in fields(ChatOptions)}
    for name in options.given():
        if name not in known:
            raise UsageError(f"{flag(name)} has no meaning in a chat; it goes with a prompt.")
    return ChatOptions(**options.given())


def refuse_chat_only(options: Options) -> None:
    """Refuse, beside a prompt, what only a chat does.

    Raises:
        UsageError: naming the option.
    """
    for name in ("plain", "history"):
        if name in options.given():
            raise UsageError(f"{flag(name)} is for a chat; leave it out, or leave out the prompt.")


def flag(name: str) -> str:
    """How a field is typed."""
    return "--" + name.replace("_", "-")


def check(options: ChatOptions) -> None:
    """Refuse values that mean nothing and options that contradict each other.

    Raises:
        UsageError: one sentence that names the option, the value and what was expected.
    """
    check_values(options)
    if options.mode == "off":
        for name in ("draft_model", "block_size", "draft_bits", "draft_vocab", "draft_window"):
            if getattr(options, name) is not None:
                raise UsageError(f"--mode off decodes without a drafter; leave out {flag(name)} or the mode.")
    if not isinstance(options, Options):
        return
    if options.compare and options.mode == "off":
        raise UsageError("--compare decodes plainly and drafted; it cannot go with --mode off.")
    if options.raw:
        if options.system is not None:
            raise UsageError("--raw uses no chat template, which --system needs; leave one out.")
        if options.think is not None:
            raise UsageError("--raw uses no chat template, which --think and --no-think need; leave one out.")
    if options.profile and options.stats is False and not options.json:
        raise UsageError("--profile shows figures in the line that --no-stats hides; leave one out.")
    if options.prompt is not None and options.prompt_file is not None:
        raise UsageError("--prompt and --prompt-file are both given; give one of them.")


def check_values(options: PairOptions) -> None:
    """Refuse values that mean nothing, each by itself.

    Raises:
        UsageError: one sentence that names the option, the value and what was expected.
    """
    given = options.given()
    for name, value in given.items():
        for text in value if isinstance(value, list) else [value]:
            _check_text(name, str(text))
    for name, fits, expected in _RULES:
        if name in given and not fits(given[name]):
            raise UsageError(f"{flag(name)} is {given[name]}; expected {expected}.")
    for stop in given.get("stop", ()):
        if not stop:
            raise UsageError("--stop is empty; expected a text that ends the answer.")


_NUMBERS_OR_WORDS = ("draft_bits", "draft_vocab")


def _number(text: str) -> int | str:
    """Digits as a number."""
    return int(text) if text.isascii() and text.isdigit() else text


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # the command line held bytes that are no text
        raise UsageError(f"{flag(name)} is not UTF-8 text; convert it first.") from None


_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("mode", lambda v: v in ("auto", "on", "off"), "auto, on or off"),
    ("block_size", lambda v: v >= 2, "2 or more, the anchor and at least one drafted token"),
    ("draft_bits", lambda v: v in ("4", "8", "auto"), "4, 8 or auto"),
    (
        "draft_vocab",
        lambda v: v in ("auto", "full") or _number(v) not in (0, v),
        "auto, full or a number of words",
    ),
    ("dtype", lambda v: v in ("float32", "bfloat16", "float16"), "float32, bfloat16 or float16"),
    ("kv_bits", lambda v: v in (4, 8), "4 or 8"),
    ("draft_window", lambda v: v >= 2, "2 tokens or more"),
    ("kept_gb", lambda v: 0 <= v < math.inf, "0 or more gigabytes"),
    ("max_new_tokens", lambda v: v >= 1, "1 or more"),
    ("temperature", lambda v: 0 <= v < math.inf, "0 or more"),
    ("top_p", lambda v: 0 < v <= 1, "above 0 and at most 1 (1: no cut)"),
    ("top_k", lambda v: v >= 0, "0 or more (0: no cut)"),
    ("min_p", lambda v: 0 <= v <= 1, "between 0 and 1 (0: no cut)"),
    ("repetition_penalty", lambda v: 0 < v < math.inf, "above 0 (1: none)"),
    ("seed", lambda v: v >= 0, "0 or more"),
    ("presence_penalty", math.isfinite, "a number"),
    ("frequency_penalty", math.isfinite, "a number"),
)


def without_effect(options: ChatOptions, temperature: float) -> str | None:
    """A sentence on the given options that change nothing at this temperature; None where there are none."""
    given = [flag(name) for name in ("top_p", "top_k", "min_p", "seed") if getattr(options, name) is not None]
    if temperature != 0 or not given:
        return None
    return f"Nothing is drawn at temperature 0, whatever the value of {' and '.join(given)}."
