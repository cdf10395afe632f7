"""An answer piece by piece, with the thoughts of a model that thinks kept apart."""

import sys

from dflash_mlx import DFlashGenerator

messages = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "Why is the sky blue?"},
]

with DFlashGenerator() as runner:
    for chunk in runner.stream(messages, max_new_tokens=60):
        out = sys.stderr if chunk.kind == "thought" else sys.stdout
        print(chunk.text, end="", file=out, flush=True)

print()
print(f"ended by {chunk.finish_reason} after {chunk.stats.new_tokens} tokens", file=sys.stderr)
