"""From what the trainer returns to the records that figures are drawn from."""

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
    """One line for a finished cell."""
    run = result.run
    accuracy = "no epoch finished" if result.accuracy is None else f"{result.accuracy:6.2f} %"
    return f"{run.model:<14} {run.method_label:<14} seed {run.seed}  {accuracy}  {result.seconds:5.1f} s"


def conditions(runs: Sequence[TrainRun], seeds: Sequence[int]) -> dict[str, Any]:
    """What a measurement was made under, for ``summary.json`` and the foot of the report."""
    from hotrain.train.models import resolve_device
    from hotrain.train.record import conditions as of_device

    def each(field: str) -> Any:
        values = {run.model: getattr(run, field) for run in runs}
        return values if len(set(values.values())) > 1 else next(iter(values.values()))

    length = "epochs" if runs[0].steps is None else "steps"
    return {
        **of_device(resolve_device(runs[0].device)),
        "command": shlex.join(["hotrain", *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%d %H:%M %Z"),
        "seeds": list(seeds),
        length: each(length),
        "batch_size": each("batch_size"),
        "data": Path(runs[0].data).name,
    }


def records_of(outcomes: Sequence[Comparison], meta: dict[str, Any]) -> Records:
    """Rows and curves of finished cells; a failed cell is a row of ``None`` with its ``error``."""
    from hotrain.plotting.records import Records

    rows: list[dict[str, Any]] = []
    curves = []
    for outcome in outcomes:
        rows += outcome.rows
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
    return Records(meta=meta, rows=rows, curves=curves)


def keep(records: Records, folder: Path, **more: Any) -> Path | None:
    """Write the records (with ``more`` fields replaced) and, where matplotlib and jinja2 are, the report."""
    records = replace(records, **more)
    records.save(folder)
    if any(importlib.util.find_spec(package) is None for package in ("matplotlib", "jinja2")):
        return None
    from hotrain.plotting.report import write_report

    return write_report(folder)
