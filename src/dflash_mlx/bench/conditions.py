"""What could cost a pair its acceptance: how it runs now in, one changed thing at a time out. Runs nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.engine import Engine
from dflash_mlx.loading import has_template

LONG_PROMPT = "long prompt"
"""The condition that is expected to cost something."""

_LONG = 1024  # tokens of a prompt that is filled up
_NOT_ALONE = 0.6  # of the memory, which the pair may take together with another copy of itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One thing that is different from how the pair runs now."""

    what: str
    now: str
    instead: str
    cause: str  # what a gain would mean
    advice: str
    options: Mapping[str, Any] = field(default_factory=dict)  # of every answer
    loading: Mapping[str, Any] = field(default_factory=dict)  # of the pair; empty: nothing is loaded again
    whole: bool = False  # the target is loaded again too
    shift: int = 0  # layers by which the taps move
    block: int | None = None  # rows that are drafted
    every_word: bool = False  # the shortlist is left out
    context: int = 0  # tokens that the prompt is filled up to


@dataclass(frozen=True, slots=True)
class Untried:
    """Something that could not be varied, and why."""

    what: str
    why: str


def conditions(
    engine: Engine, options: Mapping[str, Any], loading: Mapping[str, Any]
) -> tuple[list[Condition], list[Untried]]:
    """Everything that can be varied here.

    Args:
        engine: the pair as it was loaded.
        options: of every answer, as given.
        loading: arguments that the pair was loaded with, as given.
    """
    found: list[Condition] = []
    untried: list[Untried] = []
    for made in (
        _thinking(engine, options),
        _template(engine, options),
        _system(options),
        _temperature(options),
        *_shifts(engine),
        _dtype(engine, loading),
        *(_given(name, loading, engine) for name in ("draft_bits", "draft_window", "kv_bits")),
        _words(engine),
        _block(engine),
        _context(engine, options),
    ):
        if isinstance(made, Condition):
            found.append(made)
        else:
            untried.append(made)
    return found, untried


def _thinking(engine: Engine, options: Mapping[str, Any]) -> Condition | Untried:
    pair = engine.pair
    if not pair.target.tokenizer.has_thinking:
        return Untried("thinking", "the target has no thoughts")
    if options.get("raw"):
        return Untried("thinking", "the prompt goes in without a template")
    given = options.get("think")
    now = pair.thinking if given is None else given
    instead = not now
    trained = (
        ""
        if pair.thinking is None
        else f"; the pair is known to be trained with thinking {_on(pair.thinking)}"
    )
    return Condition(
        what="thinking",
        now=_on(bool(now)),
        instead=_on(instead),
        cause=f"the drafter was trained on answers with thinking {_on(instead)}{trained}",
        advice="--think" if instead else "--no-think",
        options={"think": instead},
    )


def _on(thinking: bool) -> str:
    return "on" if thinking else "off"


def _template(engine: Engine, options: Mapping[str, Any]) -> Condition | Untried:
    if options.get("system") is not None or options.get("think") is not None:
        return Untried("template", "a system message or a thinking mode is given, which needs it")
    raw = bool(options.get("raw"))
    if raw and not has_template(engine.pair.target.tokenizer):
        return Untried("template", "the target has none")
    return Condition(
        what="template",
        now="left out" if raw else "used",
        instead="used" if raw else "left out",
        cause="the drafter was trained on text of the other form, or the template is not the one it knew",
        advice="leave out --raw" if raw else "look at the tokenizer's chat template, or use --raw",
        options={"raw": not raw},
    )


def _system(options: Mapping[str, Any]) -> Condition | Untried:
    if options.get("system") is None:
        return Untried("system message", "none is given")
    return Condition(
        what="system message",
        now="given",
        instead="left out",
        cause="the drafter was trained without such a message",
        advice="shorten the system message, or leave it out",
        options={"system": None},
    )


def _temperature(options: Mapping[str, Any]) -> Condition | Untried:
    now = options.get("temperature", 0.0)
    if now == 0:
        return Untried("temperature", "it is 0 already")
    return Condition(
        what="temperature",
        now=f"{now:g}",
        instead="0",
        cause="draws at this temperature are hard to foresee, for any drafter",
        advice="lower --temperature where the text allows",
        options={"temperature": 0.0},
    )


