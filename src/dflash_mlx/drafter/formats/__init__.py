"""Drafter formats: a config in, the format that reads it out; whatever is not in the table is refused by name."""

from typing import Any

from dflash_mlx.drafter.formats import dflash2, dspark, laguna, muse, speculators, zlab
from dflash_mlx.drafter.formats.base import Config, Format, either, refuse
from dflash_mlx.errors import UnsupportedError

FORMATS = (zlab.FORMAT, dflash2.FORMAT, dspark.FORMAT, muse.FORMAT, laguna.FORMAT)

_BY_ARCHITECTURE = {name: known for known in FORMATS for name in known.architectures}
_BY_MODEL_TYPE = {name: known for known in FORMATS for name in known.model_types}
_SPECULATORS = {"dflash": speculators.DFLASH, "dspark": speculators.DSPARK}
# Keys, top-level or in dflash_config, that change the network, and the drafters they belong to. A format that
# expects one says so; `key:value` stands for one value of it.
_FOREIGN = {
    "conv_kernel_size": "a second-generation drafter (DFlash2)",
    "selector_rank": "a second-generation drafter (DFlash2)",
    "markov_rank": "a DSpark drafter",
    "projector_type": "a drafter with another projector",
    "use_swa": "a MiMo drafter",
    "attention_value_scale": "a MiMo drafter",
    "attention_sink_bias": "a drafter with attention sinks",
    "sample_from_anchor": "a drafter whose anchor slot predicts",
    "shift_label": "a drafter whose slots predict the token after them",
}
_HARMLESS = {"projector_type:dflash"}


def find(config: Config, *, name: str) -> Format:
    """The format of a drafter's `config.json`; `name` is the drafter's, for messages.

    Raises:
        UnsupportedError: a plain model, or a drafter of a format that is not known.
    """
    if kind := config.get("speculators_model_type"):
        if found := _SPECULATORS.get(kind):
            return _checked(found, config, name)
        raise UnsupportedError(
            f"{name} is a drafter in the 'speculators' format of type {kind!r}, which this version does not "
            f"support; it runs {', '.join(_SPECULATORS)}."
        )
    architecture = next(iter(config.get("architectures") or ()), None)
    marked = bool(config.get("dflash_config")) or config.get("target_layer_ids") is not None
    found = _BY_ARCHITECTURE.get(str(architecture))
    if architecture is None and marked:
        found = zlab.FORMAT
    if found is zlab.FORMAT:
        found = _BY_MODEL_TYPE.get(str(config.get("model_type")), found)
    if found:
        return _checked(found, config, name)
    raise _unknown(architecture, marked, name)


def _unknown(architecture: str | None, marked: bool, name: str) -> UnsupportedError:
    supported = ", ".join(_BY_ARCHITECTURE)
    if architecture is None:
        return UnsupportedError(f"{name} is not a drafter: its config names none of {supported}.")
    if marked or "draft" in architecture.lower() or "dspark" in architecture.lower():
        return UnsupportedError(
            f"{name} has the drafter architecture {architecture!r}, which this version does not support; "
            f"it runs {supported}, and the speculators format."
        )
    return UnsupportedError(
        f"{name} ({architecture}) is not a drafter; give it as the target and a drafter as the draft."
    )


def _checked(found: Format, config: Config, name: str) -> Format:
    for key, kind in _FOREIGN.items():
        value: Any = either(config, key)
        exact = f"{key}:{value}"
        if value and not {key, exact} & found.knows and exact not in _HARMLESS:
            raise refuse(name, f"{kind} ({key} is {value!r})")
    return found
