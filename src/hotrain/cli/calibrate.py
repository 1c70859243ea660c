"""``hotrain calibrate``: LQS on a few training batches, written to a JSON file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hotrain.cli.options import (
    CheckpointOption,
    DataOption,
    DeviceOption,
    JsonOption,
    MethodOption,
    Model,
    SeedOption,
    SetOption,
    print_json,
)
from hotrain.cli.terminal import working


def calibrate(
    model: Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="JSON file to write.")] = Path("calibration.json"),
    method: MethodOption = None,
    data: DataOption = None,
    batches: Annotated[int, typer.Option("--batches", min=1, help="Number of training batches.")] = 4,
    checkpoint: CheckpointOption = None,
    settings: SetOption = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    json: JsonOption = False,
) -> None:
    """Choose per-token scales or one per-tensor scale for every layer (LQS).

    Use the file with `hotrain train RECIPE --set calibration_file=FILE`, for the same recipe and method.
    """
    import hotrain
    from hotrain.cli.prepare import converted, look
    from hotrain.train import training_batches

    if out.exists() and not force:
        raise ValueError(f"--out: {out} exists already; give another file, or --force to replace it")
    with working(f"{model}: calibrating on {batches} training batches"):
        run = look(model, method=method, data=data, settings=settings, seed=seed, device=device)
        setup = converted(run, checkpoint)
        chosen = list(training_batches(setup, batches))
        with setup.autocast():
            found = hotrain.calibrate(setup.model, chosen, setup.loss, max_batches=len(chosen))
    found.save(out)
    if json:
        print_json({"model": run.model, "method": run.method_label, "file": out, **asdict(found)})
    else:
        typer.echo(f"{run.model}, {run.method_label}, {len(chosen)} training batches\n{found}\nwrote {out}")
