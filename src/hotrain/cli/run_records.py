"""Records of training runs for the report, from the trainer's results."""

from __future__ import annotations

import importlib.util
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotrain.plotting.records import Records
    from hotrain.train import Comparison, Result, TrainRun

MEASURED = ("accuracy", "saved_bytes", "bit_ops", "step_ms")


def progress_line(result: Result) -> str:
    """Return one line about a finished run."""
    run = result.run
    accuracy = "no epoch finished" if result.accuracy is None else f"{result.accuracy:6.2f} %"
    return f"{run.model:<14} {run.method_label:<14} seed {run.seed}  {accuracy}  {result.seconds:5.1f} s"


def conditions(runs: Sequence[TrainRun], seeds: Sequence[int]) -> dict[str, Any]:
    """Return the conditions of a measurement, for ``summary.json`` and the foot of the report.

    It reads the data to count the test images.

    Raises:
        ValueError, RuntimeError: as `hotrain.train.load_data`.
    """
    from hotrain.presets import DEFAULT
    from hotrain.train.models import resolve_device
    from hotrain.train.record import environment

    def each(field: str) -> Any:
        values = {run.model: getattr(run, field) for run in runs}
        return values if len(set(values.values())) > 1 else next(iter(values.values()))

    length = "epochs" if runs[0].steps is None else "steps"
    return {
        **environment(resolve_device(runs[0].device)),
        "command": shlex.join(["hotrain", *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%d %H:%M %Z"),
        "seeds": list(seeds),
        length: each(length),
        "batch_size": each("batch_size"),
        "data": Path(runs[0].data).name,
        "test_images": {run.model: _test_images(run) for run in runs},
        "default": DEFAULT,
    }


def _test_images(run: TrainRun) -> int:
    from hotrain.train import load_data
    from hotrain.train.data import FolderData

    data = load_data(run.data, data_dir=run.data_dir, corrupt=run.corrupt)
    return len(data.test) if isinstance(data, FolderData) else len(data.y_test)


def records_of(outcomes: Sequence[Comparison], meta: dict[str, Any]) -> Records:
    """Make the records of comparisons.

    Args:
        outcomes: finished comparisons. A failed run becomes a row of ``None`` with its ``error``.
        meta: conditions; a description of every method that ran is added.

    Returns:
        Rows and curves. A row has ``layers`` (what ran in them) where its result does.
    """
    from hotrain.plotting.records import Records

    rows: list[dict[str, Any]] = []
    curves = []
    methods: dict[str, str] = {}
    for outcome in outcomes:
        ran = {_cell(result.run): getattr(result, "layers", None) for result in outcome.results}
        for row in outcome.rows:
            methods.setdefault(row["method"], _described(row["method"]))
            layers = ran.get((row["model"], row["method"], row["seed"]))
            rows.append({**row, "layers": layers} if layers else row)
        rows += [{**failure, **dict.fromkeys(MEASURED)} for failure in outcome.failures]
        for result in outcome.results:
            history = result.history
            curves.append(
                {
                    "model": result.run.model,
                    "method": result.run.method_label,
                    "seed": result.run.seed,
                    "epoch": [row["epoch"] for row in history],
                    "accuracy": [row["accuracy"] for row in history],
                    "loss": [row["train_loss"] for row in history],
                }
            )
    return Records(meta={**meta, "methods": methods}, rows=rows, curves=curves)


def _cell(run: TrainRun) -> tuple[str, str, int]:
    return run.model, run.method_label, run.seed


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


def keep(records: Records, folder: Path, **more: Any) -> Path | None:
    """Write the records and, if matplotlib and jinja2 are installed, the report.

    Args:
        records: the records.
        folder: where to write.
        **more: fields of the records to replace.

    Returns:
        Path of the report; None without one.
    """
    records = replace(records, **more)
    records.save(folder)
    if any(importlib.util.find_spec(package) is None for package in ("matplotlib", "jinja2")):
        return None
    from hotrain.plotting.report import write_report

    return write_report(folder)
