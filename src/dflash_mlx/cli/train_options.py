"""The options of `dflash-mlx train`, and which stage each belongs to. MLX is not loaded."""

from dataclasses import dataclass, fields
from typing import Annotated, Any

from dflash_mlx.cli.options import flag, option
from dflash_mlx.errors import UsageError

STAGES = ("data", "train", "eval")
_RUN, _DATA, _TRAIN, _EVAL, _OUTPUT = "Run", "Data", "Train", "Eval", "Output"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What training a drafter understands; what is unset is left to the functions' own defaults."""

    target_model: Annotated[
        str | None, option(_RUN, "Target: folder, hub id or alias. Unset: this machine's default target.")
    ] = None
    out: Annotated[
        str | None, option(_RUN, "Folder of the run; one that was begun goes on.", metavar="FOLDER")
    ] = None
    stage: Annotated[
        str | None, option(_RUN, "Run one stage alone. Unset: all three.", metavar="data|train|eval")
    ] = None
    dtype: Annotated[
        str | None,
        option(
            _RUN,
            "Type of the target's weights. Unset: as stored on a GPU, float32 on a CPU.",
            metavar="float32|bfloat16|float16",
        ),
    ] = None
    think: Annotated[
        bool | None,
        option(
            _RUN,
            "Answers with thoughts, or without. Unset: as the known pair, else the template.",
            "--think/--no-think",
        ),
    ] = None
    seed: Annotated[int | None, option(_RUN, "Seed of everything random. Unset: 0.")] = None
    prompts: Annotated[
        list[str] | None,
        option(_DATA, "Prompts, a line each: text or JSON lines (repeatable). Unset: made up.", "--prompts"),
    ] = None
    dataset: Annotated[
        str | None,
        option(_DATA, "Prompts from the rows of a public data set of the hub.", metavar="OWNER/NAME"),
    ] = None
    dataset_rows: Annotated[int | None, option(_DATA, "Rows of it, at most. Unset: 2000.")] = None
    tokens: Annotated[int | None, option(_DATA, "Tokens of answers to gather. Unset: 1000000.")] = None
    max_answer_tokens: Annotated[int | None, option(_DATA, "Most tokens in an answer. Unset: 512.")] = None
    sampled_share: Annotated[
        float | None, option(_DATA, "Share of answers that are drawn, not greedy. Unset: 0.3.")
    ] = None
    temperature: Annotated[float | None, option(_DATA, "Of the answers that are drawn. Unset: 0.7.")] = None
    own_share: Annotated[
        float | None, option(_DATA, "Share of prompts that the target makes up. Unset: 0.12.")
    ] = None
    batch_size: Annotated[int | None, option(_DATA, "Answers written at once. Unset: 32.")] = None
    init: Annotated[
        str | None,
        option(_TRAIN, "Begin from the target's own layers, from nothing, or from a drafter. Unset: target.",
               metavar="target|random|DRAFTER"),
    ] = None  # fmt: skip
    layers: Annotated[int | None, option(_TRAIN, "Layers of the drafter.")] = None
    block_size: Annotated[int | None, option(_TRAIN, "Tokens in a block, the anchor included.")] = None
    taps: Annotated[str | None, option(_TRAIN, "Target layers that the drafter reads.", metavar="1,8,14")] = (
        None
    )
    epochs: Annotated[float | None, option(_TRAIN, "Times over all answers. Unset: 6.")] = None
    steps: Annotated[int | None, option(_TRAIN, "Steps, instead of epochs.")] = None
    minutes: Annotated[float | None, option(_TRAIN, "End, with the schedule, after this time too.")] = None
    learning_rate: Annotated[float | None, option(_TRAIN, "Highest of the schedule. Unset: 6e-4.")] = None
    anchors: Annotated[int | None, option(_TRAIN, "Blocks of one answer in a step. Unset: 64.")] = None
    dpace: Annotated[
        bool, option(_TRAIN, "Weigh places by how many accepted tokens hang on them.", "--dpace")
    ] = False
    gamma: Annotated[
        float | None, option(_TRAIN, "How slowly the loss fades by place. Unset: by the block size.")
    ] = None
    soft: Annotated[
        float | None,
        option(_TRAIN, "Share of the loss that follows the target's likeliest tokens. Unset: 0.5."),
    ] = None
    surprising: Annotated[
        float | None,
        option(_TRAIN, "Share of blocks that begin at tokens the target did not expect. Unset: 0."),
    ] = None
    candidates: Annotated[
        int | None, option(_TRAIN, "Tokens in a step's cross-entropy; 0: all. Unset: 8192.")
    ] = None
    batch_rows: Annotated[int | None, option(_TRAIN, "Rows of blocks in a step. Unset: 3072.")] = None
    gradient_checkpointing: Annotated[
        bool,
        option(_TRAIN, "Compute twice what would take memory to keep.", "--gradient-checkpointing"),
    ] = False
    compare_with: Annotated[
        str | None, option(_EVAL, "Another drafter to measure beside. Unset: the one that --init names.")
    ] = None
    limit: Annotated[int | None, option(_EVAL, "Prompts of each class. Unset: 4.")] = None
    max_new_tokens: Annotated[int | None, option(_EVAL, "Tokens of each answer. Unset: 128.")] = None
    json: Annotated[bool, option(_OUTPUT, "Print one JSON object.", "--json")] = False
    debug: Annotated[bool, option(_OUTPUT, "Show tracebacks.", "--debug")] = False

    def given(self) -> dict[str, Any]:
        """Every option that was given, by name."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default and value != []
        }

    def of(self, *names: str) -> dict[str, Any]:
        """Those of these names that were given."""
        return {name: value for name, value in self.given().items() if name in names}

    @property
    def stages(self) -> tuple[str, ...]:
        """What to run, in order."""
        return STAGES if self.stage is None else (self.stage,)


RECIPE = ("max_answer_tokens", "sampled_share", "temperature", "own_share", "batch_size", "seed")
_WEIGHING = ("dpace", "gamma", "soft", "surprising", "candidates")
_SIZES = ("anchors", "batch_rows", "gradient_checkpointing")
TRAINING = ("epochs", "steps", "minutes", "learning_rate", *_WEIGHING, *_SIZES, "seed")
SHAPE = ("layers", "block_size", "taps")
_ONLY = {
    "data": {"prompts", "dataset", "dataset_rows", "tokens", "think", *RECIPE} - {"seed"},
    "train": {"init", *SHAPE, *TRAINING} - {"seed"},
    "eval": {"compare_with", "limit", "max_new_tokens"},
}


def check(options: TrainOptions) -> None:
    """Refuse what means nothing, before anything is loaded.

    Raises:
        UsageError: one sentence that names the option.
    """
    if options.out is None or not options.out.strip():
        raise UsageError("--out is missing: the folder that the run is kept in.")
    if options.stage is not None and options.stage not in STAGES:
        raise UsageError(f"--stage is {options.stage}; expected one of {', '.join(STAGES)}.")
    given = options.given()
    for stage, names in _ONLY.items():
        for name in given:
            if name in names and stage not in options.stages:
                raise UsageError(
                    f"{flag(name)} belongs to the {stage} stage, and --stage is {options.stage}."
                )
    for name in ("dataset_rows", "tokens", "limit", "max_new_tokens", "layers"):
        if name in given and given[name] < 1:
            raise UsageError(f"{flag(name)} is {given[name]}; expected 1 or more.")
    if options.block_size is not None and options.block_size < 2:
        raise UsageError(f"--block-size is {options.block_size}; expected 2 or more.")
    if options.seed is not None and options.seed < 0:
        raise UsageError(f"--seed is {options.seed}; expected 0 or more.")
    if options.seed is not None and options.stage == "eval":
        raise UsageError("--seed says nothing to the eval stage, which draws nothing; leave it out.")
    if options.steps is not None and options.epochs is not None:
        raise UsageError("--steps and --epochs both say how long to train; give one of them.")
    if options.dataset_rows is not None and options.dataset is None:
        raise UsageError("--dataset-rows without --dataset says nothing; give both or neither.")
    if options.init not in (None, "target", "random"):
        for name in SHAPE:
            if name in given:
                raise UsageError(f"{flag(name)} is fixed by the drafter that --init names; leave one out.")


def taps_of(text: str | None) -> tuple[int, ...] | None:
    """The numbers of --taps.

    Raises:
        UsageError: something else.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(
            f"--taps is {text!r}; expected layer numbers with commas between them, such as 1,8,14."
        )
    return tuple(map(int, parts))
