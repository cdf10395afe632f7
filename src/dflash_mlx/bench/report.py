"""What is kept of a benchmark: everything measured in, one JSON object and its files out.

The object holds all that two reports need to be compared: machine, versions, pair, command, every answer's figures.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dflash_mlx.bench.arms import Trial
from dflash_mlx.bench.summary import Row
from dflash_mlx.calibration import threads
from dflash_mlx.core import Result, Stats
from dflash_mlx.engine import Engine
from dflash_mlx.errors import UsageError

_SCHEMA = 1
_PACKAGES = ("dflash-mlx", "mlx", "mlx-lm", "transformers", "huggingface-hub")
RESULT = "result.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A benchmark that was run, or stopped on the way."""

    own: str  # the arm of the generator's own policy
    trials: Sequence[Trial]
    rows: Sequence[Row]
    notes: Sequence[str]
    interrupted: bool
    seconds: float  # from the first answer to the last


def record(
    outcome: Outcome, engine: Engine, *, command: Sequence[str], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON object."""
    return {
        "schema": _SCHEMA,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": list(command),
        "machine": _machine(engine),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
        "pair": _pair(engine, outcome.trials[0].results[outcome.own].stats),
        "options": dict(options),
        "own": outcome.own,
        "interrupted": outcome.interrupted,
        "seconds": round(outcome.seconds, 1),
        "notes": list(outcome.notes),
        "costs": _costs(engine),
        "rows": [asdict(row) for row in outcome.rows],
        "trials": [_trial(trial) for trial in outcome.trials],
    }


def prepare(folder: Path) -> None:
    """Make the folder and see that it can be written, before anything is measured.

    Raises:
        UsageError: it cannot, or holds another result.
    """
    if (folder / RESULT).exists():
        raise UsageError(f"{folder} already holds a {RESULT}; give another folder, or move it away.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f".{os.getpid()}"
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be written: {error.strerror or error}.") from None


def write(folder: Path, name: str, text: str) -> Path:
    """Write one file of a result; gives its path.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def as_text(found: Mapping[str, Any]) -> str:
    """The object as the text of its file."""
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def load_per_core() -> float | None:
    """How busy the machine is with other work, 1 where every core is; None where the system does not tell."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except OSError:
        return None


def _machine(engine: Engine) -> dict[str, Any]:
    here = engine.machine
    return {
        "chip": here.chip,
        "os": here.os,
        "processor": platform.machine(),
        "device": here.device,
        "memory_gb": round(here.memory_gb, 1),
        "cores": os.cpu_count(),
        "threads": threads(),
        "blas": here.blas if here.device == "cpu" else None,
        "environment": {name: value for name, value in os.environ.items() if name.startswith("DFLASH_")},
    }


def _pair(engine: Engine, stats: Stats) -> dict[str, Any]:
    """The models, and everything that was given or chosen to make them smaller or faster."""
    return {
        "target": stats.target,
        "draft": stats.draft,
        "dtype": stats.dtype,
        "draft_bits": stats.draft_bits,
        "draft_vocab": stats.draft_vocab,
        "draft_window": stats.draft_window,
        "kv_bits": stats.kv_bits,
        "block_size": stats.block_size,
        "context_limit": stats.context_limit,
        "weights_gb": round(engine.nbytes / 1e9, 3),
        "kernels": stats.kernels,
    }


def _costs(engine: Engine) -> list[dict[str, Any]] | None:
    """Seconds, by the tokens in the cache."""
    if engine.curve is None:
        return None
    return [{**depth._asdict(), "verify": dict(depth.verify)} for depth in engine.curve.measured]


def _trial(trial: Trial) -> dict[str, Any]:
    task = trial.task
    return {
        "class": task.kind,
        "number": task.number,
        "context": task.context,
        "repeat": trial.repeat,
        "answers": {name: _answer(result) for name, result in trial.results.items()},
        "differences": {name: found and asdict(found) for name, found in trial.differences.items()},
    }


def _answer(result: Result) -> dict[str, Any]:
    stats = result.stats
    return {
        "prompt_tokens": stats.prompt_tokens,
        "new_tokens": stats.new_tokens,
        "finish_reason": stats.finish_reason,
        "seconds_first_token": stats.seconds.first_token,
        "seconds_decode": stats.seconds.decode,
        "peak_memory_gb": stats.peak_memory_gb,
        "rounds": stats.rounds,
        "plain_rounds": stats.plain_rounds,
        "verify_lengths": stats.verify_lengths,
        "accept_lengths": stats.accept_lengths,
    }
