"""Rows of any public data set of the hub: its id in, plain dictionaries out, through the hub's service for rows.

The service reads every format the hub knows (Parquet, JSON, CSV), so none has to be read here. What was fetched is kept
in the user's cache folder: a run that goes on asks the same. Knows nothing of what the rows mean.
"""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

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
_INSTEAD = "or give files with --prompts"


def dataset_rows(repo: str, count: int) -> list[dict[str, Any]]:
    """The first rows of a data set's training split, of its first split where it has none.

    Args:
        repo: hub id, owner/name.
        count: how many at most.

    Raises:
        UsageError: no hub id.
        HubError: it could not be fetched, and why.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UsageError(f"{repo!r} is no data set of the hub; expected owner/name, {_INSTEAD}.")
    kept = _kept(repo, count)
    if kept is not None:
        return kept
    if constants.is_offline_mode():
        raise HubError(
            f"The data set {repo} is not in the cache and HF_HUB_OFFLINE is set; unset it to fetch, {_INSTEAD}."
        )
    splits = _asked(repo, "splits", {"dataset": repo}).get("splits") or []
    chosen = next((one for one in splits if one.get("split") == "train"), splits[0] if splits else None)
    if chosen is None:
        raise HubError(f"The data set {repo} has no rows that the hub can show; take another, {_INSTEAD}.")
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        page = {"offset": len(rows), "length": min(_PAGE, count - len(rows))}
        asked = {"dataset": repo, "config": chosen["config"], "split": chosen["split"], **page}
        found = [entry["row"] for entry in _asked(repo, "rows", asked).get("rows") or []]
        rows += found
        if len(found) < page["length"]:
            break
    if not rows:
        raise HubError(f"The data set {repo} has no rows; take another, {_INSTEAD}.")
    _keep(repo, count, rows)
    return rows


def _asked(repo: str, what: str, parameters: dict[str, Any]) -> dict[str, Any]:
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
        raise HubError(f"{where}: {why}, {_INSTEAD}.") from error
    except httpx.TimeoutException as error:
        raise HubError(f"{where}: {SERVICE} did not answer in time; try again, {_INSTEAD}.") from error
    except (OSError, httpx.HTTPError) as error:
        raise HubError(f"{where}: there is no connection to {SERVICE}; try again, {_INSTEAD}.") from error
    except (ValueError, TypeError) as error:
        raise HubError(f"{where}: {SERVICE} sent no JSON object; try again, {_INSTEAD}.") from error


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
