"""The commands: what was typed in, an exit code out. Refuses what it can before MLX is loaded.

Exit codes: 0 done, 1 a person can mend it, 2 usage, 130 interrupted, 141 the reader of stdout went away.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from dflash_mlx.cli.bench_options import BenchOptions
from dflash_mlx.cli.doctor_options import DoctorOptions, check_doctor
from dflash_mlx.cli.options import (
    ChatOptions,
    Options,
    check,
    check_values,
    flag,
    for_chat,
    inherit,
    refuse_chat_only,
    takes,
    without_effect,
)
from dflash_mlx.cli.prompt import NoPrompt, read_prompt, stdin_is_terminal
from dflash_mlx.cli.train_options import TrainOptions
from dflash_mlx.errors import DFlashError, UsageError

if TYPE_CHECKING:
    from dflash_mlx.cli.record import Record
    from dflash_mlx.cli.view import View
    from dflash_mlx.generator import DFlashGenerator

Factory = Callable[..., "DFlashGenerator"]
"""Makes the generator; Typer's context object where a caller brings its own."""

_FETCHING = "dflash-fetch"  # what `loading.hub` calls its thread; importing that would load MLX
_OUTER = "dflash_mlx.outer"  # where the options before a subcommand wait for it


class _Root(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a subcommand; a prompt in its place is the likeliest mistake."""
        if args and self.get_command(ctx, args[0]) is None:
            raise typer.BadParameter(f"there is no command {args[0]!r}; a prompt goes after --prompt.", ctx)
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=_Root, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
chat_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
@takes(Options)
def generate(ctx: typer.Context, options: Options) -> None:
    """Answer a prompt, drafted by DFlash; without a prompt on a terminal, open the chat.

    The answer goes to stdout and nothing else does.
    """
    if ctx.invoked_subcommand is not None:
        ctx.meta[_OUTER] = options
        return
    stats = True if options.profile else options.stats
    _report(stats, options.debug, lambda view: _generate(view, options, ctx.obj or _load))


@app.command()
@chat_app.command()
@takes(ChatOptions)
def chat(ctx: typer.Context, options: ChatOptions) -> None:
    """Talk with the model; /help lists the commands of the chat."""
    outer: Options = ctx.meta.get(_OUTER, Options())
    stats = outer.stats if options.stats is None else options.stats
    debug = options.debug or outer.debug
    _report(stats, debug, lambda view: _chat(view, inherit(outer, options), ctx.obj or _load))


@app.command()
@takes(BenchOptions)
def bench(ctx: typer.Context, options: BenchOptions) -> None:
    """Race the pair against mlx-lm's plain decoding on this machine; tables, a JSON object and pictures."""
    outer: Options = ctx.meta.get(_OUTER, Options())

    def body(view: View) -> int:
        _refuse_outer(outer, "bench")
        from dflash_mlx.cli.bench import bench as measure

        return measure(view, replace(options, json=options.json or outer.json), ctx.obj or _load)

    _report(None, options.debug or outer.debug, body)


@app.command()
@takes(TrainOptions)
def train(ctx: typer.Context, options: TrainOptions) -> None:
    """Make a drafter for a target: gather its own answers, train on them, measure the drafter."""
    outer: Options = ctx.meta.get(_OUTER, Options())

    def body(view: View) -> int:
        _refuse_outer(outer, "train")
        from dflash_mlx.cli.train import train as run

        return run(view, replace(options, json=options.json or outer.json))

    _report(None, options.debug or outer.debug, body)


@app.command()
@takes(DoctorOptions)
def doctor(ctx: typer.Context, options: DoctorOptions) -> None:
    """Say what runs here, what could be mended, what drafting costs, and what the acceptance of a pair depends on."""
    outer: Options = ctx.meta.get(_OUTER, Options())
    as_json = options.json or outer.json

    def body(view: View) -> int:
        _refuse_outer(outer, "doctor")
        check_doctor(options)
        if options.diagnose:
            from dflash_mlx.cli.diagnose import diagnose_pair, for_reading

            found = diagnose_pair(view, options, ctx.obj or _load)
            _show(view, found if as_json else for_reading(found), as_json)
            return 0
        if options.recalibrate:
            return _recalibrate(view, options, as_json, ctx.obj or _load)
        return _examine(view, as_json)

    _report(None, options.debug or outer.debug, body)


@app.command()
def convert(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(help="Drafter: a folder, a hub id or a known name.")],
    out: Annotated[str, typer.Argument(help="Folder to make.")],
    bits: Annotated[
        int | None,
        typer.Option(help="Pack the matrices, or unpack them (16). Unset: as stored.", metavar="4|8|16"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Type of what is not packed. Unset: as stored.", metavar="float32|bfloat16|float16"
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a drafter's folder.", show_default=False)
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default=False)] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.", show_default=False)] = False,
) -> None:
    """Write a drafter of any format to a local MLX folder, and hold it against its source."""
    outer: Options = ctx.meta.get(_OUTER, Options())

    def body(view: View) -> int:
        _refuse_outer(outer, "convert")
        from dflash_mlx.cli.convert import convert_drafter

        found = convert_drafter(source, out, bits=bits, dtype=dtype, force=force, say=view.say)
        _show(view, found, json or outer.json)
        return 0

    _report(None, debug or outer.debug, body)


