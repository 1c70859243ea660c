"""``hotrain memory``, ``cost``, ``fidelity`` and ``calibrate``: saved bytes, operations, gradient errors, LQS."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotrain.cli import options
from hotrain.cli.errors import note
from hotrain.cli.terminal import working

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hotrain.analysis.fit import FitReport
    from hotrain.audit.saved_bytes import SavedBytes
    from hotrain.train import TrainRun

CALIBRATE = """Examples:
  hotrain calibrate demo_vit --method hot
  hotrain train demo_vit --method hot --set calibration_file=calibration.json"""
COST = """Examples:
  hotrain cost demo_vit
  hotrain cost vit_base_patch16_224 --method hot"""
FIDELITY = """Examples:
  hotrain fidelity demo_vit
  hotrain fidelity demo_vit --method hot-unbiased --draws 32
  hotrain fidelity demo_vit --checkpoint runs/demo_vit-hq8-s0-…"""
MEMORY = """Examples:
  hotrain memory demo_vit
  hotrain memory vit_base_patch16_224 -b 64 --amp bf16
  hotrain memory vit_base_patch16_224 --fit 24GB --amp bf16"""


def memory(
    model: options.Model,
    method: options.MethodOption = None,
    data: options.DataOption = None,
    classes: options.ClassesOption = None,
    batch_size: options.BatchOption = None,
    amp: options.AmpOption = None,
    modules: Annotated[bool, typer.Option("--modules", help="By module instead of by operator.")] = False,
    fit: Annotated[
        str | None, typer.Option("--fit", help="Find the largest batch that fits into so much memory: 24GB, 800MB.")
    ] = None,
    settings: options.SetOption = None,
    device: options.DeviceOption = None,
    json: options.JsonOption = False,
) -> None:
    """Bytes that autograd saves for backward: exact against converted.

    The converted figure is what `hotrain train` of the same recipe and method saves; listed with it is what stays in
    full precision, and why. With --fit: the largest batch, exact, checkpointed and converted.
    """
    from hotrain.analysis.uncompressed import full_table
    from hotrain.cli.prepare import with_images
    from hotrain.tables import bytes_text, parse_bytes

    budget = None if fit is None else parse_bytes(fit)
    with working(f"{model}: loading") as say:
        run, network, images = with_images(
            model, classes, batch_size, method=method, data=data, settings=settings, device=device, amp=amp
        )
        about = {"model": run.model, "method": run.method_label, "memory": run.resolve_method().memory}
        about["precision"] = run.amp or "fp32"
        if budget is None:
            say(f"{model}: measuring a batch of {len(images)}")
            measured = _measured(run, network, images)
        else:
            found = _fit(run, network, images, budget, say)
    title = f"{run.model}, {about['precision']}, {run.method_label} (memory={about['memory']})"
    if budget is not None:
        options.show(json, {**about, **asdict(found)}, f"{title}, {run.optimizer}\n{found}")
        return
    exact, converted, predicted, full = measured
    if json:
        fields = ("total", "by_operator", "by_module", "device_peak")
        audits = {
            name: {field: getattr(a, field) for field in fields}
            for name, a in {"exact": exact, run.method_label: converted}.items()
        }
        said = {name: p and {field: getattr(p, field) for field in fields[:-1]} for name, p in predicted.items()}
        answer = {**about, "batch_size": len(images), "ratio": converted.total / exact.total, "audits": audits}
        options.print_json({**answer, "predicted": said, "full_precision": [asdict(row) for row in full]})
        return
    typer.echo(f"{title}, batch of {len(images)}")
    typer.echo(_side_by_side(exact, converted, predicted[run.method_label], modules))
    of_exact = predicted["exact"]
    if of_exact is not None:
        typer.echo(f"\npredicted without running the model, exact: {bytes_text(of_exact.total)}")
    if exact.device_peak is not None and converted.device_peak is not None:
        before, after = bytes_text(exact.device_peak), bytes_text(converted.device_peak)
        typer.echo(f"\npeak over forward and backward, above what was there: {before} exact, {after} converted")
    typer.echo(f"\n{full_table(full)}")


def _measured(
    run: TrainRun, model: nn.Module, images: Tensor
) -> tuple[SavedBytes, SavedBytes, dict[str, SavedBytes | None], list[Any]]:
    """Measure the exact and the converted model; predictions of both by name; what stays in full precision."""
    import hotrain
    from hotrain.analysis.uncompressed import still_full
    from hotrain.train.setup import autocast, convert

    with autocast(run, images.device):
        predicted = {"exact": _predicted(model, images)}
        exact = hotrain.saved_bytes(model, images, device_peak=images.is_cuda)
        report = convert(run, model)
        predicted[run.method_label] = _predicted(model, images)
        converted = hotrain.saved_bytes(model, images, device_peak=images.is_cuda)
    return exact, converted, predicted, still_full(converted, report)


def _fit(run: TrainRun, model: nn.Module, images: Tensor, budget: int, say: Any) -> FitReport:
    """`hotrain.fit` with the run's method and optimizer; shows every batch that it tries, and what it found."""
    import hotrain
    from hotrain.analysis.fit import BOTH, CONVERTED, EXACT, VARIANTS
    from hotrain.compress.checkpointing import blocks
    from hotrain.train.optimization import create_optimizer
    from hotrain.train.setup import autocast

    recomputable = bool(blocks(model))
    if not recomputable:
        note("this model has no blocks in an nn.ModuleList or nn.Sequential to recompute: none is checkpointed")

    def batch(size: int) -> Tensor:
        say(f"{run.model}: a batch of {size}")
        return images.new_empty(size, *images.shape[1:]).normal_()

    with autocast(run, images.device):
        return hotrain.fit(
            model,
            batch,
            budget,
            method=run.resolve_method(),
            plan=run.plan,
            variants=(*VARIANTS, BOTH) if recomputable else (EXACT, CONVERTED),
            optimizer=lambda _: create_optimizer(run, model),
            on_row=lambda row: note(f"{row.variant}: a batch of {row.batch_size}"),
        )


