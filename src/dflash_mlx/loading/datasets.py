"""Public sets of questions: a name in, prompts as text out, made of the rows that `dataset_rows` fetches and keeps.

Knows no model; answers are not asked for, as nothing here judges them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_mlx.errors import HubError, UsageError
from dflash_mlx.loading.dataset_rows import Split, dataset_rows

_ROWS = 100  # of each set
_INSTEAD = "or leave out --dataset: the built-in questions need no network"


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

    def asked(rows: list[dict[str, Any]]) -> list[str]:
        try:
            return [found.ask(row) for row in rows]
        except (KeyError, TypeError, IndexError, AttributeError):
            raise HubError(
                f"The data set {found.repo} has another shape than expected; take another, {_INSTEAD}."
            ) from None

    part = Split(found.config, found.split)
    prompts = asked(dataset_rows(found.repo, _ROWS, part=part, check=asked, instead=_INSTEAD))
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value
