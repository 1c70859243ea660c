"""Studies: many cells (a run of one method and seed, or one measurement), their records in one file, what is missing.

A study is data: a list of cells in the order of their priority. A cell is done when the records have a row of it with
the same settings, of this study or of another; so the records alone say where a study continues, on any machine. A run
that diverged is a result.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotrain.train import checkpoint, record
from hotrain.train.run import TrainRun, replace, with_preset
from hotrain_study import texts

CONTROL = "exact"
FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
RESULTS = (FINISHED, DIVERGED)
"""What a row may say of a cell that is done. One that failed is shown, and is run again."""


@dataclass(frozen=True)
class Cell:
    """One run, or one measurement, of a study.

    Args:
        study: name of the study.
        group: what is compared within, such as ``ResNet-18, CIFAR-10``: one exact run a seed, and one table.
        method: the label in tables; a plan other than the run's may follow ``@``.
        run: what is trained, complete; its ``data`` is a name that :func:`located` looks up.
        kind: ``train``, or the name of a measurement.
        alone: nothing else may run beside it, because it measures times.
        options: of a measurement, JSON values.
        needs: id of the cell whose weights this one starts from (`TrainRun.init`).
    """

    study: str
    group: str
    method: str
    run: TrainRun
    kind: str = "train"
    alone: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str | None = None

    @property
    def id(self) -> str:
        """A name for files: group, method, kind and seed."""
        kind = "" if self.kind == "train" else f"-{self.kind}"
        text = f"{self.group}-{self.method}{kind}-s{self.run.seed}"
        return re.sub(r"[^A-Za-z0-9.@_=-]+", "-", text).strip("-")

    def is_of(self, row: Mapping[str, Any]) -> bool:
        """Whether ``row`` is a record of this cell, or of another study's with the same settings."""
        same = all(row.get(name) == value for name, value in self.names().items() if name != "study")
        if not same or row.get("options", {}) != dict(self.options):
            return False
        try:
            then = TrainRun.from_dict(row["config"])
        except (KeyError, ValueError):  # of a version whose runs had other fields
            return False
        return not checkpoint.differences(self.run, replace(then, data=self.run.data))

    def names(self) -> dict[str, Any]:
        """The fields of a row that say which cell it is of."""
        return {
            "study": self.study,
            "group": self.group,
            "kind": self.kind,
            "method": self.method,
            "seed": self.run.seed,
            "data": Path(self.run.data).stem,
        }


@dataclass(frozen=True)
class Study:
    """A question, and the cells that answer it.

    Args:
        name: of the command.
        title: of its tables.
        cells: in the order of their priority.

    Raises:
        ValueError: two cells of one id.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]

    def __post_init__(self) -> None:
        ids = [cell.id for cell in self.cells]
        if len(set(ids)) < len(ids):
            twice = next(name for name in ids if ids.count(name) > 1)
            raise ValueError(f"study {self.name}: {twice} is given twice")

    def missing(self, rows: Iterable[Mapping[str, Any]]) -> list[Cell]:
        """The cells that are not done, by priority; those that failed before come last.

        A cell that starts from another's weights is done if it started from the last ones: weights are gone with their
        machine, and what started from others is not compared.
        """
        rows = list(rows)
        places = self.results(rows)

        def done(cell: Cell) -> bool:
            return bool(places[cell.id]) and places[cell.id][-1:] > places.get(cell.needs or "", [])[-1:]

        return sorted((c for c in self.cells if not done(c)), key=lambda cell: any(cell.is_of(row) for row in rows))

    def results(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
        """Where in the rows the results of each cell are, oldest first, by its id."""
        return {
            cell.id: [n for n, row in enumerate(rows) if row.get("status") in RESULTS and cell.is_of(row)]
            for cell in self.cells
        }

    def last(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """The row that counts of each cell that has one: the last result, or else the last failure."""
        found: dict[str, Mapping[str, Any]] = {}
        rows = list(rows)
        for cell in self.cells:
            mine = [row for row in rows if cell.is_of(row)]
            results = [row for row in mine if row["status"] in RESULTS]
            if mine:
                found[cell.id] = (results or mine)[-1]
        return found


def with_method(run: TrainRun, text: str) -> TrainRun:
    """Return ``run`` with the method ``name[:field=value+…][@plan]``.

    Raises:
        ValueError: an unknown method, override or plan.
    """
    text, _, plan = text.partition("@")
    run = with_preset(run, text)
    return replace(run, plan=plan) if plan else run


def grid(
    study: str, group: str, run: TrainRun, methods: Sequence[str], seeds: Sequence[int], **fields: Any
) -> list[Cell]:
    """Cells of every method under every seed, the first seed of all methods before the second.

    Args:
        study, group: as in `Cell`.
        run: of all cells but for method and seed.
        methods: as for `with_method`.
        seeds: of every method.
        **fields: further fields of `Cell`.
    """
    return [
        Cell(study, group, method, replace(with_method(run, method), seed=seed), **fields)
        for seed in seeds
        for method in methods
    ]


def located(run: TrainRun, folder: Path | None) -> TrainRun:
    """Return ``run`` with the file or folder of its data set.

    Args:
        run: its ``data`` is a name, such as ``cifar10``, or a path.
        folder: holds ``NAME.npz`` or a folder ``NAME``; None: the run's data as they are.

    Raises:
        ValueError: the folder has no such data set; the message has the command that prepares it.
    """
    if folder is None or run.data in ("digits", "random", "shapes"):
        return run
    for path in (folder / f"{run.data}.npz", folder / run.data):
        if path.exists():
            return replace(run, data=str(path))
    how = "docs/cli.md says what it holds"
    if run.data in ("cifar10", "cifar100"):
        how = f"`hotrain prepare {run.data} --out {folder}` downloads it"
    elif run.data in texts.SETS:
        how = f"`hotrain prepare {run.data} --texts FOLDER --out {folder}` makes it of texts"
    raise ValueError(f"--data: {folder} has neither {run.data}.npz nor a folder {run.data}; {how}")


def read_rows(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Read the rows of several record files, oldest first within a file; those of other programs are left out."""
    return [row for file in files for row in record.read(file) if "study" in row and "config" in row]


