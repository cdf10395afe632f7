"""A draft network that knows the true continuation: what is proposed of it is the head's doing alone."""

from collections.abc import Sequence

import mlx.core as mx

from dflash_mlx.drafter import DraftConfig, DraftNetwork
from dflash_mlx.target import MLXTarget, taps

_CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]},
}


class Oracle(DraftNetwork):
    """Its rows are those that the target itself has over `text`, so that a whole head proposes the text."""

    def __init__(self, target: MLXTarget, text: Sequence[int], **changes: object) -> None:
        super().__init__(
            DraftConfig.from_dict({**_CONFIG, "vocab_size": target.vocab_size, **changes}, name="oracle"),
            name="oracle",
        )
        with target._lock, taps.recording([target._trunk], [0]) as outputs:
            target.model(mx.array([list(text)]), cache=target.make_cache())
        object.__setattr__(self, "_rows", outputs[0][0])  # no parameter
        mx.eval(self._rows, self.parameters())

    def __call__(self, block, fused, context):
        super().__call__(block, fused, context)
        rows = self._rows[context.length : context.length + block.shape[0] - 1]
        missing = block.shape[0] - 1 - rows.shape[0]
        return mx.pad(rows, [(0, missing), (0, 0)])
