"""``hotrain study``: run the cells of a study that its records lack, several at a time, for a limited time."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotrain.cli.errors import note
from hotrain.cli.options import DeviceOption, JsonOption, SetOption, print_json, split_names, split_seeds
from hotrain.cli.terminal import working
from hotrain_study.process import JOB, ROW, RUNS, WEIGHTS, job_of, without_places

if TYPE_CHECKING:
    from hotrain_study.cells import Cell, Study

TOOLS = Path(__file__).parents[1]
"""Where Python finds this package."""
GRACE = 25.0
"""Seconds from the signal to stop until a cell is killed: an update and a checkpoint."""

EXAMPLES = """Examples:
  hotrain study
  hotrain study pretraining --data data --minutes 9 --at-once 4 --records FILE.jsonl
  hotrain study demo_vit --methods exact,hq8 --seeds 0,1"""


def study(
    name: Annotated[str | None, typer.Argument(help="A study, or a recipe with --methods.", show_default=False)] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            "--records", "-r", help="JSONL file, read with those beside it. Default: runs/study-NAME/records.jsonl."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", "-d", help="Folder with the data sets: NAME.npz, or a folder NAME.")
    ] = None,
    minutes: Annotated[float | None, typer.Option("--minutes", min=0, help="Stop, with checkpoints, by then.")] = None,
    at_once: Annotated[int, typer.Option("--at-once", "-j", min=1, help="Cells at a time on one device.")] = 1,
    cells: Annotated[
        str | None, typer.Option("--cells", help="Only cells whose name has one of these: ViT,ResNet*-s0.")
    ] = None,
    methods: Annotated[str | None, typer.Option("--methods", "-m", help="Of a recipe: exact,hq8,hot:rank=4.")] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="Of a recipe: 0,1,2.")] = "0",
    settings: SetOption = None,
    device: DeviceOption = None,
    work: Annotated[Path | None, typer.Option("--work", help="Checkpoints and logs. Default: runs/study-NAME.")] = None,
    last: Annotated[
        bool, typer.Option("--last", help="Start only what should end in time: its checkpoints will be lost.")
    ] = False,
    commit: Annotated[str | None, typer.Option("--commit", help="Of the tree, where git does not say.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Run nothing: list the cells and what is missing.")] = False,
    json: JsonOption = False,
) -> None:
    """Run what a study's records lack, by priority. The same command continues it, on any machine with the records."""
    with working(f"{name or 'studies'}: loading"):
        from hotrain_study import cells as library
        from hotrain_study import studies as known
    if name is None:
        if json:
            print_json({key: {"cells": len(each.cells), "title": each.title} for key, each in known.studies().items()})
            return
        for each in known.studies().values():
            typer.echo(f"{each.name:<14}{len(each.cells):>4} cells  {each.title}")
        return
    if (name in known.studies()) == (methods is not None):
        raise ValueError(
            f"--methods: study {name} names its own; use --cells to choose"
            if methods
            else f"{name!r} is no study ({', '.join(known.studies())}); to compare methods on a recipe give --methods"
        )
    chosen = _of_recipe(name, methods, seeds) if methods else known.studies()[name]
    chosen = _with_settings(chosen, settings or [], cells)
    work = work or Path("runs") / f"study-{name}"
    records = records or work / "records.jsonl"
    if show:
        _print(chosen, library.read_rows(library.beside(records)), json, listed=True)
        return
    # Ready for all before the first starts: a data set that is missing is said at once.
    located = {cell.id: library.located(cell.run, data) for cell in chosen.cells}
    common: dict[str, Any] = {
        "command": shlex.join(["hotrain", "study", *_said(name, methods, seeds, settings, cells, at_once)])
    }
    common |= {"at_once": at_once, **({"commit": commit} if commit else {})}
    busy = f"{records}: another study is writing it; wait for it, or give another --records"
    with library.record.held(records.with_suffix(".lock"), busy):
        running = _Running(chosen, records, work, at_once, common, lambda cell: located[cell.id], device, last)
        deadline = None if minutes is None else time.monotonic() + 60 * minutes - GRACE
        try:
            running.all(deadline)
        except KeyboardInterrupt as stop:
            stop.args = (f"stopped; {records} has what is finished. The same command continues",)
            raise
    rows = library.read_rows(library.beside(records))
    _print(chosen, rows, json)
    if any(row["status"] == library.FAILED for row in chosen.last(rows).values()):
        raise typer.Exit(1)


def _of_recipe(name: str, methods: str | None, seeds: str) -> Study:
    from hotrain.cli.prepare import configure
    from hotrain_study import cells as library

    run = configure(name)
    chosen = split_names(methods or "", "--methods")
    return library.Study(name, run.name, tuple(library.grid(name, run.name, run, chosen, split_seeds(seeds))))


