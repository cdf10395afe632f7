"""Whole generators over the families' tiny targets."""

import copy
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx import DFlashGenerator
from dflash_mlx.loading import LoadedTarget
from tests.kit.families import FAMILIES
from tests.kit.models import sharpened
from tests.kit.tokenizers import build_bpe
from tests.loading.checkpoints import VOCAB, write_config

# As Qwen's: an empty thought where none is wanted, and no thought of any earlier answer.
REWRITING = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n"
    "{{ m['content'].split('</think>')[-1].lstrip('\\n') if m['role'] == 'assistant' else m['content'] }}"
    "<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@cache
def tokenizer() -> TokenizerWrapper:
    """One that knows thoughts, with the template that rewrites history."""
    made = build_bpe(vocab_size=300)
    made.chat_template = REWRITING
    return TokenizerWrapper(made, eos_token_ids=[])


@cache
def loaded(name: str, kv_bits: int | None = None, **changes: Any) -> LoadedTarget:
    """A family's target with a tokenizer; nothing ends its answers but what a test asks for."""
    config = copy.deepcopy(FAMILIES[name])
    inner = config.get("text_config", config)
    inner.update(changes)
    for part in (config, inner):
        part |= {key: VOCAB for key in part if key in ("vocab_size", "vocab_size_per_layer_input")}
    model = sharpened(config, f"tiny-{name}", kv_bits=kv_bits)
    return LoadedTarget(model, tokenizer(), (), {}, f"tiny-{name}")


def pair_of(name: str, draft: Path, **changes: Any) -> tuple[DFlashGenerator, DFlashGenerator]:
    """One that drafts and keeps conversations, and one that does neither; over the same target."""
    target = loaded(name, **changes)
    fitted = draft.with_name(f"{draft.name}-{target.model.num_layers}")
    shutil.copytree(draft, fitted, dirs_exist_ok=True)
    config = json.loads((draft / "config.json").read_text())
    write_config(fitted, {**config, "num_target_layers": target.model.num_layers})
    return DFlashGenerator(target, fitted), DFlashGenerator(target, mode="off", kept_gb=0)
