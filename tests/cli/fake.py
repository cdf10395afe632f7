"""A generator that answers by the last word asked, so that the console can be tested without a model."""

import hashlib
import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from dflash_mlx.chat import Chat, Loaded
from dflash_mlx.core import Chunk, Comparison, Difference, LoadStep, Result, Seconds, Stats
from dflash_mlx.errors import HubError


@dataclass
class FakeGenerator:
    """Answers `hi` unless the prompt's last word is one of those in `_pieces`."""

    target_model: str | None = None
    draft_model: str | None = None
    mode: str = "auto"
    block_size: int | None = None
    draft_bits: int | str | None = None
    draft_vocab: int | str | None = None
    dtype: str | None = None
    kv_bits: int | None = None
    draft_window: int | None = None
    on_note: Callable[[str], None] = lambda _: None
    on_load: Callable[[LoadStep], None] = lambda _: None
    kept_gb: float | None = None
    calls: list = field(default_factory=list)  # (prompt, options) of every stream
    closed: bool = False

    target_name = "fake-target"
    draft_name = "fake-draft"
    weights_gb, seconds_load = 1.5, 0.1
    generation_defaults = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": None,
        "do_sample": True,
        "eos_token_id": 2,
    }

    def __post_init__(self):
        if self.target_model == "missing":
            raise HubError("The target missing could not be fetched; try another name.")
        name = str(self.target_model or self.target_name)
        if self.target_model and "-" in name:
            self.target_name, self.draft_name = name, self.draft_model
        if name.startswith("hub-"):
            self.on_load(LoadStep("fetch", "target", name, 2_500_000_000))
        for done in (0, 10**9, 2 * 10**9):
            pair = 10**15 if name.startswith("big-") else None
            self.on_load(LoadStep("read", "target", name, 2 * 10**9, done, pair))
            if name.endswith("slow"):
                for _ in range(2000):  # one long sleep would not end where another thread took the signal
                    time.sleep(0.01)
        if name.endswith("-broken"):
            raise HubError(f"{name} is broken; fetch it again.")
        self.notes = (f"made of {self.target_model or 'the default pair'}",)
        self.on_note(self.notes[0])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.closed = True

    def stream(self, prompt, **options):
        self.calls.append((prompt, options))
        asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        stats = Stats(target=self.target_name, draft=self.draft_name, seed=options.get("seed", 11))
        stats.seconds = Seconds(load=0.1, prefill=0.2, decode=2.0)
        stats.block_size, stats.context_limit, stats.plain_tokens_per_second_estimate = 16, 4096, 0.5
        if options.get("profile"):
            stats.seconds = replace(stats.seconds, draft=0.5, verify=1.4, other=0.1)
        for kind, text in self._pieces(asked, prompt):
            stats.new_tokens += 2
            stats.rounds += 1
            stats.verify_lengths.append(5)
            yield Chunk(text, kind, (1, 2), None, stats)
        stats.finish_reason = "length" if asked.endswith("long") else "stop"
        stats.prompt_tokens = 5
        stats.verified, stats.accepted, stats.accept_lengths = 30, 15, [1] * stats.rounds
        yield Chunk("", "answer", (), stats.finish_reason, stats)

    def chat(self, system=None, **options):
        return Chat(self, system, **options)

    def answer_ids(self, emitted, text):
        return tuple(emitted)

    def save_chat(self, path, messages):
        if "nowhere" in str(path):
            raise FileNotFoundError(2, "No such file or directory")
        Path(path).write_text(json.dumps(messages))
        return Path(path)

    def load_chat(self, path):
        return Loaded(json.loads(Path(path).read_text()), None)

    def generate(self, prompt, **options):
        chunks = list(self.stream(prompt, **options))
        text = {kind: "".join(c.text for c in chunks if c.kind == kind) for kind in ("answer", "thought")}
        tokens = tuple(token for c in chunks for token in c.tokens)
        return Result(text["answer"], text["thought"], tokens, chunks[-1].finish_reason, chunks[-1].stats)

    def compare(self, prompt, **options):
        drafted, plain = self.generate(prompt, **options), self.generate(prompt, **options)
        plain.stats.seconds.decode *= 1.5
        return Comparison(plain, drafted, Difference(3, 17, 19, 2e-4) if prompt.endswith("differ") else None)

    def _pieces(self, asked, prompt):
        match asked.split()[-1]:
            case "slow":
                for number in range(400):
                    yield "answer", f"word{number} "
                    time.sleep(0.02)
            case "length":
                digest = hashlib.sha256(asked.encode()).hexdigest()
                yield "answer", f"got {len(asked)} {digest}"
            case "late":
                for _ in range(2000):  # one long sleep would not end where another thread took the signal
                    time.sleep(0.01)
            case "markdown":
                for piece in ("**bo", "ld** and\n\n```python\n1 ", "= one\n```\n"):
                    yield "answer", piece
            case "think":
                yield from [
                    ("thought", "hmm "),
                    ("thought", "[b]so"),
                    ("answer", "yes"),
                    ("answer", ", it is"),
                ]
            case "markup":
                yield from [
                    ("answer", "[bold]a[/bold] :smile: "),
                    ("answer", "[/nothing] \\[x] é 漢 \U0001f600"),
                ]
            case "steer":
                yield from [
                    ("thought", "hmm "),
                    ("thought", "[b]\x1b[31mso"),
                    ("answer", "a\x1b[31mred\x07\rb"),
                ]
            case "escape":
                yield "answer", "a\x1b[31mred\x07\rb"
            case "fail":
                yield "answer", "half"
                raise HubError("The connection went away; try again.")
            case "fail-at-once":
                raise HubError("The connection went away; try again.")
            case "bug":
                raise RuntimeError("a bug")
            case "signal":
                yield "answer", "half"
                signal.raise_signal(signal.SIGINT)
            case "interrupt":
                yield "answer", "half"
                raise KeyboardInterrupt
            case "echo":
                plain = [
                    {k: v for k, v in m.items() if k != "token_ids"} for m in prompt if isinstance(m, dict)
                ]
                yield "answer", json.dumps(plain or prompt)
            case _:
                yield "answer", "hi"
