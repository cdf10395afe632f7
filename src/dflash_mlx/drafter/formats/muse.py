"""Muse assistants: the v1 network under other names, bidirectional although its layers slide."""

from dflash_mlx.drafter.formats.base import Config, Format
from dflash_mlx.drafter.parts import Parts

_RENAMED = {"encoder.fc": "fc", "encoder.output_norm_enc": "hidden_norm"}


def _flatten(config: Config, name: str) -> Config:
    return {"is_causal": False, **config}


FORMAT = Format(
    title="Muse assistant",
    architectures=("MuseGlimmerAssistantModel",),
    model_types=("muse_glimmer_assistant",),
    flatten=_flatten,
    parts=lambda config, name: Parts(raw_embedding=True),  # its target norms what it embeds
    paths=lambda path: (_RENAMED.get(path, path),),
)
