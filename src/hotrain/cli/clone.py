"""``hotrain bench``, ``study`` and ``prepare``: tools of a clone, in `benchmarks/`, which no wheel contains."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import typer

_BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
if (_BENCHMARKS / "hotrain_study").is_dir():
    sys.path.append(str(_BENCHMARKS))
FOUND = importlib.util.find_spec("hotrain_study") is not None
"""Whether the tools can be imported."""


def missing(context: typer.Context) -> None:
    """Needs a clone of the repository."""
    raise ValueError(
        f"hotrain {context.info_name}: its tools are not in the package; clone the repository and pip install -e ."
    )
