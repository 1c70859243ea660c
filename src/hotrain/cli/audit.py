"""``hotrain memory``, ``cost`` and ``fidelity``: what a model keeps, what it costs, how far its gradients are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hotrain.cli.options import (
    BatchOption,
    DataOption,
    DeviceOption,
    JsonOption,
    MethodOption,
    Recipe,
    SeedOption,
    SetOption,
    print_json,
)

ClassesOption = Annotated[
    int | None,
    typer.Option("--classes", min=1, help="Number of classes: look at shapes with random images, without data."),
]


def memory(
    recipe: Recipe,
    method: MethodOption = None,
    data: DataOption = None,
    classes: ClassesOption = None,
    batch_size: BatchOption = None,
    modules: Annotated[bool, typer.Option("--modules", help="By module instead of by operator.")] = False,
    settings: SetOption = None,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Bytes that autograd keeps between forward and backward, exact against converted. Measured, not estimated."""
    import hotrain
    from hotrain.analysis.saved_bytes import compare
    from hotrain.cli.workbench import configure, exact_with_images, shown
    from hotrain.train.setup import autocast

    run = shown(configure(recipe, method=method, data=data, settings=settings, device=device), method)
    model, images = exact_with_images(run, classes, batch_size)
    with autocast(run, images.device):
        exact = hotrain.saved_bytes(model, images)
        if not run.resolve_method().is_exact:
            hotrain.convert(model, run.resolve_method(), number=None, plan="memory")
        converted = hotrain.saved_bytes(model, images)
    found = compare(exact, converted)
    title = f"{run.model}, batch of {len(images)}, {run.amp or 'fp32'}: exact against {run.method_label}"
    if json:
        sides = {"exact": exact, run.method_label: converted}
        audits = {
            name: {"total": a.total, "by_operator": a.by_operator, "by_module": a.by_module}
            for name, a in sides.items()
        }
        print_json({"model": run.model, "batch_size": len(images), "ratio": found.ratio, "audits": audits})
    elif modules:
        typer.echo(f"{title}\n{_by_module(exact.by_module, converted.by_module)}")
    else:
        typer.echo(f"{title}\n{found}")


def _by_module(exact: dict[str, int], converted: dict[str, int]) -> str:
    from hotrain.analysis.tables import bytes_text, table

    names = sorted({*exact, *converted}, key=lambda name: -exact.get(name, 0))
    rows = []
    for name in names:
        before, after = exact.get(name, 0), converted.get(name, 0)
        ratio = f"{after / before:.2f}" if before else "–"
        rows.append([name or "(the model itself)", bytes_text(before), bytes_text(after), ratio])
    return table(["module", "exact", "converted", "ratio"], rows)


def cost(
    recipe: Recipe,
    method: MethodOption = None,
    mode: Annotated[str, typer.Option("--mode", help="corrected, or paper: the published formulas.")] = "corrected",
    data: DataOption = None,
    classes: ClassesOption = None,
    batch_size: BatchOption = 1,
    float_bits: Annotated[int, typer.Option("--float-bits", help="Bits of a float: 32, or 16 for bf16.")] = 32,
    settings: SetOption = None,
    json: JsonOption = False,
) -> None:
    """FLOPs and bit operations of forward and both gradient paths, layer by layer, transforms included."""
    import hotrain
    from hotrain.cli.workbench import configure, exact_with_images, shown

    run = shown(configure(recipe, method=method, data=data, settings=settings, device="cpu"), method)
    model, images = exact_with_images(run, classes, batch_size)
    found = hotrain.cost(model, images, mode=mode, method=run.resolve_method(), float_bits=float_bits)
    if json:
        answer: dict[str, Any] = {"model": run.model, "method": run.method_label, "mode": mode}
        answer |= {"batch_size": len(images), "flops": found.flops_total, "bit_ops": found.bit_ops_total}
        print_json({**answer, "rows": found.rows})
    else:
        typer.echo(f"{run.model}, batch of {len(images)}, {run.method_label}\n{found}")


def fidelity(
    recipe: Recipe,
    method: MethodOption = None,
    data: DataOption = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Weights of a run: its folder or checkpoint file.")
    ] = None,
    draws: Annotated[int, typer.Option("--draws", min=1, help="Draws that the bias is averaged over.")] = 8,
    settings: SetOption = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Error, cosine and bias of every layer's gradients against exact on one training batch, energy by sequency."""
    import hotrain
    from hotrain.cli.workbench import configure, converted, shown

    run = configure(recipe, method=method, data=data, settings=settings, seed=seed, device=device)
    run = shown(run, method)
    setup = converted(run, checkpoint)
    with setup.autocast():
        found = hotrain.fidelity(setup.model, setup.example(), setup.loss, draws=draws)
    if json:
        print_json({"model": run.model, "method": run.method_label, "draws": draws, "rows": found.rows})
    else:
        typer.echo(f"{run.model}, {run.method_label}\n{found}")
