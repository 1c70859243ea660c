"""Records of training runs for the report, from the trainer's results."""

from __future__ import annotations

import importlib.util
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotrain.plotting.records import ROW_FIELDS, Records, curve

if TYPE_CHECKING:
    from hotrain.train import Comparison, Result, TrainRun

MEASURED = ROW_FIELDS[3:]


def progress_line(result: Result) -> str:
    """Return one line about a finished run."""
    run = result.run
    accuracy = "no epoch finished" if result.accuracy is None else f"{result.accuracy:6.2f} %"
    return f"{run.model:<14} {run.method_label:<14} seed {run.seed}  {accuracy}  {result.seconds:5.1f} s"


def conditions(runs: Sequence[TrainRun], seeds: Sequence[int]) -> dict[str, Any]:
    """Return the conditions of a measurement, for ``summary.json`` and the foot of the report."""
    from hotrain.train.models import resolve_device
    from hotrain.train.record import environment

    return {
        **environment(resolve_device(runs[0].device)),
        **_settings({run.model: run for run in runs}),
        "started": time.strftime("%Y-%m-%d %H:%M %Z"),
        "seeds": list(seeds),
    }


def _settings(runs: Mapping[str, TrainRun]) -> dict[str, Any]:
    """What the runs of a report were told, each value by model, or once where all have it; reads the data."""
    from hotrain.presets import DEFAULT

    values: dict[str, dict[str, Any]] = {
        "epochs": {name: run.epochs for name, run in runs.items() if run.steps is None},
        "steps": {name: run.steps for name, run in runs.items() if run.steps is not None},
        "batch_size": {name: run.batch_size for name, run in runs.items()},
        "data": {name: Path(run.data).name for name, run in runs.items()},
    }
    alike = {key: len(of) == len(runs) and len(set(of.values())) == 1 for key, of in values.items()}
    told = {key: next(iter(of.values())) if alike[key] else of for key, of in values.items() if of}
    counts = {name: _test_images(run) for name, run in runs.items()}
    return {
        "command": shlex.join(["hotrain", *sys.argv[1:]]),
        **told,
        "test_images": {name: count for name, count in counts.items() if count is not None},
        "default": DEFAULT,
    }


def _test_images(run: TrainRun) -> int | None:
    """The number of test images; None where the data are not here."""
    from hotrain.train import load_data

    try:
        return load_data(run.data, data_dir=run.data_dir).test_size
    except (ValueError, RuntimeError, OSError):
        return None


def records_of(outcome: Comparison, meta: dict[str, Any]) -> Records:
    """Make the records of a comparison.

    A failed run becomes a row of ``None`` with its ``error``; to the conditions ``meta`` a description of every method
    that ran is added.
    """
    curves = [
        curve(result.history, model=result.run.model, method=result.run.method_label, seed=result.run.seed)
        for result in outcome.results
    ]
    methods = {row["method"]: _described(row["method"]) for row in outcome.rows}
    failed = [{**failure, **dict.fromkeys(MEASURED)} for failure in outcome.failures]
    return Records(meta={**meta, "methods": methods}, rows=[*outcome.rows, *failed], curves=curves)


def gathered(folders: Sequence[Path]) -> Records:
    """Put the finished runs of several folders into the records of one report.

    Runs that differ in more than method and seed are separate models there, named by what differs. Of runs that
    differ in nothing the last one counts.

    Args:
        folders: of runs (with ``runs.jsonl``), of one run (beside it), or of a demo.

    Raises:
        ValueError: a folder without a finished run.
    """
    from hotrain.train import TrainRun

    found = [row for folder in folders for row in _finished(folder)]
    runs = [TrainRun.from_dict(row["config"]) for row in found]
    names = _names(runs)
    keys = [(name, run.method_label, run.seed) for name, run in zip(names, runs, strict=True)]
    rows, curves = [], []
    for cell, row in dict(zip(keys, found, strict=True)).items():
        key = dict(zip(("model", "method", "seed"), cell, strict=True))
        ran = {"layers": row["layers"]} if row.get("layers") else {}
        rows.append({**key, **{field: row[field] for field in MEASURED}, **ran})
        curves.append(curve(row["history"], **key))
    meta = {
        **_settings(dict(zip(names, runs, strict=True))),
        "title": f"{len(rows)} runs compared",
        "device": "; ".join(dict.fromkeys(row["device"] for row in found)),
        "commit": "; ".join(dict.fromkeys(str(row["commit"]) for row in found)),
        "seeds": sorted({run.seed for run in runs}),
        "methods": {run.method_label: _described(run.method_label) for run in runs},
    }
    return Records(meta=meta, rows=rows, curves=curves)


def _finished(folder: Path) -> list[dict[str, Any]]:
    """The records of the finished runs of a folder; of one run, if the folder is a run's."""
    from hotrain.train import record

    own = (folder / record.RUNS, folder / "runs" / record.RUNS)  # the second is a demo's
    rows = next((record.read(path) for path in own if path.is_file()), None)
    if rows is None:
        name = folder.absolute().name
        rows = [row for row in record.read(folder.absolute().parent / record.RUNS) if row.get("run_id") == name]
    done = [row for row in rows if row.get("record") == record.VERSION and row.get("status") == "finished"]
    if not done:
        states = ", ".join(dict.fromkeys(str(row.get("status")) for row in rows)) or "none is recorded"
        raise ValueError(f"{folder}: no finished run ({states}); give a folder of `hotrain train`, `compare` or `demo`")
    return done


def _names(runs: Sequence[TrainRun]) -> list[str]:
    """The model of each run; with the fields that tell it from other runs of that model, beside method and seed."""
    from hotrain.train import checkpoint, replace, with_preset

    others = [replace(with_preset(run, "exact"), seed=0) for run in runs]
    first: dict[str, TrainRun] = {}
    fields: dict[str, set[str]] = {}
    for run in others:
        different = checkpoint.differences(first.setdefault(run.model, run), run)
        fields.setdefault(run.model, set()).update(different)
    return [
        ", ".join([run.model, *(f"{field}={run.to_dict()[field]}" for field in sorted(fields[run.model]))])
        for run in others
    ]


def _described(label: str) -> str:
    """Return the first paragraph on the method's preset, and its overrides."""
    from hotrain.presets import describe, presets
    from hotrain.train import parse_method

    name, overrides = parse_method(label)
    if name not in presets():
        return "A method of the user's own."
    text = " ".join(describe(name).split("\n\n")[0].split()).replace("``", "`")
    changed = ", ".join(f"{field}={value}" for field, value in overrides.items())
    return f"{text} Here with {changed}." if changed else text


def keep(records: Records, folder: Path) -> Path | None:
    """Write the records and, if matplotlib and jinja2 are installed, the report; its path, or None."""
    records.save(folder)
    if any(importlib.util.find_spec(package) is None for package in ("matplotlib", "jinja2")):
        return None
    from hotrain.plotting.report import write_report

    return write_report(folder)
