"""The ``hotrain`` application and its commands."""

from __future__ import annotations

from typing import Annotated

import typer

from hotrain._version import __version__
from hotrain.cli import audit, clone, compare, demo, frontier, listing, train
from hotrain.cli.errors import HotrainGroup
from hotrain.cli.options import Command

EXAMPLES = """Start with:
  hotrain memory demo_vit
  hotrain train demo_vit
  hotrain compare demo_vit --methods exact,hq8
  hotrain train --help"""

app = typer.Typer(
    name="hotrain",
    cls=HotrainGroup,
    no_args_is_help=True,
    epilog=EXAMPLES,
    pretty_exceptions_enable=False,
    help="Train with Hadamard backward passes, in less memory.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hotrain {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error arose.")] = False,
) -> None:
    """Options before the command; `HotrainGroup` reads ``traceback``."""


TRAIN, LOOK, RECORD = "Train", "Look at a model", "Lists and reports"
app.command("train", cls=Command, rich_help_panel=TRAIN, epilog=train.EXAMPLES)(train.train)
app.command("compare", cls=Command, rich_help_panel=TRAIN, epilog=compare.EXAMPLES)(compare.compare)
app.command("demo", cls=Command, rich_help_panel=TRAIN, epilog=demo.EXAMPLES)(demo.demo)
app.command("calibrate", cls=Command, rich_help_panel=LOOK, epilog=audit.CALIBRATE)(audit.calibrate)
app.command("memory", cls=Command, rich_help_panel=LOOK, epilog=audit.MEMORY)(audit.memory)
app.command("frontier", cls=Command, rich_help_panel=LOOK, epilog=frontier.EXAMPLES)(frontier.frontier)
app.command("cost", cls=Command, rich_help_panel=LOOK, epilog=audit.COST)(audit.cost)
app.command("fidelity", cls=Command, rich_help_panel=LOOK, epilog=audit.FIDELITY)(audit.fidelity)
if clone.FOUND:
    from hotrain_bench import cli as bench
    from hotrain_study import cli as study
    from hotrain_study import prepare

    app.command("study", cls=Command, rich_help_panel=TRAIN, epilog=study.EXAMPLES)(study.study)
    app.command("prepare", cls=Command, rich_help_panel=TRAIN, epilog=prepare.EXAMPLES)(prepare.prepare)
    app.add_typer(bench.app, name="bench", rich_help_panel=LOOK)
else:
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    for name, panel in (("study", TRAIN), ("prepare", TRAIN), ("bench", LOOK)):
        app.command(name, cls=Command, rich_help_panel=panel, context_settings=anything)(clone.missing)
app.command("recipes", cls=Command, rich_help_panel=RECORD, epilog=listing.RECIPES)(listing.recipes)
app.command("presets", cls=Command, rich_help_panel=RECORD, epilog=listing.PRESETS)(listing.presets)
app.command("report", cls=Command, rich_help_panel=RECORD, epilog=listing.REPORT)(listing.report)
