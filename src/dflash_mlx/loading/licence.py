"""The licence that a target states, for the card of what is made from it; a name in, a word or nothing out.

A README's front matter, a GGUF file's metadata or the hub's entry are asked; no answer is no error.
"""

import re
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from dflash_mlx.loading import hub, names
from dflash_mlx.loading.hub import ANSWER_WITHIN
from dflash_mlx.loading.registry import KnownPair
from dflash_mlx.runtime import GB, Machine

try:
    import httpx2 as httpx
except ImportError:  # huggingface-hub 1.x
    import httpx  # type: ignore[import-not-found, no-redef]

_LINE = re.compile(r"^license:\s*[\"']?([\w.+-]+)", re.MULTILINE)


def base_and_licence(given: str | Path | None, machine: Machine) -> tuple[str, str | None]:
    """The published name of a target and its licence as the hub abbreviates it; None where none is stated.

    Raises:
        LoadError: the name is nothing known.
    """
    source, known = names.find_target(
        given, gpu=machine.device == "gpu", memory_bytes=int(machine.memory_gb * GB), notes=[]
    )
    base = known.target if known else source.repo or source.name
    if source.path is None:
        return base, _of_repo(str(source.repo))
    if source.path.suffix == ".gguf":
        return base, _of_gguf(source.path) or _of_known(known)
    return base, _of_readme(source.path / "README.md") or _of_known(known)


def _of_readme(path: Path) -> str | None:
    with suppress(OSError, UnicodeDecodeError):
        head = path.read_text(encoding="utf-8").split("---", 2)
        if len(head) == 3 and not head[0].strip() and (found := _LINE.search(head[1])):
            return found[1]
    return None


def _of_gguf(path: Path) -> str | None:
    with suppress(RuntimeError, ValueError):
        loaded = mx.load(str(path), return_metadata=True)
        stated = loaded[1].get("general.license") if isinstance(loaded, tuple) else None
        return stated if isinstance(stated, str) and stated.strip() else None
    return None


def _of_known(known: KnownPair | None) -> str | None:
    return _of_repo(known.target) if known else None


def _of_repo(repo: str) -> str | None:
    """From the cached README, else from the hub, if it answers."""
    if (folder := hub.cached(repo, tokenizer=True)) and (found := _of_readme(folder / "README.md")):
        return found
    with suppress(HfHubHTTPError, OSError, ValueError, httpx.HTTPError):
        tags = HfApi().model_info(repo, timeout=ANSWER_WITHIN).tags or []
        return next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), None)
    return None
