"""The options of `dflash-mlx doctor`, and which of them need --diagnose or --recalibrate. MLX is not loaded."""

from dataclasses import dataclass, fields
from typing import Annotated, Any

from dflash_mlx.cli.bench_options import SEED
from dflash_mlx.cli.options import PairOptions, flag, option
from dflash_mlx.errors import UsageError

_DIAGNOSIS, _OUTPUT = "With --diagnose", "Output"
_ALWAYS = ("json", "debug", "diagnose", "recalibrate")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(PairOptions):
    """What the doctor understands; of a pair only where it is to be diagnosed or measured."""

    diagnose: Annotated[
        bool,
        option(_OUTPUT, "Load a pair, and find out what its acceptance depends on.", "--diagnose"),
    ] = False
    recalibrate: Annotated[
        bool,
        option(_OUTPUT, "Load a pair, and measure again what drafting costs with it here.", "--recalibrate"),
    ] = False
    prompt_file: Annotated[
        str | None,
        option(_DIAGNOSIS, "Ask what this file holds; a line --- begins another prompt.", metavar="PATH"),
    ] = None
    limit: Annotated[int | None, option(_DIAGNOSIS, "Built-in questions of each class. Unset: 1.")] = None
    max_new_tokens: Annotated[int | None, option(_DIAGNOSIS, "Most tokens in an answer. Unset: 48.")] = None
    system: Annotated[str | None, option(_DIAGNOSIS, "System message.")] = None
    think: Annotated[
        bool | None,
        option(_DIAGNOSIS, "Thinking as you use it. Unset: as trained.", "--think/--no-think"),
    ] = None
    raw: Annotated[bool, option(_DIAGNOSIS, "Prompts as they are, without template.", "--raw")] = False
    temperature: Annotated[float | None, option(_DIAGNOSIS, "As you use it. Unset: 0.")] = None
    json: Annotated[bool, option(_OUTPUT, "Print one JSON object.", "--json")] = False
    debug: Annotated[bool, option(_OUTPUT, "Show tracebacks.", "--debug")] = False

    def answer(self) -> dict[str, Any]:
        """The options of every answer."""
        given = self._given("system", "think", "raw", "temperature", "max_new_tokens")
        return {"max_new_tokens": 48, "seed": SEED} | given


def check_doctor(options: DoctorOptions) -> None:
    """Refuse options that need a pair where none is loaded, or that mean nothing where one is measured.

    Raises:
        UsageError: naming the first.
    """
    if options.diagnose and options.recalibrate:
        raise UsageError("--diagnose and --recalibrate are both given; give one after the other.")
    if options.diagnose:
        return
    of_a_pair = [option.name for option in fields(PairOptions)]
    for name in options.given():
        if name in _ALWAYS or (options.recalibrate and name in of_a_pair and name != "mode"):
            continue
        if options.recalibrate:
            raise UsageError(f"{flag(name)} changes nothing of what --recalibrate measures; leave it out.")
        other = " or --recalibrate" if name in of_a_pair and name != "mode" else ""
        raise UsageError(f"{flag(name)} goes with --diagnose{other}; give that too, or leave it out.")
