"""``hotrain bench layers``, ``step``, ``zoo``, ``ops``: times on this machine, with baselines from the same run; and
``floors``, what a step computes and moves at least."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from hotrain.cli.errors import note
from hotrain.cli.options import Command, JsonOption, PlainFlags, print_json, split_names

if TYPE_CHECKING:
    import torch


class Group(PlainFlags, TyperGroup):
    """The commands of `hotrain bench`."""


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Time layers, training steps and kernels on a GPU, each with its baseline.",
)

OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="Append the records to this JSONL file.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cuda (the default), cuda:N or cpu.")]
TinyOption = Annotated[bool, typer.Option("--tiny", help="Small shapes: whether it runs, not how fast.")]
CommitOption = Annotated[str | None, typer.Option("--commit", help="Of the tree, where git does not tell.")]
RepeatsOption = Annotated[int, typer.Option("--repeats", min=1, help="Rounds in which every variant runs once.")]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Timed steps of a variant.")]
GpusOption = Annotated[int, typer.Option("--gpus", min=1, help="GPUs to distribute the models over.")]
MethodsOption = Annotated[str, typer.Option("--methods", help="Presets, with overrides as in hot:rank=4+scale=token.")]


def _record(
    rows: Iterator[dict[str, Any]], device: torch.device, commit: str | None, out: Path | None
) -> Iterator[dict[str, Any]]:
    """Add the conditions of measurement to the rows and write each as soon as it is measured."""
    from hotrain_bench import conditions

    common = conditions.conditions(device, sys.argv, commit)
    for row in rows:
        conditions.write(out, row | common)
        yield row | common


def _checked(
    rows: Iterator[dict[str, Any]], device: torch.device, commit: str | None, out: Path | None
) -> list[dict[str, Any]]:
    """The recorded rows; a wrong gradient ends with exit code 1."""
    from hotrain_bench.layers import Wrong

    try:
        return list(_record(rows, device, commit, out))
    except Wrong as wrong:
        note(f"wrong: {wrong}")
        raise typer.Exit(1) from wrong


def _show(headers: list[str], lines: list[list[str]], rows: list[dict[str, Any]], tiny: bool, json: bool) -> None:
    """Print the records as JSON or a table; times of small shapes are marked as such."""
    from hotrain.tables import table

    if json:
        print_json(rows)
        return
    if tiny:
        typer.echo("--tiny: small models and shapes under these names. It shows that they run; the times mean nothing.")
        lines = [[f"{line[0]} (tiny)", *line[1:]] for line in lines]
    typer.echo(table(headers, lines))


@app.command("layers", cls=Command, epilog="Example: hotrain bench layers --models vit_b --methods hot-unbiased,hq8")
def layers(
    models: Annotated[str, typer.Option("--models", help="vit_b and llama.")] = "vit_b,llama",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images of the ViT-B layers.")] = 128,
    methods: MethodsOption = "hot-unbiased",
    repeats: RepeatsOption = 50,
    device: DeviceOption = None,
    tiny: TinyOption = False,
    commit: CommitOption = None,
    out: OutOption = None,
    json: JsonOption = False,
) -> None:
    """Backward of Linear layers, with the quantized save at forward, against cuBLAS in bf16 (ViT-B: fp32, TF32 too).

    Gradients are checked first; a wrong one ends with exit code 1 and no times.
    """
    from hotrain_bench import layers as library
    from hotrain_bench.conditions import device_named

    where = device_named(device)
    rows = library.run(split_names(models, "--models"), batch, split_names(methods, "--methods"), where, repeats, tiny)
    done = _checked(rows, where, commit, out)
    base = {row["subject"]: row["median_ms"] for row in done if row["variant"] == library.BASELINE}
    lines = [
        [
            row["subject"],
            row["variant"],
            f"{row['median_ms'] * 1e3:.1f}",
            f"{row['spread_ms'] * 1e3:.1f}",
            f"{row['eager_ms'] * 1e3:.1f}",
            f"{base[row['subject']] / row['median_ms']:.2f}",
        ]
        for row in done
    ]
    _show(["layer", "variant", "µs", "±", "eager µs", "bf16 ÷ it"], lines, done, tiny, json)


@app.command(
    "step",
    cls=Command,
    epilog="Example: hotrain bench step vit_base_patch16_224/b128 --variants exact+graphs,hotrain-default",
)
def step(
    subjects: Annotated[
        list[str] | None, typer.Argument(help="Default: all. SUBJECT=VARIANT,… with --together.", show_default=False)
    ] = None,
    variants: Annotated[str | None, typer.Option("--variants", help="Comma-separated; default: all.")] = None,
    steps: StepsOption = 30,
    again: Annotated[bool, typer.Option("--again/--once", help="Measure the baseline again at the end.")] = True,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Start no variant after so long; with --together, wait for none.")
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="Prepare all at once, a process each, and time one after the other.")
    ] = False,
    gpus: GpusOption = 1,
    device: DeviceOption = None,
    tiny: TinyOption = False,
    commit: CommitOption = None,
    out: OutOption = None,
    json: JsonOption = False,
) -> None:
    """Whole training steps: time and memory of every variant, each in a fresh model.

    Peak and reserved are maxima over all steps after the first; activations are the bytes saved by one forward for
    backward; above state is the peak without parameters, gradients, optimizer state and batches.

    A variant that fails is recorded with its error and does not stop the others; the exit code is then 1.
    """
    from hotrain_bench import side_by_side
    from hotrain_bench import step as library
    from hotrain_bench.conditions import device_named
    from hotrain_bench.tasks import SUBJECTS, check

    where = device_named(device)
    chosen = None if variants is None else split_names(variants, "--variants")
    if together:
        parts = []
        for subject in subjects or SUBJECTS:
            name, _, own = subject.partition("=")
            check(name)
            names = split_names(own, subject) if own else chosen or library.VARIANTS
            parts += [(name, library.variant_of(variant).name) for variant in names]
        rows = side_by_side.together(parts, str(where), steps, tiny, seconds, gpus)
    else:
        rows = library.run(subjects or [], chosen, where, steps, tiny=tiny, again=again, seconds=seconds)
    done = _steps(_record(rows, where, commit, out))
    lines = []
    for row in done:
        if row["error"] is None:
            cells = [row["subject"], row["variant"], f"{row['median_ms']:.2f}", f"{row['spread_ms']:.2f}"]
            cells += ["–" if row[field] is None else f"{row[field] / 2**30:.2f}" for field in side_by_side.BYTES]
            lines.append(cells)
    _show(["subject", "variant", "ms/step", "±", *side_by_side.BYTES.values()], lines, done, tiny, json)
    _exit_if_failed(done)


@app.command("zoo", cls=Command, epilog="Example: hotrain bench zoo --models convnext_base/b64")
def zoo(
    models: Annotated[str | None, typer.Option("--models", help="Comma-separated subjects; default: thirty.")] = None,
    variants: Annotated[str | None, typer.Option("--variants", help="Comma-separated.", show_default=False)] = None,
    steps: StepsOption = 30,
    seconds: Annotated[float | None, typer.Option("--seconds", help="Stop what is not ready after so long.")] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Processes at a time; default: as many as cores.")
    ] = None,
    gpus: GpusOption = 1,
    device: DeviceOption = None,
    tiny: TinyOption = False,
    commit: CommitOption = None,
    out: OutOption = None,
    json: JsonOption = False,
) -> None:
    """Thirty models or --models, a line each: exact as CUDA graphs, hotrain's default, and every block checkpointed.

    Variants are prepared in parallel, as many models at a time as --jobs allows, and timed one after the other while
    nothing else runs on their GPU. What is dominated takes more time and more memory than another variant.

    A variant that fails is recorded with its error and does not stop the others; the exit code is then 1.
    """
    from hotrain_bench import zoo as library
    from hotrain_bench.conditions import device_named

    where = device_named(device)
    names = split_names(models, "--models") if models else library.MODELS
    chosen = split_names(variants, "--variants") if variants else library.VARIANTS
    rows = library.run(names, chosen, str(where), steps, tiny, seconds, jobs, gpus)
    done = _steps(_record(rows, where, commit, out))
    lines = []
    for name in names:
        found = {row["variant"]: row for row in done if row["subject"] == name}
        lines.append([name, *library.cells(found)])
    _show(["model", *library.HEADERS], lines, done, tiny, json)
    _exit_if_failed(done)


def _steps(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of training steps, each noted as it is measured."""
    done = []
    for row in rows:
        done.append(row)
        result = f"{row['median_ms']:.2f} ms" if row["error"] is None else row["error"]
        note(f"{row['subject']} {row['variant']}: {result}")
    return done


