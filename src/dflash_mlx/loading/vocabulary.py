"""Which words of a vocabulary come first: a tokenizer and counts in, all ids in the order of their frequency out.

Where nothing was counted the order of the ids stands for it: byte-pair merges are numbered as they were learnt, the
most frequent first. Single characters are not always (SentencePiece puts them last) and come first here.
"""

from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.drafter.frequent import FrequentWords

_MOST_ADDED = 1024  # more than these are room for the future, not words
_CHARACTERS = [chr(code) for code in range(33, 127)]
_SPACES = ["▁", "Ġ", "Ċ", "ĉ", "\n", "\t", " "]  # as the two kinds of tokenizers write space, newline and tab
_BYTES = [f"<0x{value:02X}>" for value in range(256)]


def by_frequency(
    tokenizer: TokenizerWrapper, vocab_size: int, counted: FrequentWords | None = None
) -> list[int]:
    """All ids below `vocab_size`: specials and single characters, then what was counted, then the rest in order."""
    ranked = [*always(tokenizer), *(counted.ids if counted else ()), *range(vocab_size)]
    return [word for word in dict.fromkeys(ranked) if word < vocab_size]


def always(tokenizer: TokenizerWrapper) -> list[int]:
    """Ids that any text may need: what ends or structures it, and what every word can be spelled with."""
    added = list(tokenizer.added_tokens_decoder)
    special = added if len(added) <= _MOST_ADDED else list(tokenizer.all_special_ids)
    spelling = tokenizer.convert_tokens_to_ids([*_CHARACTERS, *_SPACES, *_BYTES])
    known = {word for word in spelling if word is not None and word != tokenizer.unk_token_id}
    return sorted({*special, *tokenizer.eos_token_ids, *known})
