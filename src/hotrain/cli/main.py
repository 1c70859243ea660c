"""``hotrain``: the verbs and nothing else. ``python -m hotrain.cli.main`` is the same program."""

from __future__ import annotations

from typing import Annotated

import typer

from hotrain._version import __version__
from hotrain.cli import audit, bench, calibrate, compare, demo, listing, report, train
from hotrain.cli.errors import HotrainGroup

app = typer.Typer(
    name="hotrain",
    cls=HotrainGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train with Hadamard backward passes: less memory at the accuracy of exact training.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hotrain {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error arose.")] = False,
) -> None:
    """Options before the verb; `HotrainGroup` reads ``traceback``."""


TRAIN, LOOK, RECORD = "Train", "Look at a model", "Lists and reports"
app.command("train", rich_help_panel=TRAIN)(train.train)
app.command("compare", rich_help_panel=TRAIN)(compare.compare)
app.command("demo", rich_help_panel=TRAIN)(demo.demo)
app.command("calibrate", rich_help_panel=LOOK)(calibrate.calibrate)
app.command("memory", rich_help_panel=LOOK)(audit.memory)
app.command("cost", rich_help_panel=LOOK)(audit.cost)
app.command("fidelity", rich_help_panel=LOOK)(audit.fidelity)
app.add_typer(bench.app, name="bench", rich_help_panel=LOOK)
app.command("recipes", rich_help_panel=RECORD)(listing.recipes)
app.command("presets", rich_help_panel=RECORD)(listing.presets)
app.command("report", rich_help_panel=RECORD)(report.report)


def main() -> None:
    """Entry point of the ``hotrain`` script."""
    app()


if __name__ == "__main__":
    main()