def _exit_if_failed(rows: list[dict[str, Any]]) -> None:
    if any(row["error"] is not None for row in rows):
        raise typer.Exit(1)


@app.command("ops", cls=Command, epilog="Example: hotrain bench ops --methods hot-unbiased,hq8")
def ops(
    methods: MethodsOption = "hot-unbiased",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images of the ViT-B layers.")] = 128,
    repeats: RepeatsOption = 50,
    device: DeviceOption = None,
    tiny: TinyOption = False,
    commit: CommitOption = None,
    out: OutOption = None,
    json: JsonOption = False,
) -> None:
    """Kernels against the GPU's copy bandwidth and matrix product rates, measured in the same run."""
    from hotrain_bench import ops as library
    from hotrain_bench.conditions import device_named

    where = device_named(device)
    rows = library.run(split_names(methods, "--methods"), batch, where, repeats, tiny)
    done = _checked(rows, where, commit, out)
    lines = [
        [
            row["subject"],
            row["variant"],
            f"{row['median_ms'] * 1e3:.1f}",
            f"{row['tb_s']:.2f}",
            f"{row['tflop_s']:.0f}",
            row["ceiling"] or "",
            "" if row["share"] is None else f"{row['share']:.0%}",
        ]
        for row in done
    ]
    _show(["work", "variant", "µs", "TB/s", "TFLOP/s", "ceiling", "share"], lines, done, tiny, json)


@app.command("floors", cls=Command, epilog="Example: hotrain bench floors vit_base_patch16_224/b128")
def floors(
    subjects: Annotated[
        list[str] | None, typer.Argument(help="As of step; default: its own.", show_default=False)
    ] = None,
    tiny: TinyOption = False,
    commit: CommitOption = None,
    out: OutOption = None,
    json: JsonOption = False,
) -> None:
    """What the exact training step of a model computes and moves at least, counted without a GPU."""
    from hotrain_bench import floors as library
    from hotrain_bench.conditions import device_named
    from hotrain_bench.tasks import SUBJECTS, check

    names = subjects or SUBJECTS
    for name in names:
        check(name)
    where = device_named("cpu")
    done = list(_record(library.run(names, tiny), where, commit, out))
    lines = []
    for row in done:
        operations = sum(count * each for each, _, count in row["products"])
        moved = (row[field] / 2**30 for field in ("forward_bytes", "backward_bytes", "optimizer_bytes"))
        lines.append([row["subject"], f"{operations / 1e12:.2f}", *(f"{each:.2f}" for each in moved)])
    _show(["subject", "TFLOP", "forward GiB", "backward GiB", "optimizer GiB"], lines, done, tiny, json)