@app.command()
def models(
    ctx: typer.Context,
    target_model: Annotated[
        str | None, typer.Option(help="Hold drafters against this target: folder, hub id or alias.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.", show_default=False)] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.", show_default=False)] = False,
) -> None:
    """List the known pairs and what of them is here, or the drafters that fit a target; nothing is fetched."""
    outer: Options = ctx.meta.get(_OUTER, Options())

    def body(view: View) -> int:
        _refuse_outer(outer, "models")
        from dflash_mlx.cli.models import for_reading, list_models

        found = list_models(target_model)
        as_json = json or outer.json
        _show(view, found if as_json else for_reading(found), as_json)
        return 0

    _report(None, debug or outer.debug, body)


def main() -> None:
    """`dflash-mlx`."""
    _start(app)


def main_chat() -> None:
    """`dflash-mlx-chat`: the same as `dflash-mlx chat`."""
    _start(chat_app)


def _start(commands: typer.Typer) -> None:
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    plain = not on_terminal or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    commands.rich_markup_mode = None if plain else "rich"
    commands()


def _load(**arguments: Any) -> DFlashGenerator:
    from dflash_mlx.generator import DFlashGenerator

    return DFlashGenerator(**arguments)


def _generate(view: View, options: Options, factory: Factory) -> int:
    check(options)
    if options.interactive and not stdin_is_terminal():
        raise UsageError("--interactive goes on as a chat, and stdin is no terminal; leave it out.")
    try:
        prompt = read_prompt(options, view.note)
    except NoPrompt:
        _look_for_target(options, factory)
        raise
    if prompt is None or options.interactive:
        rest = replace(options, prompt=None, prompt_file=None, interactive=False)
        return _chat(view, for_chat(rest), factory, first=prompt)
    refuse_chat_only(options)
    if sentence := without_effect(options, options.temperature or 0):
        view.note(sentence)
    with _open(view, options, factory) as generator:
        if options.compare:
            _compare(view, generator, prompt, options)
        elif options.json:
            _print_record(view, generator, prompt, options)
        else:
            _stream(view, generator, prompt, options)
    return 0


def _look_for_target(options: Options, factory: Factory) -> None:
    """A target that cannot be had is the news, with or without a prompt; nothing is loaded."""
    if options.target_model is not None and factory is _load:
        from dflash_mlx.generator import find_target

        find_target(options.target_model)


def _open(view: View, options: ChatOptions, factory: Factory) -> DFlashGenerator:
    with view.loaded():
        return factory(**options.model(), on_note=view.note, on_load=view.loading)


