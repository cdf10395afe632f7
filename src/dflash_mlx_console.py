"""Where the console scripts start: they go on only if the `dflash_mlx` that Python would import is this one.

In: the import path. Out: the console's exit code, or one sentence on stderr and exit 1. Stands beside the package
and not in it: a foreign package of that name earlier on the path hides everything inside. Imports none of the two
before the check.
"""

import importlib.util
import sys
from pathlib import Path


def main() -> object:
    """Run `dflash-mlx`."""
    _refuse_foreign_package()
    from dflash_mlx.cli.app import main as run

    return run()


def main_chat() -> object:
    """Run `dflash-mlx-chat`."""
    _refuse_foreign_package()
    from dflash_mlx.cli.app import main_chat as run

    return run()


def _refuse_foreign_package() -> None:
    expected = Path(__file__).resolve().with_name("dflash_mlx")
    spec = importlib.util.find_spec("dflash_mlx")
    places = list(spec.submodule_search_locations or []) if spec else []
    found = Path(places[0]).resolve() if places else None
    if found != expected:
        sys.exit(
            f"dflash-mlx: Python finds {found or 'no package'} under the name dflash_mlx instead of {expected}: "
            "take the other one off PYTHONPATH, or install dflash-mlx in an environment of its own."
        )
