"""A conversation: keep the messages, hand them all over each time. An empty line or Ctrl-D ends it."""

from collections.abc import Iterator

from dflash_mlx import DFlashGenerator


def questions() -> Iterator[str]:
    """Lines from stdin until an empty one."""
    try:
        while line := input("> "):
            yield line
    except EOFError:
        return


messages: list[dict[str, str]] = []

with DFlashGenerator() as runner:
    for question in questions():
        messages.append({"role": "user", "content": question})
        answer = ""
        for chunk in runner.stream(messages, max_new_tokens=200):
            if chunk.kind == "answer":
                print(chunk.text, end="", flush=True)
                answer += chunk.text
        print()
        messages.append({"role": "assistant", "content": answer})