def _stream(view: View, generator: DFlashGenerator, prompt: str, options: Options) -> None:
    stats = None
    for chunk in generator.stream(prompt, **options.answer()):
        view.piece(chunk.text, chunk.kind, chunk.stats)
        stats = chunk.stats
    view.end_answer()
    if stats is not None:
        view.figures(stats)


def _print_record(view: View, generator: DFlashGenerator, prompt: str, options: Options) -> None:
    from dflash_mlx.cli.record import result_record

    result = generator.generate(prompt, **options.answer())
    view.record(result_record(result))
    if options.stats:
        view.figures(result.stats)


def _compare(view: View, generator: DFlashGenerator, prompt: str, options: Options) -> None:
    from dflash_mlx.cli.record import comparison_record

    comparison = generator.compare(prompt, **options.answer())
    if options.json:
        view.record(comparison_record(comparison))
    else:
        view.piece(comparison.drafted.thinking, "thought")
        view.piece(comparison.drafted.text, "answer")
        view.end_answer()
        view.figures(comparison.drafted.stats)
        view.verdict(comparison)


def _chat(view: View, options: ChatOptions, factory: Factory, first: str | None = None) -> int:
    check(options)
    from dflash_mlx.cli import commands, lines
    from dflash_mlx.cli.chat import Chat
    from dflash_mlx.cli.running import RunningPair, known_names

    person = stdin_is_terminal()
    if not options.plain:
        view.read_markdown()
    if person:
        view.say(f"Loading {options.target_model or 'the default pair of this machine'} ...")
    history = None if options.history is False else lines.history_file()
    with RunningPair(factory, options.model(), view) as pair:
        conversation = Chat(pair, view, options, stays=person, edit=lines.edit)
        if person:
            conversation.greet()
        if first is not None:
            conversation.answer(first)
        completions = partial(commands.completions, names=known_names)
        conversation.run(lines.reader(history=history, completions=completions))
    return 1 if conversation.failed and not person else 0


def _examine(view: View, json: bool) -> int:
    from dflash_mlx.cli.costs import for_reading
    from dflash_mlx.cli.doctor import examine

    found = examine()
    _show(view, found if json else for_reading(found), json)
    return 1 if found["problems"] else 0


def _recalibrate(view: View, options: DoctorOptions, json: bool, load: Factory) -> int:
    from dflash_mlx.cli.costs import for_reading, recalibrated

    check_values(options)
    found = recalibrated(view, load, options.model())
    _show(view, found if json else for_reading(found), json)
    return 0


def _refuse_outer(outer: Options, command: str) -> None:
    for name in outer.given():
        if name not in ("json", "debug"):
            raise UsageError(
                f"{flag(name)} has no meaning for {command} before its name; leave it out, or put it after."
            )


def _show(view: View, found: Record, json: bool) -> None:
    if json:
        view.record(found)
    else:
        view.report(found)


def _report(stats: bool | None, debug: bool, body: Callable[[View], int]) -> None:
    """Run a command's body and leave with its exit code; an error becomes one sentence on stderr."""
    from dflash_mlx.cli.view import View, silence, stderr_console, stdout

    answers = stdout()
    try:
        view = View(stderr_console(), answers, stats)
        code = _outcome(view, debug, body)
        answers.flush()
    except BrokenPipeError:
        silence(answers, sys.stderr)
        code = 141
    except OSError as error:
        silence(answers)
        typer.echo(f"error: The answer cannot be written: {error.strerror}.", err=True)
        code = 1
    raise typer.Exit(code)


def _outcome(view: View, debug: bool, body: Callable[[View], int]) -> int:
    try:
        return body(view)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        view.end_answer()
        _leave_fetching()
        return 130
    except Exception as error:
        if debug:
            view.traceback()
        if isinstance(error, DFlashError):
            view.error(str(error))
            return error.exit_code
        view.error(f"{type(error).__name__}: {error}" + ("" if debug else " (--debug shows where)"))
        return 1


def _leave_fetching() -> None:
    """Leave at once where the hub's threads still wait for a file; Python itself would wait for them."""
    if any(thread.name == _FETCHING for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(130)
