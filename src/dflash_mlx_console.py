"""Where the console scripts start: they go on only if the `dflash_mlx` that Python would import is this one.

In: the import path. Out: the console, or one sentence on stderr and exit 1. Stands beside the package,
since a foreign one of that name earlier on the path hides all that is inside. Imports neither before the check.
"""

import sys


def main() -> None:
    """Run `dflash-mlx`."""
    _run("main")


def main_chat() -> None:
    """Run `dflash-mlx-chat`."""
    _run("main_chat")


def _run(name: str) -> None:
    """Run a function of the console; a Ctrl-C before it answers for itself is quiet too."""
    try:
        _refuse_foreign_package()
        from dflash_mlx.cli import app

        getattr(app, name)()
    except KeyboardInterrupt:
        sys.exit(130)


def _refuse_foreign_package() -> None:
    # Here and not at the top, where a Ctrl-C would show a traceback.
    import importlib.util
    from pathlib import Path

    expected = Path(__file__).resolve().with_name("dflash_mlx") / "__init__.py"
    spec = importlib.util.find_spec("dflash_mlx")
    found = Path(spec.origin).resolve() if spec and spec.origin else None
    if found != expected:
        sys.exit(
            f"dflash-mlx: Python finds {found or 'nothing'} under the name dflash_mlx instead of {expected}: "
            "take the other one off PYTHONPATH, or install dflash-mlx in an environment of its own."
        )
