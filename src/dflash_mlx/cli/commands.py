"""The chat's commands: a line that begins with a slash in, a name and its argument out. Carries nothing out itself."""

import difflib
import glob
import os
import shlex
from collections.abc import Callable
from typing import NamedTuple

from dflash_mlx.errors import UsageError

COMMANDS = {
    "/help": "this list",
    "/system": "[TEXT]  show or change the system message",
    "/reset": "forget the conversation",
    "/undo": "forget the last question and its answer",
    "/retry": "answer the last question again, with another seed",
    "/set": "[NAME VALUE]  show the settings, or change one; VALUE none unsets it",
    "/think": "on|off|hide  let the model think, or not, or think unseen",
    "/model": "[TARGET [DRAFTER]]  show what runs, or go on with another pair",
    "/stats": "what the last answer took",
    "/save": "PATH  write the conversation to a file",
    "/load": "PATH  go on with a conversation from a file",
    "/copy": "put the last answer on the clipboard",
    "/edit": "write a message in $EDITOR",
    "/exit": "leave (so does Ctrl-D, and Ctrl-C twice)",
}

HELP = "\n".join(
    [
        *(f"{name:8}{text}" for name, text in COMMANDS.items()),
        'Alt-Enter begins a new line, and so does Enter behind a backslash or between lines of three quotes (""").',
        "Ctrl-C stops an answer; what was said of it stays in the conversation.",
        "A line that starts with a space is sent as it is, whatever follows.",
    ]
)

SETTINGS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
    "max_new_tokens": int,
    "stop": str,
}

_BARE = {"/help", "/reset", "/undo", "/retry", "/stats", "/copy", "/exit"}


class Command(NamedTuple):
    """What was typed."""

    name: str
    argument: str  # "" where there is none


def parse(line: str) -> Command:
    """Take a command line apart.

    Raises:
        UsageError: an unknown name, or an argument where none belongs.
    """
    name, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    if name not in COMMANDS or (argument and name in _BARE):
        near = _nearest(name)
        hint = f"; {near} is one" if near else "; /help lists them"
        raise UsageError(f"{line.strip()} is not a command{hint}. A space before it sends it as text.")
    if not argument and name in ("/save", "/load", "/think"):
        raise UsageError(f"{name} needs more: {name} {COMMANDS[name]}.")
    return Command(name, argument)


def setting(argument: str) -> tuple[str, object]:
    """The name and value of a /set; the value is None where it is to be unset.

    Raises:
        UsageError: an unknown name, or a value of another kind.
    """
    name, _, text = argument.partition(" ")
    name, text = name.replace("-", "_").lstrip("_"), text.strip()
    if name not in SETTINGS:
        raise UsageError(f"{name} is not a setting; they are {', '.join(SETTINGS)}.")
    if text == "none":
        return name, None
    try:
        return name, SETTINGS[name](text)
    except ValueError:
        kind = "a whole number" if SETTINGS[name] is int else "a number"
        raise UsageError(f"{name} is {text or 'empty'}; expected {kind}, or none.") from None


def pair(argument: str) -> tuple[str, str | None]:
    """The target and, where one is named, the drafter of a /model.

    Raises:
        UsageError: more than two names, or a quote that nothing closes.
    """
    try:
        names = shlex.split(argument)
    except ValueError:
        names = []
    if not 1 <= len(names) <= 2 or not all(names):
        raise UsageError(
            f"/model takes a target and a drafter, quoted where they hold spaces; found {argument}."
        )
    return names[0], names[1] if len(names) == 2 else None


def _nearest(name: str) -> str | None:
    """The command that was likely meant."""
    if len(name) < 2:
        return None
    begun = [known for known in COMMANDS if name.startswith(known) or known.startswith(name)]
    return next(iter(begun or difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.7)), None)


def completions(line: str, names: Callable[[], list[str]] = list) -> list[str]:
    """What could stand in place of the last word of a command line.

    Args:
        line: as far as it is written.
        names: the models that are known.
    """
    words = line.split(" ")
    if len(words) == 1:
        choices = list(COMMANDS)
    elif len(words) == 2 and words[0] == "/set":
        choices = list(SETTINGS)
    elif len(words) == 2 and words[0] == "/think":
        choices = ["on", "off", "hide"]
    elif len(words) in (2, 3) and words[0] == "/model":
        choices = names()
    elif len(words) == 2 and words[0] in ("/save", "/load"):
        choices = _paths(words[1])
    else:
        choices = []
    return [choice for choice in choices if choice.startswith(words[-1])]


def _paths(begun: str) -> list[str]:
    found = sorted(glob.glob(glob.escape(os.path.expanduser(begun)) + "*"))
    shown = [path + os.sep if os.path.isdir(path) else path for path in found]
    return [begun + path[len(os.path.expanduser(begun)) :] for path in shown]
