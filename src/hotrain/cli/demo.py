"""``hotrain demo``: training with six methods on real images in a few minutes, offline, with a report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hotrain.cli import completion
from hotrain.cli.errors import note
from hotrain.cli.options import DeviceOption, JsonOption, print_json, split_names, split_seeds

EXAMPLES = """Examples:
  hotrain demo --quick
  hotrain demo --methods exact,hq8 --seeds 0,1,2"""

RECIPES = ("demo_vit", "demo_resnet")
METHODS = "exact,hq8,hot,hla,lbp-wht,int4"
"""The exact baseline, the default method and published methods."""


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of records and report.")] = Path("runs/demo"),
    methods: Annotated[
        str, typer.Option("--methods", "-m", help="Comma-separated presets.", autocompletion=completion.methods)
    ] = METHODS,
    seeds: Annotated[str, typer.Option("--seeds", help="Comma-separated.")] = "0",
    epochs: Annotated[int | None, typer.Option("--epochs", min=1, help="Instead of the recipes' own.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few updates each, to see that everything runs.")] = False,
    device: DeviceOption = "cpu",
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs at a time, with one thread each.")] = 2,
    json: JsonOption = False,
) -> None:
    """Train a small ViT and a small ResNet on real digits with the default and five others; one table, one report."""
    from hotrain.cli.demo_records import look_at, models, notes, pick_surfaces
    from hotrain.cli.parallel_runs import minutes, train_cells
    from hotrain.cli.prepare import configure
    from hotrain.cli.run_records import conditions, keep, records_of
    from hotrain.cli.terminal import print_lines

    started = time.perf_counter()
    chosen, numbers = split_names(methods, "--methods"), split_seeds(seeds)
    settings = ["steps=4"] if quick else [] if epochs is None else [f"epochs={epochs}"]
    runs = [configure(recipe, settings=settings, device=device, out=out / "runs") for recipe in RECIPES]
    meta = {
        "title": "Four updates a method: does everything run?" if quick else "Memory and accuracy on real digits",
        **conditions(runs, numbers),
        "threads": "1 a run",
        "jobs": jobs,
        "models": models(runs),
        "notes": notes(runs, chosen, jobs),
    }
    outcomes = train_cells(runs, chosen, numbers, jobs)
    records_of(outcomes, meta).save(out)  # before anything else can fail
    looks = [look_at(run, chosen, outcome) for run, outcome in zip(runs, outcomes, strict=True)]
    more = {kind: [entry for look in looks for entry in look[kind]] for kind in looks[0]}
    more["surfaces"], meta["surface_note"] = pick_surfaces(more["surfaces"])
    meta["seconds"] = round(time.perf_counter() - started, 1)
    records = records_of(outcomes, meta)
    report = keep(records, out, **more)
    for outcome in outcomes:
        for result in outcome.results:
            result.checkpoint_path.unlink(missing_ok=True)  # the records stay; a demo is not resumed
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    if json:
        rows = [row for outcome in outcomes for row in outcome.rows]
        print_json({"rows": rows, "failures": failures, "seconds": meta["seconds"], "folder": out, "report": report})
    else:
        print_lines(records)
        took = minutes(time.perf_counter() - started)
        typer.echo(f"{took} in all · wrote {out / 'summary.json'}" + (f" and {report}" if report else ""))
    for failure in failures:
        note(f"failed: {failure['model']} {failure['method']} seed {failure['seed']}: {failure['error']}")
    if failures:
        raise typer.Exit(1)
