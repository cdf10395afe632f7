"""Whole generators over the families' tiny targets."""

from functools import cache
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx import DFlashGenerator
from dflash_mlx.loading import LoadedTarget
from tests.kit.families import family
from tests.kit.tokenizers import build_bpe
from tests.loading.checkpoints import VOCAB

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
def loaded(name: str, **changes: Any) -> LoadedTarget:
    """A family's target with a tokenizer; nothing ends its answers but what a test asks for."""
    model = family(name, vocab_size=VOCAB, **changes)
    return LoadedTarget(model, tokenizer(), (), {}, f"tiny-{name}")


def pair_of(name: str, draft: Path, **changes: Any) -> tuple[DFlashGenerator, DFlashGenerator]:
    """One that drafts and keeps conversations, and one that does neither; over the same target."""
    target = loaded(name, **changes)
    return DFlashGenerator(target, draft), DFlashGenerator(target, mode="off", kept_gb=0)
