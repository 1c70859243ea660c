"""``hotrain memory``, ``cost`` and ``fidelity``: what a model keeps, what it costs, how far its gradients are."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hotrain.analysis.saved_bytes import SavedBytes
    from hotrain.method import Method
    from hotrain.train import TrainRun

ClassesOption = Annotated[
    int | None,
    typer.Option("--classes", min=1, help="Number of classes: look at shapes with random images, without data."),
]

_CLASSES, _BATCH = 1000, 8  # of a timm model, where nothing is said


def memory(
    model: Annotated[
        str,
        typer.Argument(help="A recipe (`hotrain recipes`) or a timm model: vit_base_patch16_224.", show_default=False),
    ],
    method: MethodOption = None,
    data: DataOption = None,
    classes: ClassesOption = None,
    batch_size: BatchOption = None,
    image_size: Annotated[
        int | None, typer.Option("--image-size", min=1, help="Side of the images; default: the model's own.")
    ] = None,
    amp: Annotated[str | None, typer.Option("--amp", help="bf16 or fp16; default: as the recipe says.")] = None,
    keep: Annotated[
        str, typer.Option("--memory", help="block: all that is kept is compressed; linear: inputs of layers alone.")
    ] = "block",
    modules: Annotated[bool, typer.Option("--modules", help="By module instead of by operator.")] = False,
    fit: Annotated[
        str | None, typer.Option("--fit", help="Find the largest batch that fits into so much memory: 24GB, 800MB.")
    ] = None,
    settings: SetOption = None,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Bytes that autograd keeps between forward and backward, exact against converted, predicted and measured; what
    stays in full precision, and why. With --fit: the largest batch, exact, checkpointed and converted."""
    import hotrain
    from hotrain.analysis.fit import parse_bytes
    from hotrain.analysis.full import full_table, still_full
    from hotrain.cli.workbench import exact_with_images, shown
    from hotrain.tables import bytes_text
    from hotrain.train import replace
    from hotrain.train.setup import autocast

    budget = None if fit is None else parse_bytes(fit)
    run, is_recipe = _run_of(model, method=method, data=data, settings=settings, device=device)
    sizes = {"image_size": image_size, "amp": amp}
    run = replace(shown(run, method), **{name: value for name, value in sizes.items() if value is not None})
    if not is_recipe and data is None:
        classes = classes or _CLASSES
    chosen = run.resolve_method().override(memory=keep)
    network, images = exact_with_images(run, classes, batch_size)
    about = {"model": run.model, "method": run.method_label, "memory": keep, "precision": run.amp or "fp32"}
    if budget is not None:
        _fit(network, images, budget, chosen, autocast(run, images.device), about, json)
        return
    with autocast(run, images.device):
        on_gpu = images.is_cuda
        predicted = {"exact": _predicted(network, images)}
        exact = hotrain.saved_bytes(network, images, device_peak=on_gpu)
        report = None
        if not chosen.is_plain:
            report = hotrain.convert(network, chosen, number=None, plan="memory")
        predicted[run.method_label] = _predicted(network, images)
        converted = hotrain.saved_bytes(network, images, device_peak=on_gpu)
    full = still_full(converted, report)
    if json:
        audits = {
            name: {
                "total": a.total,
                "by_operator": a.by_operator,
                "by_module": a.by_module,
                "device_peak": a.device_peak,
            }
            for name, a in {"exact": exact, run.method_label: converted}.items()
        }
        answer = {**about, "batch_size": len(images), "ratio": converted.total / exact.total, "audits": audits}
        answer["predicted"] = {
            name: None if p is None else {"total": p.total, "by_operator": p.by_operator, "by_module": p.by_module}
            for name, p in predicted.items()
        }
        print_json({**answer, "full_precision": [asdict(row) for row in full]})
        return
    title = (
        f"{run.model}, batch of {len(images)}, {about['precision']}: exact against {run.method_label}, memory={keep}"
    )
    typer.echo(f"{title}\n{_side_by_side(exact, converted, predicted[run.method_label], modules)}")
    of_exact = predicted["exact"]
    if of_exact is not None:
        typer.echo(f"\npredicted without running the model, exact: {bytes_text(of_exact.total)}")
    if exact.device_peak is not None and converted.device_peak is not None:
        before, after = bytes_text(exact.device_peak), bytes_text(converted.device_peak)
        typer.echo(f"\npeak over forward and backward, above what was there: {before} exact, {after} converted")
    typer.echo(f"\n{full_table(full)}")