def _predicted(model: nn.Module, images: Tensor) -> SavedBytes | None:
    """Predict the saved bytes; None, with a note on stderr, where that is not possible."""
    import hotrain

    try:
        return hotrain.predicted_bytes(model, images)
    except ValueError as error:
        note(f"no prediction: {error}")
        return None


def _side_by_side(exact: SavedBytes, converted: SavedBytes, predicted: SavedBytes | None, modules: bool) -> str:
    """A table by module or by operator, the largest first; ``predicted`` is of the converted model."""
    from hotrain.tables import bytes_text, table

    def of(audit: SavedBytes | None) -> Counter[str]:
        return Counter() if audit is None else Counter(audit.by_module if modules else audit.by_operator)

    before, after, said = of(exact), of(converted), of(predicted)
    names = sorted({*before, *after, *said}, key=lambda name: (-max(before[name], after[name]), name))

    def line(name: str, b: int, a: int, p: int) -> list[str]:
        ratio, foretold = f"{a / b:.3f}" if b else "–", "–" if predicted is None else bytes_text(p)
        return [name, bytes_text(b), bytes_text(a), ratio, foretold]

    rows = [line(name or "(the model itself)", before[name], after[name], said[name]) for name in names]
    rows.append(line("total", exact.total, converted.total, 0 if predicted is None else predicted.total))
    return table(["module" if modules else "operator", "exact", "converted", "ratio", "predicted"], rows)


def cost(
    model: options.Model,
    method: options.MethodOption = None,
    data: options.DataOption = None,
    classes: options.ClassesOption = None,
    batch_size: Annotated[int, typer.Option("--batch-size", "--batch", "-b", min=1, help="Images in the batch.")] = 1,
    float_bits: Annotated[int, typer.Option("--float-bits", help="Bits of a float: 32, or 16 for bf16.")] = 32,
    settings: options.SetOption = None,
    json: options.JsonOption = False,
) -> None:
    """FLOPs and bit operations of forward and both gradients, by layer, including the transforms."""
    import hotrain
    from hotrain.cli.prepare import with_images

    with working(f"{model}: counting"):
        run, network, images = with_images(
            model, classes, batch_size, method=method, data=data, settings=settings, device="cpu"
        )
        found = hotrain.cost(network, images, method=run.resolve_method(), float_bits=float_bits)
    answer: dict[str, Any] = {"model": run.model, "method": run.method_label, "batch_size": len(images)}
    answer |= {"flops": found.flops_total, "bit_ops": found.bit_ops_total, "rows": found.rows}
    options.show(json, answer, f"{run.model}, batch of {len(images)}, {run.method_label}\n{found}")


def fidelity(
    model: options.Model,
    method: options.MethodOption = None,
    data: options.DataOption = None,
    checkpoint: options.CheckpointOption = None,
    draws: Annotated[int, typer.Option("--draws", min=2, help="Draws that the bias is averaged over.")] = 8,
    settings: options.SetOption = None,
    seed: options.SeedOption = None,
    device: options.DeviceOption = None,
    json: options.JsonOption = False,
) -> None:
    """Relative error, cosine and bias of every layer's gradients against exact, on one training batch."""
    import hotrain
    from hotrain.cli.prepare import converted, look

    with working(f"{model}: comparing gradients, {draws} draws"):
        run = look(model, method=method, data=data, settings=settings, seed=seed, device=device)
        setup = converted(run, checkpoint)
        with setup.autocast():
            found = hotrain.fidelity(setup.model, setup.example(), setup.loss, draws=draws)
    answer = {"model": run.model, "method": run.method_label, "draws": draws, "rows": found.rows}
    options.show(json, answer, f"{run.model} on {run.data}, {run.method_label}\n{found}")


def calibrate(
    model: options.Model,
    out: Annotated[Path, typer.Option("--out", "-o", help="JSON file to write.")] = Path("calibration.json"),
    method: options.MethodOption = None,
    data: options.DataOption = None,
    batches: Annotated[int, typer.Option("--batches", min=1, help="Number of training batches.")] = 4,
    checkpoint: options.CheckpointOption = None,
    settings: options.SetOption = None,
    seed: options.SeedOption = None,
    device: options.DeviceOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    json: options.JsonOption = False,
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
    answer = {"model": run.model, "method": run.method_label, "file": out, **asdict(found)}
    text = f"{run.model}, {run.method_label}, {len(chosen)} training batches\n{found}\nwrote {out}"
    options.show(json, answer, text)
