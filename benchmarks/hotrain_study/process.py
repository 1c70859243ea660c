"""One cell of a study in a process of its own: ``python -m hotrain_study.process FOLDER``, started by `hotrain study`.

The folder holds ``job.json`` and gets ``row.json``, the cell's record, when the cell is done. A run's checkpoints are
below it, and a run that finds one continues it. The process ends, with a checkpoint, when its standard input closes:
that is when the study has ended, for any reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hotrain.files import write_text

JOB, ROW, RUNS, WEIGHTS = "job.json", "row.json", "runs", "weights.pt"
STOPPED = 143  # exit status of a cell that was stopped with SIGTERM and has a checkpoint


def main() -> None:
    """Run the cell of the folder that is named."""
    folder = Path(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = json.loads((folder / JOB).read_text(encoding="utf-8"))
    row = run_cell(job, folder)
    if row is None:
        raise SystemExit(STOPPED)
    if row["status"] == "failed" and job["cell"]["run"]["compile"]:
        # What does not compile, or not as a CUDA graph, runs in eager mode: slower, the same numbers. A process anew,
        # because a graph that failed while it was captured leaves the device unusable.
        print(f"{row['error']}; again without torch.compile", file=sys.stderr, flush=True)
        job["cell"]["run"]["compile"] = False
        (folder / JOB).write_text(json.dumps(job), encoding="utf-8")
        os.execv(sys.executable, [sys.executable, "-m", "hotrain_study.process", str(folder)])
    write_text(folder / ROW, json.dumps(row, allow_nan=False, default=str))


def _end_with_parent() -> None:
    with contextlib.suppress(OSError):
        os.read(0, 1)  # not through sys.stdin, whose lock a daemon thread would hold when Python ends
    os.kill(os.getpid(), signal.SIGTERM)


def job_of(cell: Any, run: Any, common: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of ``job.json``.

    Args:
        cell: a `hotrain_study.cells.Cell`.
        run: its run as it is trained here: with its data, device and folder.
        common: what every row of this study gets, such as the command.
    """
    told = {**asdict(cell), "run": run.to_dict(), "options": dict(cell.options)}
    return {"cell": told, "names": cell.names(), "planned": cell.run.to_dict(), "common": common}


def run_cell(job: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Train or measure; None where a signal stopped it.

    Returns:
        The row: what the cell is, a status, what was measured, what it ran on. It names no folder of this machine.
    """
    from hotrain.train import Diverged, Interrupted, TrainRun
    from hotrain.train.dense import METRICS
    from hotrain.train.models import resolve_device
    from hotrain.train.record import environment

    run = TrainRun.from_dict(job["cell"]["run"])
    told = {
        **job["names"],
        "options": job["cell"]["options"],
        "model": run.model,
        "compiled": run.compile,
        "metric": METRICS.get(run.task, "accuracy"),
        "config": without_places(job["planned"]),
        **environment(resolve_device(run.device)),
        **job["common"],
    }
    try:
        found = _train(run, folder) if job["cell"]["kind"] == "train" else _measure(run, job["cell"])
    except Interrupted:
        return None
    except Diverged as error:
        found = {"status": "diverged", "error": str(error).split("; ")[0]} | _history(folder)
    except Exception as error:
        import traceback

        traceback.print_exc()
        found = {"status": "failed", "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        found["error"] = found["error"].replace(str(folder), "…")
    return told | {"accuracy": None, "error": None} | found


def without_places(run: dict[str, Any]) -> dict[str, Any]:
    """The configuration without folders of this machine."""
    return {
        **run,
        "data": Path(run["data"]).stem,
        "out_dir": "runs",
        "data_dir": "data",
        "device": "auto",
        "init": None,
    }


def _train(run: Any, folder: Path) -> dict[str, Any]:
    from hotrain.train import silent, train

    images: dict[str, int] = {}

    def seen(setup: Any) -> None:
        images["train_images"] = setup.data.train_size
        images["test_images"] = sum(len(x) for x, _ in setup.feed.test_batches())

    kept = sorted((folder / RUNS).glob("*/checkpoint.pt"), key=lambda path: path.stat().st_mtime)
    try:
        result = train(run, resume=kept[-1] if kept else None, on_progress=silent, on_start=seen)
    except ValueError as error:
        if not kept or not str(error).startswith("resume: "):
            raise
        print(f"{error}; starting anew", file=sys.stderr)
        result = train(run, on_progress=silent, on_start=seen)
    names = ("accuracy", "best_accuracy", "saved_bytes", "bit_ops", "step_ms", "peak_bytes", "layers", "seconds")
    found = {name: getattr(result, name) for name in names}
    os.replace(result.checkpoint_path, folder / WEIGHTS)
    return {"status": "finished", **found, **images, "updates": result.history[-1]["update"], "history": result.history}


def _history(folder: Path) -> dict[str, Any]:
    """What a run that diverged had reached before."""
    from hotrain.train import record

    files = sorted((folder / RUNS).glob(f"*/{record.METRICS}"))
    return {"history": record.read(files[-1]) if files else []}


def _measure(run: Any, cell: dict[str, Any]) -> dict[str, Any]:
    from hotrain_study import measures

    return {"status": "finished", "figures": getattr(measures, cell["kind"])(run, **cell["options"])}


if __name__ == "__main__":
    main()