def beside(file: Path) -> list[Path]:
    """The record files of that one's folder, it last; other studies may have run cells with the same settings."""
    return [*sorted(other for other in file.parent.glob("*.jsonl") if other != file), file]


@dataclass(frozen=True)
class Line:
    """One method of one group, over its seeds.

    Args:
        group, method, kind: of the cells.
        planned: number of its cells.
        rows: those that have one, in the order of the cells.
        gaps: accuracy minus that of exact with the same seed and from the same weights, in points, where both finished.
    """

    group: str
    method: str
    kind: str
    planned: int
    rows: tuple[Mapping[str, Any], ...]
    gaps: tuple[float, ...] = ()

    @property
    def accuracies(self) -> list[float]:
        """Percent, of the runs that finished."""
        return [row["accuracy"] for row in self.rows if row["status"] == FINISHED and row.get("accuracy") is not None]

    def count(self, status: str) -> int:
        """How many rows have this status."""
        return sum(row["status"] == status for row in self.rows)

    @property
    def state(self) -> str:
        """``3 of 3``, with what diverged or failed, or ``not run``."""
        done = len(self.rows) - self.count(FAILED)
        text = f"{done} of {self.planned}" if done or self.rows else "not run"
        for status in (DIVERGED, FAILED):
            if self.count(status):
                text += f", {self.count(status)} {status}"
        return text


def lines(study: Study, rows: Iterable[Mapping[str, Any]], kind: str = "train") -> list[Line]:
    """Summarize the cells of one kind, a line for each group and method, also where nothing ran."""
    rows = list(rows)
    last = study.last(rows)
    cells = [cell for cell in study.cells if cell.kind == kind]
    exact = {
        (cell.group, cell.run.seed): cell
        for cell in cells
        if cell.method == CONTROL and cell.id in last and last[cell.id]["status"] == FINISHED
    }

    places = study.results(rows) if any(cell.needs for cell in cells) else {}

    def start(cell: Cell) -> int | None:
        """Where the row of the weights is that the last result of a cell started from; None of one that needs none."""
        return max((n for n in places.get(cell.needs or "", ()) if n < places[cell.id][-1]), default=None)

    def gaps(cell: Cell) -> list[float]:
        control, row = exact.get((cell.group, cell.run.seed)), last.get(cell.id)
        if control is None or row is None or row["status"] != FINISHED or start(cell) != start(control):
            return []
        ours, theirs = row.get("accuracy"), last[control.id].get("accuracy")
        return [] if ours is None or theirs is None else [ours - theirs]

    out = []
    for group, method in dict.fromkeys((cell.group, cell.method) for cell in cells):
        mine = [cell for cell in cells if (cell.group, cell.method) == (group, method)]
        ran = tuple(last[cell.id] for cell in mine if cell.id in last)
        pairs = () if method == CONTROL else tuple(gap for cell in mine for gap in gaps(cell))
        out.append(Line(group, method, kind, len(mine), ran, pairs))
    return out


def mean_text(values: Sequence[float], *, error: bool = False, sign: str = "", digits: int = 2) -> str:
    """``mean ± deviation`` of the values; with ``error`` the standard error of their mean; ``–`` of none."""
    if not values:
        return "–"
    text = f"{statistics.fmean(values):{sign}.{digits}f}"
    if len(values) == 1:
        return text
    spread = statistics.stdev(values) / (math.sqrt(len(values)) if error else 1.0)
    return f"{text} ± {spread:.{digits}f}"
