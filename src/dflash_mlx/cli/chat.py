"""The chat loop: lines in, turns of a conversation out. Knows no terminal.

The view shows, the reader asks.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from dflash_mlx.cli.lines import Ask
from dflash_mlx.cli.options import ChatOptions, without_effect
from dflash_mlx.cli.view import View
from dflash_mlx.errors import DFlashError

if TYPE_CHECKING:  # the generator loads MLX
    from dflash_mlx.generator import DFlashGenerator

_DRAWS = ("temperature", "top_p", "top_k")  # what a generation config says of them

_HELP = """\
/help   this list
/reset  forget the conversation
/exit   leave (so does Ctrl-D, and Ctrl-C twice)
Ctrl-C stops an answer; what was said of it stays in the conversation.
A line that starts with a space is sent as it is, whatever follows."""


class Chat:
    """One conversation.

    Args:
        generator: answers.
        view: shows them.
        options: as given; unset draws are the model's own.
        stays: whether Ctrl-C stops the answer alone and not the chat.
    """

    def __init__(self, generator: DFlashGenerator, view: View, options: ChatOptions, *, stays: bool):
        self._generator = generator
        self._view = view
        self._stays = stays
        self._start = [{"role": "system", "content": options.system}] if options.system else []
        self._options = _with_defaults(options, generator.generation_defaults)
        self.messages: list[dict[str, str]] = list(self._start)
        self.failed = 0  # turns that ended in an error
        if sentence := without_effect(options, self._options.get("temperature", 0)):
            view.note(sentence)

    def greet(self) -> None:
        """Say who answers, how, and how to leave."""
        draws = [f"{name} {self._options[name]:g}" for name in _DRAWS if name in self._options]
        drafter = self._generator.draft_name
        self._view.say(
            " · ".join(
                [
                    self._generator.target_name + (f" with {drafter}" if drafter else ", decoded plainly"),
                    ", ".join(draws) or "temperature 0",
                    "/help lists the commands",
                ]
            )
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
            if line.startswith("/"):
                self._command(line.strip())
            elif line.strip():
                self._turn(line)

    def _command(self, line: str) -> None:
        if line == "/help":
            self._view.say(_HELP)
        elif line == "/reset":
            self.messages = list(self._start)
            self._view.say("The conversation is forgotten.")
        else:
            self._view.say(f"{line} is not a command; /help lists them. A space before it sends it as text.")

    def _turn(self, text: str) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        answer: list[str] = []
        with _one_interrupt(self._stays):
            try:
                self._stream(asked, answer)
            except KeyboardInterrupt:
                if not self._stays:
                    raise
                self._view.say("stopped")
            except DFlashError as error:
                self.failed += 1
                self._view.error(str(error))
            if answer:
                self.messages = [*asked, {"role": "assistant", "content": "".join(answer)}]

    def _stream(self, messages: list[dict[str, str]], answer: list[str]) -> None:
        """Show an answer piece by piece and collect it in `answer`, so that a stopped one is not lost."""
        stats = None
        for chunk in self._generator.stream(messages, **self._options):
            if chunk.kind == "answer" and chunk.text:
                answer.append(chunk.text)
            self._view.piece(chunk.text, chunk.kind)
            stats = chunk.stats
        self._view.end_answer()
        if stats is not None:
            self._view.figures(stats)


def _with_defaults(options: ChatOptions, config: Mapping[str, Any]) -> dict[str, Any]:
    """What to ask of the generator: the given options over the draws of the model's generation config.

    A given temperature of 0, or a config that says not to sample, takes none of the model's own.
    """
    given = options.answer()
    if given.get("temperature") == 0 or config.get("do_sample") is False:
        return given
    own = {name: config[name] for name in _DRAWS if config.get(name) is not None}
    return own | given


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