def _shifts(engine: Engine) -> list[Condition | Untried]:
    """Layer ids that are off by one cost acceptance and never an error."""
    draft = engine.pair.draft
    assert draft is not None
    taps, layers = draft.config.target_layer_ids, engine.pair.target.model.num_layers
    found: list[Condition | Untried] = []
    for shift in (-1, 1):
        moved = tuple(tap + shift for tap in taps)
        if min(moved) < 0 or max(moved) >= layers:
            found.append(Untried(f"layers {shift:+d}", f"the target has layers 0 to {layers - 1}"))
            continue
        found.append(
            Condition(
                what=f"layers {shift:+d}",
                now=_listed(taps),
                instead=_listed(moved),
                cause="the drafter's layer ids are off by one: another revision, or a conversion that counts otherwise",
                advice=f"set target_layer_ids to {_listed(moved)} in the drafter's config.json, or fetch it again",
                shift=shift,
            )
        )
    return found


def _listed(taps: tuple[int, ...]) -> str:
    return " ".join(map(str, taps))


def _dtype(engine: Engine, loading: Mapping[str, Any]) -> Condition | Untried:
    now = str(engine.pair.target.model.dtype).removeprefix("mlx.core.")
    if now == "float32":
        return Untried("dtype", "it is float32 already")
    if 3 * engine.nbytes > _NOT_ALONE * 1e9 * engine.machine.memory_gb:
        return Untried("dtype", "the pair in float32 does not fit beside itself")
    return Condition(
        what="dtype",
        now=now,
        instead="float32",
        cause=f"{now} is too coarse for the drafter, or overflows in it",
        advice="--dtype bfloat16" if now == "float16" else "--dtype float32",
        loading={"dtype": "float32"},
        whole=True,
    )


_TOLD = {
    "draft_bits": ("the drafter lost too much when it was quantised", "leave out --draft-bits"),
    "draft_window": ("the drafter needs more of the context", "widen --draft-window, or leave it out"),
    "kv_bits": (
        "the quantised cache is another model than the drafter was trained for",
        "leave out --kv-bits",
    ),
}


def _given(name: str, loading: Mapping[str, Any], engine: Engine) -> Condition | Untried:
    if loading.get(name) is None:
        return Untried(name.replace("_", " "), "not given")
    if loading[name] == "auto" and (engine.pair.draft is None or engine.pair.draft.bits is None):
        return Untried(name.replace("_", " "), "the drafter was left as it is")
    whole = name == "kv_bits"
    if whole and 2 * engine.nbytes > _NOT_ALONE * 1e9 * engine.machine.memory_gb:
        return Untried(name.replace("_", " "), "the pair does not fit beside itself")
    cause, advice = _TOLD[name]
    return Condition(
        what=name.replace("_", " "),
        now=str(loading[name]),
        instead="not given",
        cause=cause,
        advice=advice,
        loading={name: None},
        whole=whole,
    )


def _words(engine: Engine) -> Condition | Untried:
    if engine.shortlist is None:
        return Untried("draft vocab", "every word is proposed already")
    return Condition(
        what="draft vocab",
        now=f"{len(engine.shortlist):,}",
        instead="full",
        cause="words that the text needs are not on the shortlist",
        advice="--draft-vocab full, or a larger number",
        every_word=True,
    )


def _block(engine: Engine) -> Condition | Untried:
    """Half a block is another function of the network: with a sound one the same places are about as good."""
    assert engine.block_size is not None
    if engine.block_size < 4:
        return Untried("block size", f"{engine.block_size} leaves nothing to shorten")
    half = engine.block_size // 2
    return Condition(
        what="block size",
        now=str(engine.block_size),
        instead=str(half),
        cause="the drafter was trained on shorter blocks",
        advice=f"--block-size {half}",
        block=half,
    )


def _context(engine: Engine, options: Mapping[str, Any]) -> Condition | Untried:
    limit = engine.pair.target.model.max_positions
    if options.get("raw"):
        return Untried(LONG_PROMPT, "the prompt goes in as it is")
    if limit is not None and limit - options["max_new_tokens"] < _LONG:
        return Untried(LONG_PROMPT, f"the target takes {limit} tokens")
    return Condition(
        what=LONG_PROMPT,
        now="the question",
        instead=f"after {_LONG:,} tokens",
        cause="the drafter does better with more context",
        advice="nothing: longer conversations will go faster",
        context=_LONG,
    )
