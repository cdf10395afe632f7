"""Rows of any public data set of the hub: its id in, plain dictionaries out, through the hub's service for rows.

The service reads every format the hub knows (Parquet, JSON, CSV), so none has to be read here. What was fetched is kept
in the user's cache folder: a run that goes on asks the same. Knows nothing of what the rows mean.
"""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import constants, get_session

from dflash_mlx import runtime
from dflash_mlx.errors import HubError, UsageError
from dflash_mlx.loading.hub import ANSWER_WITHIN

try:
    import httpx2 as httpx
except ImportError:  # huggingface-hub 1.x
    import httpx  # type: ignore[import-not-found, no-redef]

SERVICE = "https://datasets-server.huggingface.co"
_PAGE = 100  # as many rows as it gives at once


class Split(NamedTuple):
    """Part of a data set, by the hub's names."""

    config: str
    split: str


def dataset_rows(
    repo: str,
    count: int,
    *,
    part: Split | None = None,
    check: Callable[[list[dict[str, Any]]], object] | None = None,
    instead: str = "or give files with --prompts",
) -> list[dict[str, Any]]:
    """The first rows of a part of a data set.

    Args:
        repo: hub id, owner/name.
        count: how many at most.
        part: None takes the training split, the first split where there is none.
        check: raises for rows that are of no use, so that these are not kept.
        instead: what else to do, at the end of what errors say.

    Raises:
        UsageError: no hub id.
        HubError: it could not be fetched, and why.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UsageError(f"{repo!r} is no data set of the hub; expected owner/name, {instead}.")
    kept = _kept(repo, count)
    if kept is not None:
        return kept
    if constants.is_offline_mode():
        raise HubError(
            f"The data set {repo} is not in the cache and HF_HUB_OFFLINE is set; unset it to fetch, {instead}."
        )
    chosen = part or _training_split(repo, instead)
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        page = {"offset": len(rows), "length": min(_PAGE, count - len(rows))}
        answer = _asked(repo, "rows", {"dataset": repo, **chosen._asdict(), **page}, instead)
        found = [entry["row"] for entry in answer.get("rows") or []]
        rows += found
        if len(found) < page["length"]:
            break
    if not rows:
        raise HubError(f"The data set {repo} has no rows; take another, {instead}.")
    if check:
        check(rows)
    _keep(repo, count, rows)
    return rows


def _training_split(repo: str, instead: str) -> Split:
    splits = _asked(repo, "splits", {"dataset": repo}, instead).get("splits") or []
    chosen = next((one for one in splits if one.get("split") == "train"), splits[0] if splits else None)
    if chosen is None:
        raise HubError(f"The data set {repo} has no rows that the hub can show; take another, {instead}.")
    return Split(chosen["config"], chosen["split"])


def _asked(repo: str, what: str, parameters: dict[str, Any], instead: str) -> dict[str, Any]:
    where = f"The data set {repo} could not be fetched"
    try:
        response = get_session().get(f"{SERVICE}/{what}", params=parameters, timeout=4 * ANSWER_WITHIN)
        response.raise_for_status()
        return dict(response.json())
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        why = {
            401: "it is private, gated or not there",
            404: "there is no public data set of this name",
            429: "the hub had too many requests; wait some minutes",
        }.get(status, f"the hub answered {status}")
        raise HubError(f"{where}: {why}, {instead}.") from error
    except httpx.TimeoutException as error:
        raise HubError(f"{where}: {SERVICE} did not answer in time; try again, {instead}.") from error
    except (OSError, httpx.HTTPError) as error:
        raise HubError(f"{where}: there is no connection to {SERVICE}; try again, {instead}.") from error
    except (ValueError, TypeError) as error:
        raise HubError(f"{where}: {SERVICE} sent no JSON object; try again, {instead}.") from error


def _path(repo: str, count: int) -> Path | None:
    try:
        return runtime.cache_dir() / "datasets" / f"{repo.replace('/', '--')}-{count}.json"
    except RuntimeError:  # a user without a home
        return None


def _kept(repo: str, count: int) -> list[dict[str, Any]] | None:
    """What was fetched earlier; a file that is damaged counts as none."""
    path = _path(repo, count)
    with suppress(OSError, ValueError):
        if path is not None and (rows := json.loads(path.read_text(encoding="utf-8"))):
            return list(rows)
    return None


def _keep(repo: str, count: int, rows: list[dict[str, Any]]) -> None:
    """A folder that cannot be written only means that the next run fetches again."""
    if (path := _path(repo, count)) is not None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(rows), encoding="utf-8")
            part.replace(path)
