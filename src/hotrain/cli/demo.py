"""``hotrain demo``: training with six methods on real images in a few minutes, offline, with a report."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotrain.cli import completion
from hotrain.cli.errors import note
from hotrain.cli.options import DeviceOption, JsonOption, print_json, split_names, split_seeds

if TYPE_CHECKING:
    from hotrain.train import Comparison, TrainRun

EXAMPLES = """Examples:
  hotrain demo --quick
  hotrain demo --methods exact,hq8 --seeds 0,1,2"""

LABELS = {"demo_vit": "small ViT", "demo_resnet": "small ResNet"}
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
    from hotrain.cli.prepare import configure
    from hotrain.cli.run_records import conditions, keep, records_of
    from hotrain.cli.terminal import print_lines

    started = time.perf_counter()
    chosen, numbers = split_names(methods, "--methods"), split_seeds(seeds)
    settings = ["steps=4"] if quick else [] if epochs is None else [f"epochs={epochs}"]
    runs = [configure(recipe, settings=settings, device=device, out=out / "runs") for recipe in LABELS]
    meta = {
        "title": "Four updates a method: does everything run?" if quick else "Memory and accuracy on real digits",
        **conditions(runs, numbers),
        "threads": "1 a run",
        "jobs": jobs,
        "models": models(runs),
        "notes": notes(runs, chosen, jobs),
    }
    outcome = train_cells(runs, chosen, numbers, jobs)
    records_of(outcome, meta).save(out)  # before anything else can fail
    memory = [entry for run in runs for entry in kept(run, chosen)]
    spectrum = [entry for run in runs for entry in energy(run, chosen, outcome)]
    meta["seconds"] = round(time.perf_counter() - started, 1)
    records = replace(records_of(outcome, meta), memory=memory, spectrum=spectrum)
    report = keep(records, out)
    for result in outcome.results:
        result.checkpoint_path.unlink(missing_ok=True)  # the records stay; a demo is not resumed
    failures = outcome.failures
    if json:
        print_json(
            {"rows": outcome.rows, "failures": failures, "seconds": meta["seconds"], "folder": out, "report": report}
        )
    else:
        print_lines(records)
        minutes, seconds = divmod(round(time.perf_counter() - started), 60)
        typer.echo(
            f"{minutes}:{seconds:02d} min in all · wrote {out / 'summary.json'}" + (f" and {report}" if report else "")
        )
    for failure in failures:
        note(f"failed: {failure['model']} {failure['method']} seed {failure['seed']}: {failure['error']}")
    if failures:
        raise typer.Exit(1)


def train_cells(runs: Sequence[TrainRun], methods: Sequence[str], seeds: Sequence[int], jobs: int) -> Comparison:
    """Compare the methods on every run, with a line on stderr for each finished cell (run, method, seed).

    ``jobs`` cells run at a time, each in a process with one thread: small layers do not use two threads well. The cells
    of the result are in the order of runs, methods and seeds.

    Raises:
        ValueError: a bad method, before any training.
    """
    from hotrain.cli.prepare import labels
    from hotrain.cli.run_records import progress_line
    from hotrain.train import Comparison

    labels(runs[0], methods)
    context = multiprocessing.get_context("spawn")  # a forked child would inherit PyTorch's threads
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_parent) as pool:
        cells = [pool.submit(_one, *cell) for cell in itertools.product(runs, methods, seeds)]
        try:
            for number, cell in enumerate(as_completed(cells), start=1):
                for result in cell.result().results:
                    note(f"{number} of {len(cells)}  {progress_line(result)}")
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    whole = Comparison()
    for cell in cells:
        whole.failures += cell.result().failures
        whole.results += cell.result().results
    return whole


def _end_with_parent() -> None:
    """Make this process exit when its parent has ended for any reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _one(run: TrainRun, method: str, seed: int) -> Comparison:
    """Train one cell in this process with one thread and without a progress bar."""
    import torch

    from hotrain.train import compare, silent

    torch.set_num_threads(1)
    return compare(run, [method], [seed], on_progress=silent)