def _with_settings(study: Study, settings: Sequence[str], pattern: str | None) -> Study:
    from hotrain.train import with_settings

    found = tuple(replace(cell, run=with_settings(cell.run, settings)) for cell in study.cells)
    if pattern is not None:
        parts = split_names(pattern, "--cells")
        named = [cell for cell in found if any(p in cell.id or fnmatch.fnmatch(cell.id, p) for p in parts)]
        wanted = {name for cell in named for name in (cell.id, cell.needs)}
        found = tuple(cell for cell in found if cell.id in wanted)
        if not found:
            some = ", ".join(cell.id for cell in study.cells[:3])
            raise ValueError(f"--cells: no cell of {study.name} matches {pattern!r}; cells are {some}, …")
    return replace(study, cells=found)


def _said(
    name: str, methods: str | None, seeds: str, settings: list[str] | None, cells: str | None, at_once: int
) -> list[str]:
    """The command line, without folders of this machine."""
    words = [name] + (["--methods", methods, "--seeds", seeds] if methods else [])
    words += ["--cells", cells] if cells else []
    words += [word for setting in settings or [] for word in ("--set", setting)]
    return [*words, "--at-once", str(at_once)]


@dataclass
class _Process:
    cell: Cell
    process: subprocess.Popen[bytes]
    device: int
    folder: Path
    began: float


