"""``hotrain train``: train a recipe or resume a run."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotrain.cli import options
from hotrain.cli.errors import note, wrapped
from hotrain.cli.terminal import working

if TYPE_CHECKING:
    from hotrain.train import Result, Setup, TrainRun

EXAMPLES = """Examples:
  hotrain train demo_vit
  hotrain train small_vit_cifar10 --method hot-unbiased --set epochs=30 --seed 1
  hotrain train vit_b16_finetune_cifar100 --set amp=bf16 --set batch_size=64
  hotrain train demo_vit --log tensorboard
  hotrain train --resume runs/demo_vit-hq8-s0-…"""


def train(
    recipe: options.RecipeOrResume = None,
    method: options.MethodOption = None,
    data: options.DataOption = None,
    settings: options.SetOption = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", help="A checkpoint, or the folder of a run: continued bit for bit. Needs no recipe."),
    ] = None,
    seed: options.SeedOption = None,
    device: options.DeviceOption = None,
    out: options.OutOption = None,
    log: options.LogOption = None,
    quiet: options.QuietOption = False,
    json: options.JsonOption = False,
) -> None:
    """Train a recipe, or resume a run.

    Ctrl-C finishes the update, writes a checkpoint and says how to resume.
    """
    main = os.environ.get("RANK", "0") == "0"  # only one of torchrun's processes prints
    with ExitStack() as stack:
        if main:
            stack.enter_context(working(f"{recipe or resume}: loading"))
        from hotrain import train as library
        from hotrain.cli.prepare import configure

        run = configure(
            recipe,
            resume=resume,
            method=method,
            data=data,
            settings=settings,
            seed=seed,
            device=device,
            out=out,
            log=log,
        )

        def started(setup: Setup) -> None:
            stack.close()
            note(_planned(run, resume))
            note(_built(setup))

        try:
            result = library.train(run, resume=resume, on_progress=library.silent if quiet else None, on_start=started)
        except library.Interrupted as stop:
            stop.args = (str(stop).replace("--resume", "hotrain train --resume"),)
            raise
    if not main:
        return
    shown = ("run_id", "accuracy", "best_accuracy", "saved_bytes", "bit_ops", "step_ms", "peak_bytes", "seconds")
    answer = {"model": run.model, "method": run.method_label, "seed": run.seed}
    answer |= {name: getattr(result, name) for name in (*shown, "layers")}
    options.show(json, answer, _outcome(run, result))


def _planned(run: TrainRun, resume: Path | None) -> str:
    length = f"{run.steps:,} updates" if run.steps is not None else f"{run.epochs} epochs"
    batch = f"{run.batch_size}" + (f" × {run.accumulation}" if run.accumulation > 1 else "")
    parts = [f"{run.model} on {run.data}", f"method {run.method_label}", f"{length}, batches of {batch}"]
    parts += [run.amp or "fp32", f"seed {run.seed}", f"device {run.device}"]
    return f"{run.name}: {', '.join(parts)}" + ("" if resume is None else f"; resuming {resume}")


def _built(setup: Setup) -> str:
    from hotrain.train.tokens import TokenData

    what = "texts" if isinstance(setup.data, TokenData) else "images"
    data = f"{setup.data.train_size:,} {what}, {len(setup.data.classes)} classes, on {setup.device}"
    what = "no layer converted" if setup.report is None else str(setup.report).splitlines()[0].removeprefix("hotrain: ")
    return f"{setup.run.name}: {data}; {what}"


def _outcome(run: TrainRun, result: Result) -> str:
    from hotrain.conversion import line_of
    from hotrain.tables import bytes_text

    lines = []
    if result.accuracy is not None and result.best_accuracy is not None:
        lines.append(
            f"{run.model} {run.method_label} seed {run.seed}: {result.accuracy:.2f} % "
            f"(best {result.best_accuracy:.2f} %) in {result.seconds:.0f} s"
        )
    ran = [group for group in result.layers or () if group["g_x"] is not None]  # none in a finished run that is resumed
    lines += [wrapped(f"layers      {line_of(group)}", sys.stdout, " " * 12) for group in ran]
    if result.saved_bytes is not None:
        lines.append(f"kept        {bytes_text(result.saved_bytes)} for backward, of a batch of {run.batch_size}")
    if result.step_ms is not None:
        peak = "" if result.peak_bytes is None else f", peak {bytes_text(result.peak_bytes)}"
        lines.append(f"step        {result.step_ms:.1f} ms, {result.images_per_second:,.0f} images/s{peak}")
    return "\n".join([*lines, f"record      {result.record_path}", f"checkpoint  {result.checkpoint_path}"])