def kept(run: TrainRun, methods: Sequence[str]) -> list[dict[str, Any]]:
    """Records of the bytes that each method keeps, by operator."""
    import hotrain
    from hotrain.train import build, with_preset

    records = []
    for method in methods:
        setup = build(with_preset(run, method))
        images = setup.example()[0]
        with setup.autocast():
            found = hotrain.saved_bytes(setup.model.train(), images)
        record = {"model": run.model, "method": setup.run.method_label}
        records.append(record | {"total": found.total, "by_operator": dict(found.by_operator)})
    return records


def pictured(run: TrainRun, methods: Sequence[str]) -> TrainRun | None:
    """The run with the first method that has a low-pass along the tokens; None if there is none."""
    from hotrain.train import with_preset

    for each in (with_preset(run, method) for method in methods):
        low = each.resolve_method().grad_weight
        if low.tile > low.rank:
            return each
    return None


def energy(run: TrainRun, methods: Sequence[str], outcome: Comparison) -> list[dict[str, Any]]:
    """Records of the energy of x and g_y by sequency, with the weights of the exact run, or the first that finished."""
    import hotrain
    from hotrain.cli.prepare import converted

    chosen, mine = pictured(run, methods), [result for result in outcome.results if result.run.model == run.model]
    if chosen is None or not mine:
        return []
    trained = next((result for result in mine if result.run.method_label == "exact"), mine[0])
    setup = converted(chosen, trained.checkpoint_path)
    with setup.autocast():
        rows = hotrain.fidelity(setup.model, setup.example(), setup.loss, draws=2).rows
    return [
        {"model": run.model, "layer": row["layer"], "tensor": tensor, "energy": row[f"{tensor}_energy"]}
        for row in rows
        for tensor in ("g_y", "x")
    ]


def models(runs: Sequence[TrainRun]) -> dict[str, dict[str, Any]]:
    """Return label, description and number of parameters of every model."""
    from hotrain.train import build, with_preset

    described = {}
    for run in runs:
        setup = build(with_preset(run, "exact"))
        count = sum(parameter.numel() for parameter in setup.model.parameters())
        images = setup.example()[0]
        length = f"{run.steps} updates" if run.steps is not None else f"{run.epochs} epochs"
        described[run.model] = {
            "label": LABELS[run.model],
            "description": f"{count:,} parameters, {images.shape[-2]}×{images.shape[-1]} pixels, "
            f"batches of {run.batch_size}, {length}",
            "parameters": count,
        }
    return described


def notes(runs: Sequence[TrainRun], methods: Sequence[str], jobs: int) -> list[str]:
    """Return the notes on what the demo's numbers show and do not show, one or two sentences each."""
    from hotrain.train import load_data

    data = load_data(runs[0].data, data_dir=runs[0].data_dir)
    train, test = data.train_size, data.test_size
    together = f"{jobs} runs at a time, with one thread each" if jobs > 1 else "one run at a time, with one thread"
    said = [
        f"Real images, but few: {train:,} for training and {test} for the test. One test image is {100 / test:.2f} "
        "points. `hotrain demo --seeds 0,1,2` measures the noise.",
        "Accuracy is that of the last epoch. All methods start from the same weights and see the same batches.",
        f"The step times are no claim of speed: plain PyTorch without fused kernels, {together}.",
    ]
    if pictured(runs[0], methods):
        said.append("Energy by sequency is of one training batch with the weights after exact training.")
    if any(method.startswith("lbp-wht") for method in methods):
        said.append(
            "The ViT's 4×4 grid of tokens is smaller than the 8×8 tiles of lbp-wht, which therefore does not project "
            "its tokens: there lbp-wht's gradients are exact and it saves nothing."
        )
    return said
