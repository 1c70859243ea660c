"""``hotrain calibrate``: LQS on a few training batches, written as readable JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotrain.cli.options import DataOption, DeviceOption, MethodOption, Recipe, SeedOption, SetOption


def calibrate(
    recipe: Recipe,
    out: Annotated[Path, typer.Option("--out", "-o", help="JSON file to write.")] = Path("calibration.json"),
    method: MethodOption = None,
    data: DataOption = None,
    batches: Annotated[int, typer.Option("--batches", min=1, help="Training batches to look at.")] = 4,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Weights of a run: its folder or checkpoint file.")
    ] = None,
    settings: SetOption = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
) -> None:
    """Choose for every layer one scale a token or one for the tensor (LQS). Use it with calibration_file=FILE."""
    import hotrain
    from hotrain.cli.workbench import configure, converted, shown
    from hotrain.train import training_batches

    run = configure(recipe, method=method, data=data, settings=settings, seed=seed, device=device)
    run = shown(run, method)
    setup = converted(run, checkpoint)
    chosen = list(training_batches(setup, batches))
    with setup.autocast():
        found = hotrain.calibrate(setup.model, chosen, setup.loss, max_batches=len(chosen))
    found.save(out)
    typer.echo(f"{run.model}, {run.method_label}, {len(chosen)} training batches\n{found}\nwrote {out}")
