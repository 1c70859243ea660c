"""``hotrain frontier``: peak memory against step time, as a table, a record and a figure."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from hotrain._version import install_extra
from hotrain.cli import options
from hotrain.cli.errors import note
from hotrain.cli.terminal import working

FIGURE, RECORD = "frontier.svg", "frontier.jsonl"

EXAMPLES = """Examples:
  hotrain frontier demo_vit
  hotrain frontier vit_base_patch16_224 -b 64 --amp bf16 --compile --budget 6GiB"""


def frontier(
    model: options.Model,
    method: options.MethodOption = None,
    data: options.DataOption = None,
    classes: options.ClassesOption = None,
    batch_size: options.BatchOption = None,
    amp: options.AmpOption = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile each point, on a GPU as CUDA graphs; minutes for large models.")
    ] = False,
    budget: Annotated[
        str | None, typer.Option("--budget", help="Name the fastest point whose peak is within: 16GiB, 800MB.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps of each point.")] = 5,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for both files; default: runs/frontier/MODEL.")
    ] = None,
    settings: options.SetOption = None,
    device: options.DeviceOption = None,
    json: options.JsonOption = False,
) -> None:
    """Peak memory against step time: exact, checkpointed, offloaded and converted.

    Writes frontier.jsonl and, where matplotlib is installed, frontier.svg, in place of earlier ones.
    `hotrain.Frontier.load` reads the record, and `hotrain.convert(model, plan=point)` follows a point of it.
    """
    import torch

    import hotrain
    from hotrain.cli.prepare import with_images
    from hotrain.tables import parse_bytes
    from hotrain.train.optimization import create_optimizer
    from hotrain.train.setup import autocast

    size = None if budget is None else parse_bytes(budget)
    asked = {"method": method, "data": data, "settings": settings, "device": device}
    asked |= {"amp": amp, "compile": "true" if compiled else None}
    with working(f"{model}: loading") as say:
        run, network, images = with_images(model, classes, batch_size, **asked)
        labels = torch.zeros(len(images), dtype=torch.long, device=images.device)

        def loss(output: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(output.float(), labels)

        def tell(point: hotrain.Point) -> None:
            note(str(point))
            say(f"{run.model}: measuring, after {point.name}")

        with autocast(run, images.device):
            found = hotrain.frontier(
                network,
                images,
                method=run.resolve_method(),
                loss=loss,
                optimizer=lambda _: create_optimizer(run, network),
                compile=run.compile,
                steps=steps,
                on_point=tell,
            )
    found.conditions.update(model=run.model, optimizer=run.optimizer)
    folder = out or Path("runs", "frontier", run.model)
    folder.mkdir(parents=True, exist_ok=True)
    found.save(folder / RECORD)
    written = str(folder / RECORD)
    if importlib.util.find_spec("matplotlib"):
        from hotrain.plotting.steps import draw_frontier

        (folder / FIGURE).write_text(draw_frontier(found.rows()), encoding="utf-8")
        written = f"{folder / FIGURE} and {written}"
    else:
        note(f"no figure: matplotlib is not installed; {install_extra('plot')}")
    best = None if size is None else found.best(size)
    if json:
        options.print_json({"rows": found.rows(), "best": None if best is None else best.name, "folder": folder})
        return
    typer.echo(found)
    if best is not None:
        typer.echo(f"fastest within {budget}: {best}")
    typer.echo(f"wrote {written}")
