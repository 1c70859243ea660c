"""``hotrain compare``: several methods under the same seeds, one table, one report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotrain.cli.errors import note
from hotrain.cli.options import (
    DataOption,
    DeviceOption,
    JsonOption,
    QuietOption,
    Recipe,
    SetOption,
    print_json,
    split_names,
    split_seeds,
)


def compare(
    recipe: Recipe,
    methods: Annotated[str, typer.Option("--methods", "-m", help="Comma-separated: exact,hot-unbiased,hot:rank=4.")],
    seeds: Annotated[str, typer.Option("--seeds", help="Comma-separated: 0,1,2.")] = "0",
    data: DataOption = None,
    settings: SetOption = None,
    device: DeviceOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the records. Default: runs/compare-RECIPE.")
    ] = None,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Train with every method under every seed; same weights and images within a seed. Writes summary and report."""
    from hotrain import train as library
    from hotrain.cli.outcome import conditions, keep, progress_line, records_of

    folder = out or Path("runs") / f"compare-{recipe}"
    chosen, numbers = split_names(methods, "--methods"), split_seeds(seeds)
    from hotrain.cli.workbench import configure

    run = configure(recipe, data=data, settings=settings, device=device, out=folder)
    outcome = library.compare(
        run,
        chosen,
        numbers,
        on_progress=library.silent if quiet or json else None,
        on_result=lambda result: note(progress_line(result)),
    )
    meta = conditions([run], numbers) | {"title": f"{recipe}: {len(chosen)} methods compared"}
    report = keep(records_of([outcome], meta), folder)
    if json:
        print_json({"rows": outcome.rows, "failures": outcome.failures, "summary": outcome.summary()})
    else:
        typer.echo(str(outcome).rstrip())
        typer.echo(f"wrote {folder / 'summary.json'}" + (f" and {report}" if report else ""))
    if outcome.failures:
        raise typer.Exit(1)
