"""Repositories of the hub -> folders of the local cache, through huggingface-hub; failures become one sentence.

What is wholly in the cache is used as it is and asks the network nothing, so a cached repository stays at the commit
it was fetched at (`hf download REPO` brings a newer one). Small files come first, weights only when `weights` asks:
a pair that does not fit is refused before gigabytes move. Knows no model; a token is never part of a message.
"""

import errno
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import (
    HfApi,
    constants,
    get_token,
    scan_cache_dir,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    CacheNotFound,
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm as HubProgress

from dflash_mlx.errors import HubError
from dflash_mlx.loading import files, names
from dflash_mlx.loading.registry import BUNDLED

try:
    import httpx2 as httpx
except ImportError:  # huggingface-hub 1.x
    import httpx  # type: ignore[import-not-found, no-redef]

SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
ANSWER_WITHIN = 5.0  # seconds until the hub counts as silent
FETCHING = "dflash-fetch"  # name of the thread that waits for the hub
LOGIN = "log in with `hf auth login` or set HF_TOKEN"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A repository in the cache, its small files at least."""

    repo: str
    role: str  # target or drafter, for messages
    folder: Path
    whole: bool  # the weights are there too
    weights_nbytes: int | None = None  # of those that wait to be fetched; None: the hub does not tell


def small_files(repo: str, *, role: str) -> Snapshot:
    """Have the configs and the tokenizer of a repository in the cache.

    Args:
        repo: hub id.
        role: "target" or "drafter"; a target must bring a tokenizer.

    Raises:
        HubError: saying which repository of the pair could not be fetched, why, and what to do.
    """
    with _explained(repo, role):
        if folder := cached(repo, tokenizer=role == "target"):
            return Snapshot(repo, role, folder, whole=True)
        # Asked for by itself: this call has a time limit and its errors arrive unwrapped.
        info = HfApi().model_info(repo, timeout=ANSWER_WITHIN, files_metadata=True)
        sizes = [file.size for file in info.siblings or () if fnmatch(file.rfilename, files.WEIGHTS)]
        known = sum(size or 0 for size in sizes) if all(sizes) else None
        return Snapshot(repo, role, _download(repo, SMALL_FILES), whole=False, weights_nbytes=known)


def weights(snapshot: Snapshot) -> Path:
    """Have the weights of the same commit in the cache too, with a progress bar on a terminal; gives the folder.

    A broken connection is taken up where it stopped; after a stop of the program, whole files are kept.

    Raises:
        HubError: as `small_files`.
    """
    if snapshot.whole:
        return snapshot.folder
    with _explained(snapshot.repo, snapshot.role):
        return _download(snapshot.repo, [files.WEIGHTS], revision=snapshot.folder.name)


def cached(repo: str, *, tokenizer: bool) -> Path | None:
    """The folder of a repository that is wholly in the cache, tokenizer included if asked; asks no network."""
    try:
        found = snapshot_download(repo, local_files_only=True, allow_patterns=[*SMALL_FILES, files.WEIGHTS])
    except LocalEntryNotFoundError:
        return None
    folder = Path(found)
    # A folder that another program filled may lack files without the hub's list to tell.
    return folder if files.complete(folder, tokenizer=tokenizer) else None


def cached_config(repo: str) -> Path | None:
    """A repository's config.json in the cache, whatever else of it is there; asks no network."""
    found = try_to_load_from_cache(repo, "config.json", cache_dir=constants.HF_HUB_CACHE)
    return Path(found) if isinstance(found, str) else None


def cached_repos() -> list[str]:
    """Hub ids of all models of which something is in the cache; asks no network."""
    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, ValueError):  # none yet, or a file of that name
        return []
    return sorted(repo.repo_id for repo in found.repos if repo.repo_type == "model")


