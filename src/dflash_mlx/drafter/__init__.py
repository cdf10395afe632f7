"""The drafter: config, network, injected-context cache and checkpoint formats."""

from dflash_mlx.drafter.checkpoint import check_bits, expand, load_draft, quantised, read_config
from dflash_mlx.drafter.config import DraftConfig
from dflash_mlx.drafter.drafter import Drafter
from dflash_mlx.drafter.frequent import FrequentWords, count_words, read_frequent, write_frequent
from dflash_mlx.drafter.network import DraftNetwork
from dflash_mlx.drafter.probe import Probe, probe
from dflash_mlx.drafter.save import save_draft
from dflash_mlx.drafter.shortlist import Shortlist
from dflash_mlx.drafter.sight import check_draft_window

__all__ = [
    "DraftConfig",
    "DraftNetwork",
    "Drafter",
    "FrequentWords",
    "Probe",
    "Shortlist",
    "check_bits",
    "check_draft_window",
    "count_words",
    "expand",
    "load_draft",
    "probe",
    "quantised",
    "read_config",
    "read_frequent",
    "save_draft",
    "write_frequent",
]
