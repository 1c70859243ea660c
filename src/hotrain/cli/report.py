"""``hotrain report``: draw the report from saved records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(help="Folder with summary.json (and records.json).")] = Path("runs/demo"),
) -> None:
    """Draw report.html from the records of a demo or a comparison. Trains and measures nothing."""
    from hotrain.plotting.report import write_report

    typer.echo(f"wrote {write_report(folder)}")