def _download(repo: str, patterns: list[str], revision: str | None = None) -> Path:
    """Fetch in a thread of its own: the hub's threads would hold up a Ctrl-C until their files are whole.

    What is left behind then stops with the next piece that arrives; it is taken up there another time.
    """
    stopped = threading.Event()

    class Bar(_Progress):
        def update(self, n: float | None = 1) -> bool | None:
            if stopped.is_set():
                raise _Stopped
            return bool(super().update(n))

    found: Future[str] = Future()

    def fetch() -> None:
        try:
            found.set_result(
                snapshot_download(repo, revision=revision, allow_patterns=patterns, tqdm_class=Bar)
            )
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=fetch, name=FETCHING, daemon=True).start()
    try:
        return Path(found.result())
    except KeyboardInterrupt:
        stopped.set()
        raise


class _Stopped(Exception):
    """Nobody waits for the file any more."""


class _Progress(HubProgress):
    """The hub's bar on stderr; nothing where stderr is no terminal."""

    def __init__(self, *args: Any, **options: Any):
        options["disable"] = bool(options.get("disable")) or not sys.stderr.isatty()
        super().__init__(*args, **options)


@contextmanager
def _explained(repo: str, role: str) -> Iterator[None]:
    """Turn what huggingface-hub raises into a HubError; none of its texts is passed on."""
    try:
        yield
    except HFValidationError as error:
        raise HubError(
            f"{repo!r} is no hub id for the {role}; expected owner/name.{_near(repo, role)}"
        ) from error
    except (HfHubHTTPError, EntryNotFoundError, OSError, httpx.HTTPError) as error:
        raise HubError(_sentence(repo, role, _first_cause(error))) from error


def _first_cause(error: BaseException) -> BaseException:
    """The hub wraps what happened in 'not found locally'; the reason is its cause."""
    while isinstance(error, LocalEntryNotFoundError | FileMetadataError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _sentence(repo: str, role: str, error: BaseException) -> str:
    host = _endpoint()
    subject = f"The {role} {repo}"
    if isinstance(error, GatedRepoError):
        return f"{subject} is gated: accept its terms at {host}/{repo}, then {LOGIN}."
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    # The hub answers 401 for what is missing, private or gated alike when nobody is logged in.
    if isinstance(error, RepositoryNotFoundError) or (status == 401 and get_token() is None):
        return f"{subject} is not on the hub ({host}), or it is private.{_near(repo, role)} If it is private, {LOGIN}."
    if isinstance(error, OfflineModeIsEnabled):
        return f"{subject} is not wholly in the cache and HF_HUB_OFFLINE is set; unset it to fetch.{_offline_pair()}"
    if status is not None:
        return f"{subject} could not be fetched: {_status(status, host)}"
    if isinstance(error, httpx.TimeoutException):
        return f"{subject} could not be fetched: {host} did not answer in time; try again.{_offline_pair()}"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{subject} does not fit on the disk of {constants.HF_HUB_CACHE}; make room or set HF_HOME elsewhere."
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"{subject} cannot be written to {constants.HF_HUB_CACHE}; set HF_HOME to a folder you may write to."
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return f"{subject} was cut off while it was fetched; run again, what is whole is kept."
    if isinstance(error, httpx.HTTPError | ConnectionError | LocalEntryNotFoundError):
        return f"{subject} could not be fetched: there is no connection to {host}.{_offline_pair()}"
    return f"{subject} could not be fetched ({type(error).__name__}); try again.{_offline_pair()}"


def _status(code: int, host: str) -> str:
    if code == 401:
        return f"{host} refused the token (401); {LOGIN} with a valid one."
    if code == 403:
        return f"{host} forbids it with this token (403); use one that may read this repository."
    if code == 429:
        return f"{host} had too many requests (429); wait some minutes, or {LOGIN} for a higher limit."
    return f"{host} answered {code}; try again later.{_offline_pair()}"


def _endpoint() -> str:
    """The hub's address without a user and password that someone may have put into HF_ENDPOINT."""
    parts = urlsplit(constants.ENDPOINT)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _near(repo: str, role: str) -> str:
    found = [name for name in names.nearest(repo, draft=role == "drafter") if name != repo]
    return f" Near it: {', '.join(found)}." if found else ""


def _offline_pair() -> str:
    if names.bundled_gguf() is None:
        return ""
    return f" The bundled pair works offline: --target-model {BUNDLED}."
