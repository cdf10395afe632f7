"""The options of `dflash-mlx bench`. MLX is not loaded."""

from dataclasses import dataclass
from typing import Annotated, Any

from dflash_mlx.cli.options import PairOptions, option

SEED = 7
_RUN, _TEXT, _DRAWS, _OUTPUT = "What is run", "Text", "Draws", "Output"


@dataclass(frozen=True, kw_only=True)
class BenchOptions(PairOptions):
    """What a benchmark understands: the pair, what is run and where the results go."""

    quick: Annotated[
        bool, option(_RUN, "A few minutes on a small machine: fewer questions, shorter answers.", "--quick")
    ] = False
    classes: Annotated[
        str | None,
        option(_RUN, "Classes of built-in questions. Unset: all.", metavar="code,maths,..."),
    ] = None
    dataset: Annotated[
        str | None,
        option(
            _RUN,
            "Ask questions of these from the hub instead.",
            metavar="humaneval,gsm8k,math500,mbpp,mt-bench",
        ),
    ] = None
    limit: Annotated[int | None, option(_RUN, "Questions of each class. Unset: 4.")] = None
    context: Annotated[
        str | None,
        option(
            _RUN,
            "Lengths of the prompt in tokens; 0: the question alone. Unset: 0, with --quick 0,2k.",
            metavar="0,1k,4k,8k",
        ),
    ] = None
    blocks: Annotated[
        str | None,
        option(
            _RUN,
            "Fixed blocks to race against. Unset: 2, 4, 8 and the whole, with --quick half and the whole.",
            metavar="2,4,8",
        ),
    ] = None
    repeats: Annotated[int | None, option(_RUN, "Times that each question is answered. Unset: 3.")] = None
    cooldown: Annotated[
        float | None, option(_RUN, "Seconds of rest before each answer, for chips that heat up.")
    ] = None
    think: Annotated[
        bool | None,
        option(_TEXT, "Let a thinking model think, or not. Unset: as trained.", "--think/--no-think"),
    ] = None
    max_new_tokens: Annotated[int | None, option(_TEXT, "Most tokens in an answer. Unset: 128.")] = None
    temperature: Annotated[float | None, option(_DRAWS, "0 takes the most probable token. Unset: 0.")] = None
    top_p: Annotated[float | None, option(_DRAWS, "Draw among tokens with this share.")] = None
    top_k: Annotated[int | None, option(_DRAWS, "Draw among this many tokens (0: all).")] = None
    seed: Annotated[int | None, option(_DRAWS, f"Seed of all draws. Unset: {SEED}.")] = None
    out: Annotated[
        str | None,
        option(_OUTPUT, "Folder for the results. Unset: dflash-bench/ and the time.", metavar="FOLDER"),
    ] = None
    json: Annotated[bool, option(_OUTPUT, "Print one JSON object instead of tables.", "--json")] = False
    debug: Annotated[bool, option(_OUTPUT, "Show tracebacks.", "--debug")] = False

    def answer(self) -> dict[str, Any]:
        """The given options of every answer but its length."""
        return self._given("think", "temperature", "top_p", "top_k", "seed")
