"""``hotrain train``: one run of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotrain.cli.options import (
    DataOption,
    DeviceOption,
    JsonOption,
    MethodOption,
    OutOption,
    QuietOption,
    Recipe,
    SeedOption,
    SetOption,
    print_json,
)


def train(
    recipe: Recipe,
    method: MethodOption = None,
    data: DataOption = None,
    settings: SetOption = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="A checkpoint, or the folder of a run, continued bit for bit.")
    ] = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    out: OutOption = None,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Train a recipe. Ctrl-C finishes the update, writes a checkpoint and says how to go on."""
    from hotrain import train as library
    from hotrain.cli.workbench import configure

    run = configure(recipe, method=method, data=data, settings=settings, seed=seed, device=device, out=out)
    result = library.train(run, resume=resume, on_progress=library.silent if quiet else None)
    if json:
        shown = ("run_id", "accuracy", "best_accuracy", "saved_bytes", "bit_ops", "step_ms", "peak_bytes", "seconds")
        answer = {"model": run.model, "method": run.method_label, "seed": run.seed}
        print_json({**answer, **{name: getattr(result, name) for name in shown}})
        return
    if result.accuracy is not None and result.best_accuracy is not None:
        typer.echo(
            f"{run.model} {run.method_label} seed {run.seed}: {result.accuracy:.2f} % "
            f"(best {result.best_accuracy:.2f} %) in {result.seconds:.0f} s"
        )
    typer.echo(f"record      {result.record_path}\ncheckpoint  {result.checkpoint_path}")
