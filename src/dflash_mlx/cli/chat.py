"""The chat loop: messages and commands in, turns of a conversation out. Knows no terminal.

The view shows, the reader asks, the conversation remembers.
"""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from dflash_mlx.cli import commands
from dflash_mlx.cli.lines import Ask
from dflash_mlx.cli.options import ChatOptions, without_effect
from dflash_mlx.cli.running import RunningPair, on_this_machine
from dflash_mlx.cli.view import View
from dflash_mlx.errors import DFlashError, UsageError

if TYPE_CHECKING:  # the generator loads MLX
    from dflash_mlx.core import Stats
    from dflash_mlx.generator import DFlashGenerator

Edit = Callable[[str], str | None]
"""Lets a person write a text, beginning with another; None where nothing was written."""

_DRAWS = ("temperature", "top_p", "top_k")  # what a generation config says of them


class Chat:
    """One conversation.

    Args:
        pair: answers; loaded.
        view: shows them.
        options: as given; unset draws are the model's own.
        stays: whether Ctrl-C stops the answer alone and not the chat.
        edit: for /edit.
    """

    def __init__(self, pair: RunningPair, view: View, options: ChatOptions, *, stays: bool, edit: Edit):
        generator = pair.open()
        self._pair = pair
        self._view = view
        self._asked = options.answer()  # what was given, then what /set and /think said; None: unset
        self._stays = stays
        self._edit = edit
        self._defaults = generator.generation_defaults
        self.talk = generator.chat(options.system, **_with_defaults(self._asked, self._defaults))
        self._last: Stats | None = None
        self.failed = 0  # turns that ended in an error
        if sentence := without_effect(options, self.talk.options.get("temperature", 0)):
            view.note(sentence)

    def greet(self) -> None:
        """Say who answers, how, and how to leave."""
        draws = [f"{name} {self.talk.options[name]:g}" for name in _DRAWS if name in self.talk.options]
        self._view.say(
            " · ".join([self._ready(), ", ".join(draws) or "temperature 0", "/help lists the commands"])
        )

    def run(self, ask: Ask) -> None:
        """Answer until the input ends or a person leaves.

        Raises:
            KeyboardInterrupt: at a Ctrl-C where the chat does not stay.
        """
        interrupted = False
        while True:
            try:
                line = ask()
            except KeyboardInterrupt:
                if not self._stays:
                    raise
                if interrupted:
                    return
                interrupted = True
                self._view.say("Ctrl-C once more leaves.")
                continue
            interrupted = False
            if line is None or line.strip() == "/exit":
                return
            if line.startswith("/") and "\n" not in line:
                self._command(line)
            elif line.strip():
                self.answer(line)

    def _command(self, line: str) -> None:
        try:
            command = commands.parse(line)
            self._actions[command.name](self, command.argument)
        except OSError as error:
            self._view.say(f"{line.strip()}: {error.strerror or error}.")
        except (UsageError, TypeError) as error:
            self._view.say(str(error))

    def answer(self, text: str, **options: Any) -> bool:
        """Take a turn: ask, and show the answer; whether any of it came."""
        before = len(self.talk.turns)
        with _one_interrupt(self._stays):
            try:
                self._stream(text, options)
            except KeyboardInterrupt:
                if not self._stays:
                    raise
                self._view.say("stopped")
            except DFlashError as error:
                self.failed += 1
                self._view.error(str(error))
        return len(self.talk.turns) > before

    def _stream(self, text: str, options: Mapping[str, Any]) -> None:
        self._have_pair()
        chunks = self.talk.send(text, **options)
        self._view.wait("reading ...")
        try:
            for chunk in chunks:
                self._view.piece(chunk.text, chunk.kind, chunk.stats)
                self._last = chunk.stats
        finally:
            chunks.close()  # type: ignore[attr-defined]  # what was said so far is remembered right now
        self._view.end_answer()
        if self._last is not None:
            self._view.figures(self._last)
            if self._last.finish_reason == "length":
                self._view.say("/set max_new_tokens NUMBER allows more; asking it to go on continues.")

    def _help(self, _: str) -> None:
        self._view.say(commands.HELP)

    def _system(self, text: str) -> None:
        if text:
            self.talk.system = text
        self._view.say(f"system: {self.talk.system}" if self.talk.system else "There is no system message.")

    def _reset(self, _: str) -> None:
        self.talk.reset()
        self._view.say("The conversation is forgotten.")

    def _undo(self, _: str) -> None:
        said = self.talk.undo()
        self._view.say("There is nothing to undo." if said is None else f"forgotten: {_short(said)}")

    def _retry(self, _: str) -> None:
        if not self.talk.turns:
            raise UsageError("There is nothing to answer again.")
        if not self.talk.options.get("temperature"):
            raise UsageError("At temperature 0 every answer is the same; try /set temperature 0.7.")
        old = self.talk.turns.pop()
        if not self.answer(old.said, seed=secrets.randbits(32)):
            self.talk.turns.append(old)

    def _set(self, argument: str) -> None:
        from dflash_mlx.request import Options

        if argument:
            name, value = commands.setting(argument)
            asked = {**self._asked, name: value}
            changed = _with_defaults(asked, self._defaults)
            Options.checked(changed)
            self._asked, self.talk.options = asked, changed
        settings = [f"{name} {value}" for name, value in self.talk.options.items()]
        self._view.say(", ".join(settings) or "Everything is unset.")

    def _think(self, how: str) -> None:
        if how not in ("on", "off", "hide"):
            raise UsageError(f"/think is {how}; expected on, off or hide.")
        self._view.hides_thoughts = how == "hide"
        if how != "hide":
            self._asked["think"] = how == "on"
            self.talk.options = {**self.talk.options, "think": how == "on"}
        self._view.say(f"thoughts: {'hidden' if how == 'hide' else how}")

    def _stats(self, _: str) -> None:
        if self._last is None:
            raise UsageError("There is no answer yet.")
        self._view.details(self._last)

    def _model(self, argument: str) -> None:
        if not argument:
            runs = "runs" if self._pair.is_loaded else "is loaded with the next message"
            lines = [f"{self._pair.name} {runs}", *on_this_machine()]
            self._view.say("\n".join([lines[0], "On this machine:", *lines[1:]] if lines[1:] else lines))
            return
        target, draft = commands.pair(argument)
        with _one_interrupt(self._stays):
            try:
                self._move(self._pair.switch(target, draft))
                self._view.say(self._ready())
                return
            except KeyboardInterrupt:
                if not self._stays:
                    raise
                self._view.say("stopped")
            except DFlashError as error:
                self.failed += 1
                self._view.error(str(error))
        stays = "stays" if self._pair.is_loaded else "is loaded again with the next message"
        self._view.say(f"{self._pair.name} {stays}.")

    def _move(self, generator: DFlashGenerator) -> None:
        """Go on with another pair: what was said is kept, and read anew by it."""
        old = self.talk
        self._defaults = generator.generation_defaults
        self.talk = generator.chat(old.system, **_with_defaults(self._asked, self._defaults))
        self.talk.turns = [replace(turn, ids=generator.answer_ids((), turn.answer)) for turn in old.turns]

    def _have_pair(self) -> None:
        """Load the pair that was given up for another which then could not be had."""
        if not self._pair.is_loaded:
            self._move(self._pair.open())

    def _ready(self) -> str:
        generator = self._pair.open()
        return f"{self._pair.name} · {generator.weights_gb:.2f} GB ready in {generator.seconds_load:.1f} s"

    def _save(self, path: str) -> None:
        self._have_pair()
        self._view.say(f"saved to {self.talk.save(path)}")

    def _load(self, path: str) -> None:
        self._have_pair()
        note = self.talk.load(path)
        if note:
            self._view.say(note)
        self._view.say(f"{len(self.talk.turns)} turns taken up; /undo forgets the last.")

    def _copy(self, _: str) -> None:
        if not self.talk.turns:
            raise UsageError("There is no answer yet.")
        self._view.say(self._view.copy(self.talk.turns[-1].answer))

    def _write(self, text: str) -> None:
        if not self._stays:
            raise UsageError("/edit needs a terminal.")
        if written := self._edit(text):
            self._view.say(written)
            self.answer(written)

    _actions: Mapping[str, Callable[[Chat, str], None]] = {
        "/help": _help,
        "/system": _system,
        "/reset": _reset,
        "/undo": _undo,
        "/retry": _retry,
        "/set": _set,
        "/think": _think,
        "/model": _model,
        "/stats": _stats,
        "/save": _save,
        "/load": _load,
        "/copy": _copy,
        "/edit": _write,
    }


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


def _with_defaults(asked: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """What to ask of the generator: what was asked for over the draws of the model's generation config.

    A temperature of 0, or a config that says not to sample, takes none of the model's own.
    """
    own: dict[str, Any] = {}
    if asked.get("temperature") != 0 and config.get("do_sample") is not False:
        own = {name: config[name] for name in _DRAWS if config.get(name) is not None}
    return {name: value for name, value in (own | dict(asked)).items() if value is not None}


@contextmanager
def _one_interrupt(active: bool) -> Iterator[None]:
    """Let one Ctrl-C through and no second: an impatient hand does not end the chat with the answer."""
    if not active or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def stop(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
