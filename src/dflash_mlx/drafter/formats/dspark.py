"""DSpark and DeepSpec drafters: the anchor slot predicts too, and a Markov head ties neighbours together.

A block of K rows gives K drafts. Embedding and head may be in the file; without a Markov head it is DeepSpec's
plain drafter, whose blocks work alike.
"""

from dflash_mlx.drafter.formats.base import Config, Format, count, either, refuse, without_prefix
from dflash_mlx.drafter.parts import Markov, Parts
from dflash_mlx.errors import CheckpointError

_CONVOLVED = ("dspark_backbone_conv_enabled", "conv_kernel_size")


def _flatten(config: Config, name: str) -> Config:
    for key in _CONVOLVED:
        if either(config, key):
            raise refuse(name, f"a DSpark drafter with convolutions ({key} is set)")
    if either(config, "sample_from_anchor") is False:
        raise refuse(name, "a DSpark drafter whose anchor slot does not predict")
    if config.get("draft_vocab_size", config.get("vocab_size")) != config.get("vocab_size"):
        raise refuse(name, f"a DSpark drafter with a vocabulary of its own ({config['draft_vocab_size']})")
    return {"is_causal": False, **config}


def heads(config: Config, name: str, *, head_rows: int | None = None) -> Parts:
    """The Markov and confidence heads of a flat config; `head_rows` where the head has a vocabulary of its own.

    Raises:
        UnsupportedError: a Markov head of another type.
        CheckpointError: values that are missing or contradict each other.
    """
    markov = None
    if either(config, "markov_rank"):
        kind = either(config, "markov_head_type") or "vanilla"
        if kind != "vanilla":
            raise refuse(name, f"a DSpark drafter with a Markov head of type {kind!r}")
        rows = count(config, "vocab_size", name)
        markov = Markov(rank=count(config, "markov_rank", name), rows=rows, head_rows=head_rows or rows)
    confident = bool(either(config, "enable_confidence_head"))
    with_markov = confident and bool(either(config, "confidence_head_with_markov"))
    if with_markov and not markov:
        raise CheckpointError(
            f"The config of {name} asks for a confidence head that reads its Markov head, but has no markov_rank."
        )
    return Parts(
        anchor_predicts=True, markov=markov, confidence_head=confident, confidence_sees_markov=with_markov
    )


FORMAT = Format(
    title="DSpark",
    architectures=("Qwen3DSparkModel", "DSparkDraftModel"),
    knows=frozenset({"markov_rank", "sample_from_anchor", "shift_label", "projector_type:dspark"}),
    taps_embedding=True,
    own_ends=True,
    flatten=_flatten,
    parts=heads,
    paths=without_prefix,
)
