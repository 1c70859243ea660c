"""``hotrain compare``: train several methods with the same seeds; one table, one report."""

from __future__ import annotations

import json as json_format
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotrain.cli import completion, options
from hotrain.cli.errors import note
from hotrain.cli.terminal import print_lines, working
from hotrain.plotting import lines

if TYPE_CHECKING:
    from hotrain.train import Result, TrainRun

PLAN = "comparison.json"
"""File with the run, the methods and the seeds of a comparison, from which ``--resume`` continues."""

EXAMPLES = """Examples:
  hotrain compare demo_vit --methods exact,hq8,hot --seeds 0,1,2
  hotrain compare --resume runs/compare-demo_vit"""


def compare(
    recipe: options.RecipeOrResume = None,
    methods: Annotated[
        str | None,
        typer.Option(
            "--methods",
            "-m",
            help="Comma-separated: exact,hq8,hot:rank=4.",
            show_default=False,
            autocompletion=completion.methods,
        ),
    ] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="Comma-separated: 0,1,2.")] = "0",
    data: options.DataOption = None,
    settings: options.SetOption = None,
    device: options.DeviceOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the records. Default: runs/compare-RECIPE.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Folder of a comparison: train what it lacks. Needs nothing else.")
    ] = None,
    log: options.LogOption = None,
    quiet: options.QuietOption = False,
    json: options.JsonOption = False,
) -> None:
    """Train with every method under every seed, and compare.

    With the same seed, methods start from the same weights and see the same images. Every finished run is recorded at
    once; the table and the report follow when all are done.
    """
    with working(f"{recipe or resume}: loading"):
        from hotrain import train as library
        from hotrain.cli.prepare import configure, labels

        finished = {}
        if resume is None:
            if methods is None:
                raise ValueError("--methods: none is given; name at least one, as in --methods exact,hq8")
            folder = out or Path("runs") / f"compare-{recipe}"
            chosen, numbers = options.split_names(methods, "--methods"), options.split_seeds(seeds)
            run = configure(recipe, data=data, settings=settings, device=device, out=folder, log=log)
        elif recipe is not None or methods is not None:
            raise ValueError("--resume: the comparison's folder says what is compared; leave out RECIPE and --methods")
        else:
            folder, (run, chosen, numbers) = resume, _from_plan(resume)
        wanted = {(label, seed) for label in labels(run, chosen) for seed in numbers}
        there = {cell: row for cell, row in library.finished_cells(run).items() if cell in wanted}
        if resume is not None:
            finished = there
        elif there:
            note(f"{len(there)} of these runs are in {folder} and are trained again; --resume trains what it lacks")
        if len(finished) < len(chosen) * len(numbers):
            library.build(library.with_preset(run, "exact"))  # are data and model available?
    cells, done = len(chosen) * len(numbers), len(finished)
    note(f"{run.name}: {len(chosen)} methods × {len(numbers)} seeds, {done} of {cells} runs recorded; into {folder}")

    def recorded(result: Result) -> None:
        nonlocal done
        done += 1
        _write_plan(folder, run, chosen, numbers)
        note(progress_line(result))

    from hotrain.cli.run_records import conditions, keep, progress_line, records_of

    try:
        outcome = library.compare(
            run,
            chosen,
            numbers,
            finished=finished,
            on_progress=library.silent if quiet or json else None,
            on_result=recorded,
        )
    except KeyboardInterrupt as stop:
        _write_plan(folder, run, chosen, numbers)
        command = shlex.join(["hotrain", "compare", "--resume", str(folder)])
        stop.args = (f"{done} of {cells} runs are recorded. Resume with: {command}",)
        raise
    for failure in outcome.failures:
        note(f"failed: {failure['model']} {failure['method']} seed {failure['seed']}: {failure['error']}")
    if json:
        summary = lines.summarize(records_of(outcome, {}).rows)
        options.print_json(
            {"rows": outcome.rows, "failures": outcome.failures, "summary": [asdict(line) for line in summary]}
        )
    if outcome.rows:  # there is no report of nothing
        meta = conditions([run], numbers) | {"title": f"{run.name}: {len(chosen)} methods compared"}
        records = records_of(outcome, meta)
        report = keep(records, folder)
        if not json:
            print_lines(records)
            typer.echo(f"wrote {folder / 'summary.json'}" + (f" and {report}" if report else ""))
    if outcome.failures:
        raise typer.Exit(1)


def _from_plan(folder: Path) -> tuple[TrainRun, list[str], list[int]]:
    """Read the plan of a comparison's folder; the runs continue in that folder, wherever it is now."""
    from hotrain.files import is_a, parse_json, read_text
    from hotrain.train import TrainRun, replace

    path = folder / PLAN
    if not path.is_file():
        raise ValueError(f"--resume: {path} is missing; give the folder of a comparison, as in runs/compare-RECIPE")
    try:
        plan = parse_json(read_text(path))
        run, methods, seeds = TrainRun.from_dict(plan["run"]), plan["methods"], plan["seeds"]
        for values, kind in ((methods, list[str]), (seeds, list[int])):
            if not is_a(values, kind):
                raise ValueError(f"accepted is {kind}, got {str(values)[:80]}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"--resume: {path} is not the plan of a comparison ({why})") from error
    return replace(run, out_dir=str(folder)), methods, seeds


def _write_plan(folder: Path, run: TrainRun, methods: list[str], seeds: list[int]) -> None:
    """Write the plan to the folder. Called after the first run, so that refused input leaves no folder."""
    from hotrain.files import write_text

    folder.mkdir(parents=True, exist_ok=True)
    plan = {"run": run.to_dict(), "methods": methods, "seeds": seeds}
    write_text(folder / PLAN, json_format.dumps(plan, indent=1) + "\n")
