"""What there is to load: the known pairs, what of them is on this machine, and which drafters fit a target.

Reads configs and headers that are here already, of the bundled pair, of the hub's cache and of local folders.
Nothing is fetched and no weights are read.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.drafter import DraftConfig
from dflash_mlx.errors import DFlashError, LoadError, UnsupportedError
from dflash_mlx.loading import files, hub, memory, names, pair
from dflash_mlx.loading.checkpoint import Checkpoint, FolderCheckpoint, open_target
from dflash_mlx.loading.names import BUNDLED_FOLDER, Source, bundled_gguf, draft_of
from dflash_mlx.loading.registry import BUNDLED, GB, PAIRS, KnownPair
from dflash_mlx.runtime import Machine
from dflash_mlx.target import build
from dflash_mlx.target.caches import kinds

Here = Literal["yes", "partly", "no"]
Fit = Literal["yes", "in 4 bits", "no"]

_BITS_4 = 4.5 / 16  # of 16-bit weights, scales included


@dataclass(frozen=True, slots=True)
class Listed:
    """A known pair and how it stands on this machine."""

    alias: str
    target: str
    draft: str
    target_gb: float | None  # as published, or as it lies here
    draft_gb: float | None
    thinking: bool | None  # the mode it was trained for; None: not known, or the target has none
    verified: bool
    target_here: Here  # in any of its published forms
    draft_here: Here
    fits: Fit | None  # this machine's memory; None: sizes are not known


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter held against a target."""

    draft: str
    here: Here
    fits: bool | None  # None: neither its config nor the target's is here to tell
    why: str
    gb: float | None


@dataclass(frozen=True, slots=True)
class TargetReport:
    """A target and the drafters that were held against it; numbers are None where its config is not here."""

    name: str
    here: Here
    model_type: str | None
    hidden_size: int | None
    num_layers: int | None
    vocab_size: int | None
    loaded_gb: float | None  # of its weights on this machine, where they or their index are here
    caches: tuple[str, ...]
    undoable: bool | None
    why_not: str | None
    drafters: tuple[Candidate, ...]


def known_pairs(machine: Machine) -> list[Listed]:
    """The registry, row by row."""
    return [_listed(row, machine) for row in PAIRS]


def target_report(given: str | Path, machine: Machine) -> TargetReport:
    """Which drafters fit a target: those on this machine, and those the registry knows for it.

    Raises:
        LoadError: a name that is nothing known, or a target of which neither config nor registry tell anything.
        UsageError: an empty name.
    """
    source, row = names.find_target(
        given, gpu=machine.device == "gpu", memory_bytes=int(machine.memory_gb * GB), notes=[]
    )
    opened = _opened(source, row)
    if opened is None and row is None:
        raise LoadError(
            f"Nothing of {source.name} is on this machine, and it is no known target; `hf download {source.name} "
            "config.json tokenizer.json` fetches what is needed to tell."
        )
    if opened is None:
        return TargetReport(
            source.name, "no", None, None, None, None, None, (), None, None, tuple(_unjudged(row))
        )
    here = _target_here(source, row)
    try:
        shape = pair.check_target(opened.config, name=opened.name)
        why = None
    except UnsupportedError as error:
        shape, why = None, str(error)
    found = kinds(build(opened.config)) if shape else ()
    words = _tokenizer(opened)
    drafters = [_judged(draft, shape, words, why, row) for draft in _draft_folders()] + list(_unjudged(row))
    first = {candidate.draft.lower(): candidate for candidate in reversed(drafters)}
    ordered = sorted(first.values(), key=lambda c: (c.fits is not True, c.fits is not None, c.draft.lower()))
    return TargetReport(
        name=opened.name if row is None else source.name,
        here=here,
        model_type=str(opened.config.get("model_type")),
        hidden_size=shape.hidden_size if shape else None,
        num_layers=shape.num_layers if shape else None,
        vocab_size=shape.vocab_size if shape else None,
        loaded_gb=_gb(opened.held_bytes(dtype=machine.default_dtype)),
        caches=tuple(found),
        undoable=why is None,
        why_not=why,
        drafters=tuple(ordered),
    )


def _listed(row: KnownPair, machine: Machine) -> Listed:
    target, draft = row.target_bytes, row.draft_bytes
    if target is None and (folder := hub.cached(row.target, tokenizer=False)):
        target = _on_disk(folder)
    if draft is None and (folder := _folder_of(draft_of(row))):
        draft = _on_disk(folder)
    return Listed(
        alias=row.alias,
        target=row.target,
        draft=draft_of(row).name,
        target_gb=_gb(target),
        draft_gb=_gb(draft),
        thinking=row.thinking,
        verified=row.verified,
        target_here=_target_here(Source(row.target, repo=row.target), row),
        draft_here=_here(draft_of(row), tokenizer=False),
        fits=_fits(target, draft, machine),
    )


