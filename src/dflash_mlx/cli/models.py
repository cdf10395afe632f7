"""What `dflash-mlx models` tells: the known pairs, or one target and its drafters, as one record. Draws nothing."""

from __future__ import annotations

from dataclasses import asdict

from dflash_mlx import runtime
from dflash_mlx.cli.record import Record
from dflash_mlx.loading.catalogue import known_pairs, target_report
from dflash_mlx.loading.memory import recommended_bytes


def list_models(target_model: str | None) -> Record:
    """The known pairs and what of them is here; with a target, the drafters that were held against it.

    Raises:
        DFlashError: as `target_report`.
    """
    machine = runtime.machine()
    here: Record = {
        "device": machine.device,
        "memory_gb": round(machine.memory_gb, 1),
        "recommended_gb": round(recommended_bytes(machine) / runtime.GB, 1),
    }
    if target_model is None:
        return {"machine": here, "pairs": [asdict(row) for row in known_pairs(machine)]}
    found = asdict(target_report(target_model, machine))
    drafters = list(found.pop("drafters"))
    return {"machine": here, "target": found | {"caches": list(found["caches"])}, "drafters": drafters}


def for_reading(record: Record) -> Record:
    """The record with its list of caches on one line."""
    if target := record.get("target"):
        return record | {"target": target | {"caches": ", ".join(target["caches"]) or None}}
    return record
