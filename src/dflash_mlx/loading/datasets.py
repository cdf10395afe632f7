"""Public sets of questions: a name in, prompts as text out, through the hub's rows of data sets.

What was fetched is kept in the user's cache folder, so that the next benchmark asks the same and needs no network.
Knows no model; answers are not fetched, as nothing here judges them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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

_SERVICE = "https://datasets-server.huggingface.co"  # the hub's own, for rows of public data sets as JSON
_ROWS = 100  # as many as it gives at once
_INSTEAD = "the built-in questions need no network: leave out --dataset."


@dataclass(frozen=True, slots=True)
class Dataset:
    """Where a set of questions lies on the hub, and how a row of it is asked."""

    repo: str
    config: str
    split: str
    ask: Callable[
        [Mapping[str, Any]], str
    ]  # raises KeyError, TypeError, IndexError for a row of another shape


DATASETS: Mapping[str, Dataset] = {
    "humaneval": Dataset(
        "openai/openai_humaneval",
        "openai_humaneval",
        "test",
        lambda row: (
            f"Complete this Python function and give the whole of it:\n\n```python\n{_text(row['prompt'])}```"
        ),
    ),
    "gsm8k": Dataset(
        "openai/gsm8k",
        "main",
        "test",
        lambda row: f"{_text(row['question'])}\n\nShow each step, then give the answer.",
    ),
    "math500": Dataset(
        "HuggingFaceH4/MATH-500",
        "default",
        "test",
        lambda row: f"{_text(row['problem'])}\n\nShow each step, then give the answer.",
    ),
    "mbpp": Dataset(
        "google-research-datasets/mbpp",
        "sanitized",
        "test",
        lambda row: f"{_text(row['prompt'])} It must pass this:\n\n```python\n{row['test_list'][0]}\n```",
    ),
    "mt-bench": Dataset(
        "HuggingFaceH4/mt_bench_prompts", "default", "train", lambda row: _text(row["prompt"][0])
    ),
}
"""By the name that people type; of MT-Bench the first turns."""


def check_datasets(names: Sequence[str]) -> None:
    """Refuse a name that there is none of.

    Raises:
        UsageError: naming it and those that there are.
    """
    for name in names:
        if name not in DATASETS:
            raise UsageError(f"{name!r} is no data set known here; they are {', '.join(DATASETS)}.")


def dataset_questions(name: str, count: int) -> list[str]:
    """Prompts of a set, spread evenly over its first hundred rows.

    Args:
        name: one of `DATASETS`.
        count: how many at most.

    Raises:
        HubError: they are neither in the cache folder nor to be had from the hub, and why.
    """
    found = DATASETS[name]
    rows = _kept(name)
    fetched = rows is None
    if rows is None:
        rows = _fetched(name, found)
    try:
        prompts = [found.ask(row) for row in rows]
    except (KeyError, TypeError, IndexError, AttributeError):
        raise HubError(_other_shape(name, found)) from None
    if fetched:
        _keep(name, rows)
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _fetched(name: str, found: Dataset) -> list[dict[str, Any]]:
    """The first rows of a set; the service gives the content of each beside its number."""
    where = f"The data set {name} ({found.repo})"
    if constants.is_offline_mode():
        raise HubError(
            f"{where} is not in the cache and HF_HUB_OFFLINE is set; unset it to fetch, or {_INSTEAD}"
        )
    asked: dict[str, str | int] = {
        "dataset": found.repo,
        "config": found.config,
        "split": found.split,
        "offset": 0,
        "length": _ROWS,
    }
    try:
        response = get_session().get(f"{_SERVICE}/rows", params=asked, timeout=ANSWER_WITHIN)
        response.raise_for_status()
        rows = [entry["row"] for entry in response.json()["rows"]]
    except (OSError, httpx.HTTPError) as error:
        raise HubError(f"{where} could not be fetched: {_reason(error)}; {_INSTEAD}") from error
    except (ValueError, KeyError, TypeError):
        rows = []
    if not rows:
        raise HubError(_other_shape(name, found))
    return rows


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"{_SERVICE} answered {error.response.status_code}"
    if isinstance(error, httpx.TimeoutException):
        return f"{_SERVICE} did not answer in time"
    return f"there is no connection to {_SERVICE}"


def _other_shape(name: str, found: Dataset) -> str:
    return f"The data set {name} ({found.repo}) has another shape than expected; {_INSTEAD}"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _path(name: str) -> Path | None:
    try:
        return runtime.cache_dir() / "datasets" / f"{name}.json"
    except RuntimeError:  # a user without a home
        return None


def _kept(name: str) -> list[dict[str, Any]] | None:
    """What was fetched earlier; a file that is damaged counts as none."""
    path = _path(name)
    with suppress(OSError, ValueError):
        if path is not None and (rows := json.loads(path.read_text(encoding="utf-8"))):
            return list(rows)
    return None


def _keep(name: str, rows: list[dict[str, Any]]) -> None:
    """A folder that cannot be written only means that the next run fetches again."""
    if (path := _path(name)) is not None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(rows), encoding="utf-8")
            part.replace(path)
