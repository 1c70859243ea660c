"""``hotrain bench``: the measuring tools of a checkout (`benchmarks/hotrain_bench`), which a wheel does not contain."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

_CHECKOUT = Path(__file__).parents[3] / "benchmarks"
if (_CHECKOUT / "hotrain_bench").is_dir():
    sys.path.append(str(_CHECKOUT))

try:
    from hotrain_bench.cli import app
except ModuleNotFoundError as missing:
    if missing.name != "hotrain_bench":
        raise
    app = typer.Typer(no_args_is_help=True, help="Time layers, training steps and kernels (in a clone).")
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}

    @app.command("layers", context_settings=anything)
    @app.command("step", context_settings=anything)
    @app.command("zoo", context_settings=anything)
    @app.command("ops", context_settings=anything)
    def clone_first() -> None:
        """Needs a clone of the repository."""
        raise ValueError("hotrain bench: its tools are not in the package; clone the repository and pip install -e .")


__all__ = ["app"]
