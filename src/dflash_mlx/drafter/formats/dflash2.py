"""DFlash2: the v1 network with convolutions around its sublayers and a candidate selector."""

from dflash_mlx.drafter.formats.base import Config, Format, count, either
from dflash_mlx.drafter.parts import Convolution, Parts, Selector
from dflash_mlx.errors import CheckpointError


def _parts(config: Config, name: str) -> Parts:
    convolution = Convolution(
        taps=count(config, "conv_kernel_size", name), group_size=count(config, "conv_group_size", name)
    )
    if config["hidden_size"] % convolution.group_size:
        raise CheckpointError(
            f"The config of {name} has convolution groups of {convolution.group_size} channels, "
            f"which do not divide its hidden size {config['hidden_size']}."
        )
    fewer = either(config, "selector_vocab_size")
    rows = count(config, "vocab_size" if fewer is None else "selector_vocab_size", name)
    selector = Selector(
        rank=count(config, "selector_rank", name), top_k=count(config, "selector_top_k", name), rows=rows
    )
    return Parts(raw_embedding=True, convolution=convolution, selector=selector)


FORMAT = Format(
    title="DFlash2",
    architectures=("DFlash2DraftModel",),
    knows=frozenset({"conv_kernel_size", "selector_rank"}),
    parts=_parts,
)
