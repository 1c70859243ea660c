"""``hotrain compare``: several methods under the same seeds, one table, one report."""

from __future__ import annotations

import json as json_format
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotrain.cli.errors import interrupted, note
from hotrain.cli.options import (
    DataOption,
    DeviceOption,
    JsonOption,
    QuietOption,
    RecipeOrResume,
    SetOption,
    print_json,
    split_names,
    split_seeds,
)
from hotrain.cli.terminal import print_lines, working

if TYPE_CHECKING:
    from hotrain.plotting.records import Records
    from hotrain.train import Comparison, Result, TrainRun

PLAN = "comparison.json"
"""What is compared: the run, the methods, the seeds. Written first, so that ``--resume`` needs nothing else."""

EXAMPLES = """Examples:
  hotrain compare demo_vit --methods exact,hq8,hot --seeds 0,1,2
  hotrain compare --resume runs/compare-demo_vit"""


def compare(
    recipe: RecipeOrResume = None,
    methods: Annotated[
        str | None, typer.Option("--methods", "-m", help="Comma-separated: exact,hq8,hot:rank=4.", show_default=False)
    ] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="Comma-separated: 0,1,2.")] = "0",
    data: DataOption = None,
    settings: SetOption = None,
    device: DeviceOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the records. Default: runs/compare-RECIPE.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Folder of a comparison: train what it lacks. Needs nothing else.")
    ] = None,
    quiet: QuietOption = False,
    json: JsonOption = False,
) -> None:
    """Train with every method under every seed, and compare.

    Methods start from the same weights and see the same images within a seed. Every run that ends is recorded at once;
    the table and the report follow when all are done.
    """
    with working(f"{recipe or resume}: loading"):
        from hotrain import train as library
        from hotrain.cli.workbench import labels

        if resume is not None:
            if recipe is not None or methods is not None:
                raise ValueError("--resume: the comparison's folder says what is compared; leave out RECIPE, --methods")
            folder, (run, chosen, numbers) = resume, _planned(resume)
        else:
            folder = out or Path("runs") / f"compare-{recipe}"
            run, chosen, numbers = _asked(recipe, methods, seeds, data, settings, device, folder)
        done, curves = _recorded(folder) if resume is not None else (library.Comparison(), [])
        library.build(library.replace(run, method="exact", method_overrides={}))  # data, model: before the first cell
        if resume is None:
            folder.mkdir(parents=True, exist_ok=True)
            plan = {"run": run.to_dict(), "methods": chosen, "seeds": numbers}
            (folder / PLAN).write_text(json_format.dumps(plan, indent=1) + "\n", encoding="utf-8")
    before = len(done.rows)
    cells = len(chosen) * len(numbers)
    note(f"{run.name}: {len(chosen)} methods × {len(numbers)} seeds, {before} of {cells} recorded; into {folder}")

    def records() -> Records:
        from hotrain.cli.outcome import conditions, records_of

        meta = conditions([run], numbers) | {"title": f"{run.name}: {len(chosen)} methods compared"}
        found = records_of([done], meta)
        return replace(found, curves=curves + found.curves)

    def keep_result(result: Result) -> None:
        from hotrain.cli.outcome import MEASURED, progress_line

        row = {"model": result.run.model, "method": result.run.method_label, "seed": result.run.seed}
        done.rows.append(row | {name: getattr(result, name) for name in MEASURED})
        done.results.append(replace(result, model=None))
        records().save(folder)
        note(progress_line(result))

    finished = {(row["method"], row["seed"]): row for row in done.rows}
    options: dict[str, Any] = {"finished": finished} if finished else {}
    try:
        outcome = library.compare(
            run,
            chosen,
            numbers,
            on_progress=library.silent if quiet or json else None,
            on_result=keep_result,
            **options,
        )
    except KeyboardInterrupt as stop:
        command = shlex.join(["hotrain", "compare", "--resume", str(folder)])
        told = f"interrupted; {len(done.rows)} of {cells} runs are recorded. Go on with: {command}"
        raise interrupted(stop, told) from stop
    done.failures = outcome.failures
    order = labels(run, chosen)
    done.rows.sort(key=lambda row: (numbers.index(row["seed"]), order.index(row["method"])))
    if json:
        print_json({"rows": done.rows, "failures": done.failures, "summary": done.summary()})
    for failure in done.failures:
        note(f"failed: {failure['model']} {failure['method']} seed {failure['seed']}: {failure['error']}")
    if done.rows:
        _show(records(), folder, json)
    if done.failures:
        raise typer.Exit(1)


def _asked(
    recipe: str | None,
    methods: str | None,
    seeds: str,
    data: str | None,
    settings: list[str] | None,
    device: str | None,
    folder: Path,
) -> tuple[TrainRun, list[str], list[int]]:
    from hotrain.cli.workbench import configure, labels

    if methods is None:
        raise ValueError("--methods: none is given; name at least one, as in --methods exact,hq8")
    chosen, numbers = split_names(methods, "--methods"), split_seeds(seeds)
    run = configure(recipe, data=data, settings=settings, device=device, out=folder)
    labels(run, chosen)  # a bad one is refused before anything is built
    return run, chosen, numbers


def _planned(folder: Path) -> tuple[TrainRun, list[str], list[int]]:
    """What a comparison's folder says is compared; the runs go on into that folder, wherever it is now.

    Raises ``ValueError`` for a folder of something else.
    """
    from hotrain.train import TrainRun, replace

    path = folder / PLAN
    if not path.is_file():
        raise ValueError(f"--resume: {path} is missing; give the folder of a comparison, as in runs/compare-RECIPE")
    try:
        plan = json_format.loads(path.read_text(encoding="utf-8"))
        run, methods, seeds = TrainRun.from_dict(plan["run"]), list(plan["methods"]), list(plan["seeds"])
    except (json_format.JSONDecodeError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"--resume: {path} is not the plan of a comparison ({why})") from error
    return replace(run, out_dir=str(folder)), methods, seeds


def _recorded(folder: Path) -> tuple[Comparison, list[dict[str, Any]]]:
    """The finished cells of a folder, rows and curves; what failed is tried again."""
    from hotrain.plotting.records import SUMMARY, load_records
    from hotrain.train import Comparison

    if not (folder / SUMMARY).is_file():
        return Comparison(), []
    records = load_records(folder)
    rows = [row for row in records.rows if row["accuracy"] is not None]
    return Comparison(rows=rows), records.curves


def _show(records: Records, folder: Path, json: bool) -> None:
    from hotrain.cli.outcome import keep

    report = keep(records, folder)
    if not json:
        print_lines(records)
        typer.echo(f"wrote {folder / 'summary.json'}" + (f" and {report}" if report else ""))