def _run_of(name: str, **options: Any) -> tuple[TrainRun, bool]:
    """The run of a recipe, or one of a timm model at that model's own image size; and whether it is a recipe's.

    Raises ValueError for what is neither.
    """
    import difflib

    import hotrain_recipes

    from hotrain.cli.workbench import configure
    from hotrain.train import TrainRun, parse_method, replace, with_settings
    from hotrain.train.models import SMALL

    recipes = hotrain_recipes.all()
    if name in recipes:
        return configure(name, **options), True
    import timm

    if name not in SMALL and not timm.is_model(name):
        near = difflib.get_close_matches(name, [*recipes, *timm.list_models()], n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; `hotrain recipes` lists the recipes"
        raise ValueError(f"{name!r} is neither a recipe nor a timm model{hint}")
    size = None if name in SMALL else (timm.get_pretrained_cfg_value(name, "input_size") or (224,))[-1]
    run = with_settings(TrainRun(name=name, model=name, image_size=size, batch_size=_BATCH), options["settings"] or ())
    changes = {key: options[key] for key in ("data", "device") if options[key] is not None}
    if options["method"] is not None:
        changes["method"], changes["method_overrides"] = parse_method(options["method"])
    return replace(run, **changes), False


def _fit(
    model: nn.Module,
    images: Tensor,
    budget: int,
    method: Method,
    autocast: AbstractContextManager[object],
    about: dict[str, str],
    json: bool,
) -> None:
    import hotrain
    from hotrain.activations.recompute import blocks
    from hotrain.analysis.fit import BOTH, CHECKPOINTED, VARIANTS

    wanted = [name for name in (*VARIANTS, BOTH) if blocks(model) or name not in (CHECKPOINTED, BOTH)]

    def batch(size: int) -> Tensor:
        return images.new_empty(size, *images.shape[1:]).normal_()

    with autocast:
        found = hotrain.fit(model, batch, budget, method=method, memory=method.memory, variants=wanted)
    if json:
        print_json({**about, **asdict(found)})
        return
    typer.echo(f"{about['model']}, {about['precision']}, {about['method']}, memory={about['memory']}, AdamW: {found}")
    if len(wanted) == 2:
        typer.echo("checkpointed: this model has no blocks in an nn.ModuleList or nn.Sequential to recompute")


def _predicted(model: nn.Module, images: Tensor) -> SavedBytes | None:
    """None where nothing can be said, which is said instead."""
    import hotrain

    try:
        return hotrain.predicted_bytes(model, images)
    except ValueError as error:
        typer.echo(f"no prediction: {error}", err=True)
        return None


def _side_by_side(exact: SavedBytes, converted: SavedBytes, predicted: SavedBytes | None, modules: bool) -> str:
    """By module or by operator, the largest first; predicted is of the converted model."""
    from hotrain.tables import bytes_text, table

    def of(audit: SavedBytes | None) -> dict[str, int]:
        return {} if audit is None else audit.by_module if modules else audit.by_operator

    before, after, said = of(exact), of(converted), of(predicted)
    names = sorted({*before, *after, *said}, key=lambda name: (-max(before.get(name, 0), after.get(name, 0)), name))
    rows = [
        (name or "(the model itself)", before.get(name, 0), after.get(name, 0), said.get(name, 0)) for name in names
    ]
    rows.append(("total", exact.total, converted.total, 0 if predicted is None else predicted.total))
    cells = [
        [
            name,
            bytes_text(b),
            bytes_text(a),
            f"{a / b:.3f}" if b else "–",
            "–" if predicted is None else bytes_text(p),
        ]
        for name, b, a, p in rows
    ]
    return table(["module" if modules else "operator", "exact", "converted", "ratio", "predicted"], cells)


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