@dataclass
class _Running:
    """Starts, watches and stops the processes of cells; the only writer of the records.

    Args:
        study: what to run.
        records: the file, whose lock is held.
        work: folder of the cells' folders.
        at_once: cells on one device.
        common: fields of every row.
        run_of: the run of a cell with its data.
        device: of the command line; None: a GPU where there is one.
        last: leave out what is not expected to end in time.
        running: the processes.
    """

    study: Study
    records: Path
    work: Path
    at_once: int
    common: dict[str, Any]
    run_of: Callable[[Cell], Any]
    device: str | None
    last: bool
    running: list[_Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        import torch

        asked = self.device in (None, "auto", "cuda")
        self.gpus = torch.cuda.device_count() if asked and torch.cuda.is_available() else 0
        self.device = self.device or ("cuda" if self.gpus else "cpu")
        self.load = [0] * max(1, self.gpus)

    def all(self, deadline: float | None) -> None:
        """Run what is missing, until it is done or the deadline is reached."""
        for folder in self.work.glob("*/"):
            self._collect(folder)  # finished while nobody waited for it
        waiting = self._with_needed(self.study.missing(self._rows()))
        note(f"{self.study.name}: {len(waiting)} of {len(self.study.cells)} cells to run; into {self.records}")
        try:
            while waiting or self.running:
                if deadline is not None and time.monotonic() >= deadline:
                    break
                self._end_finished()
                while (cell := self._next(waiting)) is not None:
                    waiting.remove(cell)
                    if self._may_start(cell, deadline):
                        self._start(cell)
                if waiting and not self.running:
                    needs = ", ".join(sorted({str(cell.needs) for cell in waiting}))
                    note(f"{len(waiting)} cells are not run: they start from weights of {needs}, which has none")
                    break
                time.sleep(0.1)
        finally:
            self._stop()
        left = len(self.study.missing(self._rows()))
        note(f"{self.study.name}: {left} of {len(self.study.cells)} cells are missing")

    def _rows(self) -> list[dict[str, Any]]:
        from hotrain_study.cells import beside, read_rows

        return read_rows(beside(self.records))

    def _with_needed(self, cells: list[Cell]) -> list[Cell]:
        """The cells, and before them those done elsewhere whose weights they start from and are not here."""
        names = {cell.id for cell in cells}
        needed = {cell.needs for cell in cells if cell.needs and not self._weights(cell.needs).is_file()} - names
        return [cell for cell in self.study.cells if cell.id in needed] + cells

    def _weights(self, name: str) -> Path:
        return self.work / "weights" / f"{name}.pt"

    def _next(self, waiting: list[Cell]) -> Cell | None:
        """The first cell whose weights are there; None where there is no room for it, or none is ready."""
        ready = (cell for cell in waiting if cell.needs is None or self._weights(cell.needs).is_file())
        cell = next(ready, None)
        return cell if cell is not None and self._has_room(cell) else None

    def _has_room(self, cell: Cell) -> bool:
        if any(other.cell.alone for other in self.running) or (cell.alone and self.running):
            return False
        return min(self.load) < self.at_once

    def _may_start(self, cell: Cell, deadline: float | None) -> bool:
        if deadline is None or not self.last:
            return True
        known = self._expected_seconds(cell)
        if known is None or time.monotonic() + known <= deadline:
            return True
        note(f"{cell.id}: about {known:.0f} s, more than are left; not started")
        return False

    def _expected_seconds(self, cell: Cell) -> float | None:
        """Time of a cell by the rows of its group, its own method first; None where none is recorded."""
        rows = [r for r in self._rows() if (r["group"], r["kind"]) == (cell.group, cell.kind) and r.get("seconds")]
        rows = [row for row in rows if row["method"] == cell.method] or rows
        times = [row["seconds"] * (1 if cell.alone else self.at_once / row.get("at_once", 1)) for row in rows]
        return max(times, default=None)

    def _start(self, cell: Cell) -> None:
        from hotrain.train import replace as changed

        number = self.load.index(min(self.load))
        folder = self.work / cell.id
        folder.mkdir(parents=True, exist_ok=True)
        run = changed(self.run_of(cell), device=self.device, out_dir=str(folder / RUNS))
        if cell.needs is not None:
            run = changed(run, init=str(self._weights(cell.needs)))
        if self.device == "cpu":
            run = changed(run, compile=False)
        (folder / JOB).write_text(json.dumps(job_of(cell, run, self.common)), encoding="utf-8")
        path = os.pathsep.join(filter(None, [str(TOOLS), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        if self.gpus:
            devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self.gpus)))).split(",")
            threads = max(1, (os.cpu_count() or 1) // (self.at_once * self.gpus))
            environment |= {"CUDA_VISIBLE_DEVICES": devices[number], "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
        command = [sys.executable, "-m", "hotrain_study.process", str(folder)]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.load[number] += 1
        self.running.append(_Process(cell, process, number, folder, time.monotonic()))

    def _end_finished(self) -> None:
        for each in list(self.running):
            if each.process.poll() is not None:
                self._ended(each)

    def _ended(self, each: _Process, stopped: bool = False) -> None:
        self.running.remove(each)
        self.load[each.device] -= 1
        if each.process.stdin is not None:
            with contextlib.suppress(OSError):
                each.process.stdin.close()
        if self._collect(each.folder):
            return
        if stopped:
            note(f"{each.cell.id}: stopped{_reached(each.folder)}")
            return
        # The process ended without a row: it was killed, or could not start.
        tail = (each.folder / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        why = f"the process ended with status {each.process.returncode}" + "".join(f": {line[:200]}" for line in tail)
        row = {**each.cell.names(), "options": dict(each.cell.options), "status": "failed", "error": why}
        self._write({**row, "accuracy": None, "config": without_places(each.cell.run.to_dict()), **self.common})

    def _collect(self, folder: Path) -> bool:
        """Move the row of a finished cell to the records; its folder stays only where it failed."""
        if not (folder / ROW).is_file():
            return False
        from hotrain_study.cells import FAILED

        row = json.loads((folder / ROW).read_text(encoding="utf-8"))
        self._write(row)
        if row["status"] == FAILED:
            (folder / ROW).unlink()
        else:
            if folder.name in {cell.needs for cell in self.study.cells} and (folder / WEIGHTS).is_file():
                self._weights(folder.name).parent.mkdir(exist_ok=True)
                os.replace(folder / WEIGHTS, self._weights(folder.name))
            shutil.rmtree(folder)
        return True

    def _write(self, row: dict[str, Any]) -> None:
        from hotrain.train import record

        if self.common["at_once"] > 1 and row.get("kind") == "train":
            row = {**row, "step_ms": None, "peak_bytes": row.get("peak_bytes")}  # others ran on the same device
        record.append(self.records, record.signed({"record": record.VERSION, **row}))
        result = row["error"] or ("" if row["accuracy"] is None else f"{row['accuracy']:.2f} %")
        seconds = f"  {row['seconds']:.0f} s" if row.get("seconds") else ""
        note(f"{row['group']}  {row['method']}  seed {row['seed']}  {row['status']}  {result}{seconds}")

    def _stop(self) -> None:
        """Ask what runs to write a checkpoint and end; kill what has not after `GRACE`."""
        self._end_finished()
        for each in self.running:
            each.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + GRACE
        for each in list(self.running):
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.process.wait(max(0.0, end - time.monotonic()))
            if each.process.poll() is None:
                os.killpg(each.process.pid, signal.SIGKILL)  # its own session: compiler processes too
                each.process.wait()
            self._ended(each, stopped=True)


def _reached(folder: Path) -> str:
    """After which evaluation, by the metrics of the run; empty before the first."""
    from hotrain.train import record

    rows = [row for path in folder.glob(f"{RUNS}/*/{record.METRICS}") for row in record.read(path)]
    kept = any(folder.glob(f"{RUNS}/*/checkpoint.pt"))
    epoch = f" after epoch {rows[-1]['epoch']}" if rows else ""
    return epoch + (", with a checkpoint" if kept else ", without a checkpoint")


def _print(study: Study, rows: list[dict[str, Any]], json: bool, listed: bool = False) -> None:
    """Print the table of all cells, or with ``listed`` one line for each that is missing."""
    from hotrain.tables import table
    from hotrain_study import cells as library
    from hotrain_study.tables import tables

    if json:
        print_json({"rows": list(study.last(rows).values()), "missing": [cell.id for cell in study.missing(rows)]})
        return
    for each in tables(study, rows):
        plain = [[cell.strip("`") for cell in line] for line in each.rows]
        typer.echo(f"{study.title}: {each.title}\n{table(each.headers, plain)}\n{each.note}\n")
    if listed:
        typer.echo("\n".join(["missing, by priority:", *(f"  {cell.id}" for cell in study.missing(rows))]))
    for row in study.last(rows).values():
        if row["status"] != library.FINISHED:
            typer.echo(f"{row['status']}: {row['group']} {row['method']} seed {row['seed']}: {row['error']}")