def _fits(target: int | None, draft: int | None, machine: Machine) -> Fit | None:
    """Whether 16-bit weights, expanded on a CPU, leave room; a GPU also takes 4-bit targets."""
    if target is None or draft is None:
        return None
    limit = memory.recommended_bytes(machine)
    if machine.device == "cpu":
        return "yes" if 2 * (target + draft) <= limit else "no"
    if target + draft <= limit:
        return "yes"
    return "in 4 bits" if target * _BITS_4 + draft <= limit else "no"


def _here(source: Source, *, tokenizer: bool) -> Here:
    if source.path is not None:
        whole = source.path.is_file() or files.complete(source.path, tokenizer=tokenizer)
        return "yes" if whole else "partly" if source.path.exists() else "no"
    assert source.repo is not None, "a source is a repository or a path"
    if hub.cached(source.repo, tokenizer=tokenizer):
        return "yes"
    return "partly" if hub.cached_config(source.repo) else "no"


def _target_here(source: Source, row: KnownPair | None) -> Here:
    """The best of all forms of a target."""
    sources = [source]
    if row is not None and source.repo is not None:
        sources += [Source(name, repo=name) for name in row.target_names()]
        if row.alias == BUNDLED and (file := bundled_gguf()):
            sources.append(Source(file.name, path=file))
    found = {_here(each, tokenizer=True) for each in sources}
    return "yes" if "yes" in found else "partly" if "partly" in found else "no"


def _opened(source: Source, row: KnownPair | None) -> Checkpoint | None:
    """The target's checkpoint if its config is here, in this form or another of the same model."""
    if source.path is not None:
        return open_target(source)
    for repo in (source.repo, *(row.target_names() if row else ())):
        if repo and (config := hub.cached_config(repo)):
            return FolderCheckpoint(Source(repo, path=config.parent), "target")
    return None


def _tokenizer(target: Checkpoint) -> TokenizerWrapper | None:
    try:
        return target.tokenizer()
    except LoadError:
        return None  # not fetched yet: the vocabulary's padding cannot be told then


def _draft_folders() -> list[tuple[Source, Here, Path]]:
    """Every drafter whose config is on this machine."""
    found = [
        (Source(folder.name, path=folder), _here(Source(folder.name, path=folder), tokenizer=False), folder)
        for folder in sorted(BUNDLED_FOLDER.iterdir())
        if (folder / "config.json").is_file()
    ]
    for repo in hub.cached_repos():
        config = hub.cached_config(repo)
        if config is None:
            continue
        try:
            drafts = pair.is_drafter(files.read_json(config, name=repo))
        except DFlashError:
            continue  # a damaged file of a repository that nobody asked for
        if drafts:
            source = Source(repo, repo=repo)
            found.append((source, _here(source, tokenizer=False), config.parent))
    return found


def _judged(
    draft: tuple[Source, Here, Path],
    shape: pair.TargetShape | None,
    words: TokenizerWrapper | None,
    why_not: str | None,
    row: KnownPair | None,
) -> Candidate:
    source, here, folder = draft
    size = _gb(_on_disk(folder)) if here == "yes" else None
    if shape is None:
        return Candidate(source.name, here, False, f"The target itself: {why_not}", size)
    try:
        opened = FolderCheckpoint(Source(source.name, path=folder), "drafter")
        config = DraftConfig.from_dict(opened.config, name=source.name)
        wrong = pair.differences(shape, config, tokens=len(words) if words else None)
        if not wrong and words and opened.has_tokenizer():
            pair.check_same_tokens(
                words.get_vocab(),
                opened.tokenizer().get_vocab(),
                target_name=shape.name,
                draft_name=source.name,
            )
    except LoadError as error:
        wrong = [str(error).rstrip(".")]
    if wrong:
        return Candidate(source.name, here, False, "; ".join(wrong), size)
    made_for = next((known for known in PAIRS if draft_of(known).name.lower() == source.name.lower()), None)
    if row is not None and made_for is row:
        why = "made for it"
    elif made_for is not None:
        why = f"of the same shape, but made for {made_for.target}: expect few accepted tokens"
    else:
        why = "of the same shape; what it was made for is not known here"
    return Candidate(source.name, here, True, why, size)


def _unjudged(row: KnownPair | None) -> list[Candidate]:
    """The registry's own drafter for the target, which need not be here."""
    if row is None:
        return []
    source = draft_of(row)
    size = _gb(row.draft_bytes)
    here = _here(source, tokenizer=False)
    return [
        Candidate(source.name, here, None, "made for it, as the registry says; a config is not here", size)
    ]


def _folder_of(source: Source) -> Path | None:
    return source.path if source.path else hub.cached(source.repo or "", tokenizer=False)


def _on_disk(folder: Path) -> int | None:
    """Bytes of a folder's tensors; None where a file is damaged."""
    try:
        return sum(tensor.nbytes for tensor in files.tensors(folder, name=folder.name).values())
    except LoadError:
        return None


def _gb(nbytes: int | None) -> float | None:
    return None if nbytes is None else round(nbytes / GB, 2)
