"""Small tokenizers for tests: two written out by hand, two built in memory with the `tokenizers` library.

No file and no download. All four answer to the part of the Hugging Face interface that this project and
mlx-lm use (`encode`, `decode`, `convert_*`, `added_tokens_decoder`, `apply_chat_template`, ...), so any of
them can stand where a loaded tokenizer stands, or be put into mlx-lm's `TokenizerWrapper`.

`ByteTokenizer`        a token is a byte, or several bytes given by `words`; text = the bytes of all tokens,
                       decoded at once. Like the byte-level BPE of GPT-2, Llama 3, Qwen and SmolLM.
`FallbackTokenizer`    a token is a piece in which "▁" is a space, or a byte `<0xHH>`; a run of bytes that is
                       not valid UTF-8 becomes one replacement mark per byte, even where a part of it was
                       valid; the first space of the whole text is dropped. Like SentencePiece in Llama 2.
`build_bpe`            a real byte-level BPE inside `PreTrainedTokenizerFast`, with a chat template.
`build_fallback`       a real BPE with byte fallback and the decoder of Llama 2, over the same ids as
                       `FallbackTokenizer`, so that the fake can be held against it. It has no merges: it
                       decodes every piece, but encodes letter by letter.

All have the specials `SPECIALS` (never text), the think tags `TAGS` (added, but not special, as in Qwen3)
and end with `<|end|>`. The fakes count the ids they were asked to decode in `.decoded_ids`.

    tok = ByteTokenizer()                    # 261 ids: bytes 0..255, then SPECIALS, then TAGS
    tok.encode("hi<|end|>")                  # [104, 105, 258]; specials and tags in a text become their ids
    ByteTokenizer([b" the"])                 # 262 ids; " the" is id 256, and encode takes the longest match
    ByteTokenizer(specials_first=True)       # <|end|> is id 2: shows constants that should not be there
    tok.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)

Give a tiny model `len(tok)` rows, or more: rows without a token decode to nothing, as padded ones do.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<|bos|>", "<|start|>", "<|end|>")
TAGS = ("<think>", "</think>")
REPLACEMENT = "\ufffd"

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)


@dataclass(frozen=True)
class Added:
    """The two fields of a `tokenizers.AddedToken` that matter here."""

    content: str
    special: bool


class FakeTokenizer:
    """What both fakes share: an id is a place in `tokens`; children say how text becomes ids and back.

    `special_tags` makes the think tags special as well, so that a plain decode leaves them out.
    """

    chat_template = CHAT_TEMPLATE
    has_chat_template = True
    has_thinking = True
    think_start, think_end = TAGS
    bos_token, eos_token = SPECIALS[0], SPECIALS[2]

    def __init__(self, tokens: Sequence[str], *, special_tags: bool = False) -> None:
        self.tokens = list(tokens)
        self._ids = {token: at for at, token in enumerate(self.tokens)}
        special = SPECIALS + TAGS if special_tags else SPECIALS
        self.added_tokens_decoder = {self._ids[t]: Added(t, t in special) for t in SPECIALS + TAGS}
        self.all_special_ids = [self._ids[t] for t in special]
        self.bos_token_id, self.eos_token_id = self._ids[self.bos_token], self._ids[self.eos_token]
        self.eos_token_ids = {self.eos_token_id}
        self.vocab_size = len(self.tokens)
        self.decoded_ids = 0  # ids given to `decode` so far

    def __len__(self) -> int:
        return len(self.tokens)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        return self.tokens[ids] if 0 <= ids < len(self.tokens) else None

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        return self._ids.get(tokens)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        ids = [self.bos_token_id] if add_special_tokens else []
        for part in re.split(f"({'|'.join(map(re.escape, SPECIALS + TAGS))})", text):
            if part in SPECIALS + TAGS:
                ids.append(self._ids[part])
            elif part:
                ids.extend(self._encode_plain(part))
        return ids

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Ids that have no token are left out, as the `tokenizers` library does."""
        self.decoded_ids += len(token_ids)
        skipped = self.all_special_ids if skip_special_tokens else ()
        return self._join([i for i in token_ids if 0 <= i < len(self.tokens) and i not in skipped])

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, str]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        enable_thinking: bool = False,
        **_: Any,
    ) -> str | list[int]:
        """What `CHAT_TEMPLATE` says, without jinja."""
        text = "".join(f"<|start|>{m['role']}\n{m['content']}<|end|>\n" for m in messages)
        if add_generation_prompt:
            text += "<|start|>assistant\n" + ("<think>\n" if enable_thinking else "")
        return self.encode(text) if tokenize else text

    def _encode_plain(self, text: str) -> list[int]:
        raise NotImplementedError

    def _join(self, ids: Sequence[int]) -> str:
        raise NotImplementedError


