"""The drafter: config, network, injected-context cache and checkpoint formats."""

from dflash_mlx.drafter.checkpoint import check_bits, expand, load_draft, read_config
from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.drafter import Drafter
from dflash_mlx.drafter.network import DraftNetwork
from dflash_mlx.drafter.probe import Probe, probe
from dflash_mlx.drafter.save import save_draft
from dflash_mlx.drafter.shortlist import Shortlist
from dflash_mlx.drafter.sight import check_draft_window

__all__ = [
    "DraftConfig",
    "DraftNetwork",
    "Drafter",
    "Probe",
    "Shortlist",
    "check_bits",
    "expand",
    "load_draft",
    "check_draft_window",
    "probe",
    "read_config",
    "save_draft",
]
