"""What `dflash-mlx doctor` finds: the machine in, one record out. Loads MLX and no model; draws nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

from dflash_mlx import runtime, tuning
from dflash_mlx.cli.costs import known_costs
from dflash_mlx.cli.record import Record
from dflash_mlx.errors import UsageError
from dflash_mlx.kernels.source import usable
from dflash_mlx.loading.places import places

_PACKAGES = ("dflash-mlx", "mlx", "mlx-lm", "transformers", "huggingface-hub")


def examine() -> Record:
    """Everything that decides what runs here and how fast, section by section; `problems` holds what can be mended."""
    problems: list[str] = []
    return {
        "machine": _machine(),
        "versions": _versions(),
        "blas": _blas(problems),
        "folders": _folders(),
        "models": _models(problems),
        "kernels": _kernels(problems),
        "costs": known_costs(problems),
        "problems": problems,
    }


def _machine() -> Record:
    here = runtime.machine()
    dtype = str(here.default_dtype).removeprefix("mlx.core.") if here.default_dtype else "as stored"
    return {
        "system": here.os,
        "processor": platform.machine(),
        "chip": here.chip,
        "device": here.device,
        "memory_gb": round(here.memory_gb, 1),
        "weights": dtype,
    }


def _versions() -> Record:
    found: Record = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _blas(problems: list[str]) -> Record:
    blas = runtime.blas()
    if blas.note:
        problems.append(blas.note)
    return {"name": blas.name, "setting": os.environ.get("DFLASH_BLAS", "auto")}


def _folders() -> Record:
    found = places()
    try:
        cache = _folder(runtime.cache_dir())
    except RuntimeError:
        cache = "none: the user has no home; set DFLASH_CACHE"
    return {
        "cache": cache,
        "hub_cache": _folder(found.hub_cache),
        "hub": "offline" if found.hub_offline else "asked for what is not in its cache",
    }


def _folder(path: Path) -> str:
    return str(path) if path.is_dir() else f"{path} (not there yet)"


def _models(problems: list[str]) -> Record:
    found = places()
    if found.bundled_draft is None:
        problems.append("The bundled drafter is missing: the installation is incomplete, install it again.")
    return {
        "bundled_target": str(found.bundled_target or "not installed: it comes from the hub"),
        "bundled_drafter": str(found.bundled_draft or "missing"),
    }


def _kernels(problems: list[str]) -> Record:
    """What was chosen on this machine and why; every generator adds the shapes of its pair."""
    setting = os.environ.get("DFLASH_KERNELS") or "auto"
    try:
        chooser = tuning.chooser()
        texts = str(runtime.kernels_folder())
    except (UsageError, FileNotFoundError) as error:
        problems.append(str(error))
        return {"setting": setting, "texts": None, "used": False, "why": str(error), "table": []}
    metal = usable() is not None
    table = [row._asdict() for row in chooser.table()] if metal else []
    problems += chooser.notes
    if not metal:
        why = "no Metal device: MLX's own operations run"
    elif setting == "off":
        why = "DFLASH_KERNELS is off: MLX's own operations run"
    elif not table:
        why = "nothing measured yet: the first run of a pair does"
    else:
        why = "each where it was right and faster"
    used = metal and setting != "off"
    return {"setting": setting, "texts": texts, "used": used, "why": why, "table": table}