class ByteTokenizer(FakeTokenizer):
    """Ids 0..255 are bytes, then come `words`, specials and tags.

    Args:
        words: byte strings that are one token each; they may begin or end inside a character.
        specials_first: gives the specials and tags the lowest ids instead, and bytes the ids after them.
        special_tags: makes the think tags special.
    """

    def __init__(
        self, words: Sequence[bytes] = (), *, specials_first: bool = False, special_tags: bool = False
    ) -> None:
        plain = [bytes([b]) for b in range(256)] + list(words)
        names = ["".join(chr(0x100 + b) for b in word) for word in plain]
        added = [*SPECIALS, *TAGS]
        super().__init__(added + names if specials_first else names + added, special_tags=special_tags)
        self._bytes = {self._ids[name]: word for name, word in zip(names, plain, strict=True)}
        self._by_length = sorted(self._bytes.items(), key=lambda item: -len(item[1]))

    def _encode_plain(self, text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            token, word = next((i, w) for i, w in self._by_length if data.startswith(w))
            ids.append(token)
            data = data[len(word) :]
        return ids

    def _join(self, ids: Sequence[int]) -> str:
        parts = (self._bytes[i] if i in self._bytes else self.tokens[i].encode() for i in ids)
        return b"".join(parts).decode("utf-8", "replace")


class FallbackTokenizer(FakeTokenizer):
    """Specials, then `<0x00>`..`<0xFF>`, then "▁", printable ASCII and `pieces`, then the tags."""

    def __init__(self, pieces: Sequence[str] = (), *, special_tags: bool = False) -> None:
        super().__init__(fallback_vocabulary(pieces), special_tags=special_tags)
        self._by_length = sorted(self.tokens[len(SPECIALS) + 256 : -len(TAGS)], key=lambda piece: -len(piece))

    def _encode_plain(self, text: str) -> list[int]:
        rest, ids = "▁" + text.replace(" ", "▁"), []
        while rest:
            piece = next((p for p in self._by_length if rest.startswith(p)), None)
            names = [piece] if piece else [f"<0x{b:02X}>" for b in rest[0].encode()]
            ids.extend(self._ids[name] for name in names)
            rest = rest[len(piece or rest[0]) :]
        return ids

    def _join(self, ids: Sequence[int]) -> str:
        text, run = "", b""
        for token in [self.tokens[i] for i in ids] + [""]:
            if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
                run += bytes([int(token[3:5], 16)])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += REPLACEMENT * len(run)
            text, run = text + token.replace("▁", " "), b""
        return text.removeprefix(" ")


def fallback_vocabulary(pieces: Sequence[str]) -> list[str]:
    """The tokens of `FallbackTokenizer` and `build_fallback`, in the order of their ids."""
    ascii_pieces = [chr(c) for c in range(0x21, 0x7F)]
    plain = dict.fromkeys(["▁", *ascii_pieces, *pieces])
    return [*SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), *plain, *TAGS]


def build_bpe(
    texts: Sequence[str] = ("",), *, vocab_size: int = 400, **options: Any
) -> PreTrainedTokenizerFast:
    """A byte-level BPE with merges learnt from `texts`; `options` go to `PreTrainedTokenizerFast`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIALS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer, **options)


def build_fallback(pieces: Sequence[str] = (), **options: Any) -> PreTrainedTokenizerFast:
    """A BPE with byte fallback, "▁" for spaces and the decoder of Llama 2; the ids of `FallbackTokenizer`."""
    vocabulary = {token: at for at, token in enumerate(fallback_vocabulary(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(tokenizer, **options)


def _wrap(tokenizer: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIALS[0],
        eos_token=SPECIALS[2],
        chat_template=CHAT_TEMPLATE,
        **options,
    )
