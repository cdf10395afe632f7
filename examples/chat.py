"""A conversation that reads only what is new. An empty line or Ctrl-D ends it."""

from collections.abc import Iterator

from dflash_mlx import DFlashGenerator


def questions() -> Iterator[str]:
    """Lines from stdin until an empty one."""
    try:
        while line := input("> "):
            yield line
    except EOFError:
        return


with DFlashGenerator() as runner:
    chat = runner.chat(max_new_tokens=200)
    for question in questions():
        for chunk in chat.send(question):
            if chunk.kind == "answer":
                print(chunk.text, end="", flush=True)
        print()
