"""``hotrain demo``: the main job on real images in a few minutes, offline: train, measure, draw."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotrain.cli.errors import note
from hotrain.cli.options import QuietOption, split_names, split_seeds

if TYPE_CHECKING:
    from hotrain.train import Comparison, TrainRun

RECIPES = ("demo_vit", "demo_resnet")
METHODS = "exact,hot,hot-unbiased,hla,lbp-wht,luq,int4"
LOOKED_AT = "hot-unbiased"
"""The method whose layers are looked at after training: spectrum, LQS and surfaces do not depend on it."""


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the records and the report.")] = Path("runs/demo"),
    methods: Annotated[str, typer.Option("--methods", "-m", help="Comma-separated presets.")] = METHODS,
    seeds: Annotated[str, typer.Option("--seeds", help="Comma-separated.")] = "0",
    epochs: Annotated[int | None, typer.Option("--epochs", min=1, help="Instead of the recipes' own.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One epoch each: does everything run?")] = False,
    quiet: QuietOption = False,
) -> None:
    """Train a small ViT and a small ResNet on real digits with seven methods; one table, one report."""
    from hotrain import train as library
    from hotrain.cli.outcome import conditions, keep, progress_line, records_of
    from hotrain.cli.terminal import print_lines
    from hotrain.cli.workbench import configure

    started = time.perf_counter()
    chosen, numbers = split_names(methods, "--methods"), split_seeds(seeds)
    settings = [f"epochs={1 if quick else epochs}"] if quick or epochs else []
    runs = [configure(recipe, settings=settings, out=out / "runs") for recipe in RECIPES]
    outcomes = [
        library.compare(
            run, chosen, numbers, on_progress=library.silent, on_result=None if quiet else _say(progress_line)
        )
        for run in runs
    ]
    meta = conditions(runs[0], numbers) | {
        "epochs": ", ".join(f"{run.epochs} ({run.model})" for run in runs) if _differ(runs) else runs[0].epochs,
        "title": "Seven backward passes on real digits" if chosen == METHODS.split(",") else "The demo on real digits",
        "models": {run.model: describe(run) for run in runs},
    }
    looked = [look_at(run, outcome) for run, outcome in zip(runs, outcomes, strict=True)]
    more: dict[str, Any] = {kind: [entry for part in looked for entry in part[kind]] for kind in looked[0]}
    meta |= {"notes": notes(meta, runs), "seconds": round(time.perf_counter() - started, 1)}
    records = records_of(outcomes, meta)
    report = keep(records, out, **more)
    print_lines(records)
    typer.echo(f"wrote {out / 'summary.json'}" + (f" and {report}" if report else "") + f" in {meta['seconds']:.0f} s")
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    for failure in failures:
        note(f"failed: {failure['model']} {failure['method']} seed {failure['seed']}: {failure['error']}")
    if failures:
        raise typer.Exit(1)
