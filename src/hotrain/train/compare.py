"""Comparison of methods: training runs with the same seeds, initial weights and batches."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotrain.method import Method
from hotrain.train import checkpoint, record
from hotrain.train.loop import train
from hotrain.train.optimization import create_optimizer
from hotrain.train.outcome import MEASURED, Result
from hotrain.train.progress import OnProgress
from hotrain.train.run import TrainRun, replace, with_preset
from hotrain.train.setup import build


@dataclass
class Comparison:
    """The outcome of :func:`compare`.

    Args:
        failures: one row per cell (a run of one method and seed) that raised: model, method, seed, error.
        results: the complete results of the finished cells, without their models.
    """

    failures: list[dict[str, Any]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per finished cell: model, method, seed, accuracy (percent), saved_bytes, bit_ops, step_ms, layers."""
        figures = ("accuracy", "saved_bytes", "bit_ops", "step_ms", "layers")
        return [{**_key(result.run), **{name: getattr(result, name) for name in figures}} for result in self.results]


def compare(
    run: TrainRun,
    methods: Iterable[str | Method],
    seeds: Sequence[int] = (0,),
    *,
    finished: Mapping[tuple[str, int], Mapping[str, Any]] | None = None,
    on_progress: OnProgress | None = None,
    on_result: Callable[[Result], None] | None = None,
) -> Comparison:
    """Train ``run`` with every method under every seed.

    With the same seed all methods start from the same weights and see the same images. Data, model and optimizer are
    checked before the first run. A run that raises is reported in ``failures`` and the others continue; only Ctrl-C
    stops the comparison.

    Args:
        methods: presets, ``"name:field=value+field=value"`` strings (see :func:`parse_method`) or Methods. The
            run's own ``method`` and ``method_overrides`` are not used.
        seeds: one run is trained per method and seed.
        finished: records of earlier runs by method label and seed (:func:`finished_cells`). They are not trained
            again, and are part of the results.
        on_progress: as for :func:`train`.
        on_result: called after each run that was trained by this call.

    Raises:
        ValueError, RuntimeError: no method, no seed, a method named twice, an unknown method or override; data, model,
            device or optimizer that are not available (before any training).
    """
    variants = [with_preset(run, method) for method in methods]
    labels = [v.method_label for v in variants]
    if not variants or not seeds:
        raise ValueError("compare: give at least one method and one seed")
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ValueError(f"compare: method {twice!r} is given twice; give a Method another name")
    known = finished or {}
    if any((label, seed) not in known for label in labels for seed in seeds):
        # What is not available raises before any training.
        create_optimizer(run, build(with_preset(run, "exact")).model)
    comparison = Comparison()
    for seed in seeds:
        for variant in variants:
            cell = replace(variant, seed=seed)
            row = known.get((cell.method_label, seed))
            try:
                result = train(cell, on_progress=on_progress) if row is None else _recorded(cell, row)
            except Exception as error:
                comparison.failures.append({**_key(cell), "error": f"{type(error).__name__}: {error}"})
                continue
            comparison.results.append(dataclasses.replace(result, model=None))
            if on_result is not None and row is None:
                on_result(result)
    return comparison


def _key(run: TrainRun) -> dict[str, Any]:
    return {"model": run.model, "method": run.method_label, "seed": run.seed}


def finished_cells(run: TrainRun) -> dict[tuple[str, int], dict[str, Any]]:
    """Read the finished runs in ``run.out_dir`` that differ from ``run`` only in method and seed, for :func:`compare`.

    Records of version 1 are ignored: they do not contain the whole configuration. One that is incomplete is left out
    with a warning.

    Returns:
        The last record by method label and seed.
    """
    found = {}
    path = Path(run.out_dir) / record.RUNS
    for row in record.read(path):
        if row.get("record", 1) < 2 or row.get("status") != "finished":
            continue
        try:
            config = TrainRun.from_dict(row["config"])
            result = _recorded(config, row)
            known = all({"epoch", "accuracy", "train_loss"} <= entry.keys() for entry in result.history)
        except (AttributeError, KeyError, TypeError, ValueError):
            known = False
        if not known:
            warnings.warn(f"{path}: the record of {row.get('run_id')!r} is incomplete and is left out", stacklevel=2)
            continue
        same = replace(config, method=run.method, method_overrides=run.method_overrides, seed=run.seed)
        if not checkpoint.differences(run, same):
            found[config.method_label, config.seed] = row
    return found


def _recorded(run: TrainRun, row: Mapping[str, Any]) -> Result:
    """Make a Result from a record, without its model."""
    out, known = Path(run.out_dir), {"layers": None, **row}  # those of version 2 may not say
    return Result(
        run=run,
        **{name: known[name] for name in ("run_id", "history", *MEASURED)},
        finished=True,
        record_path=out / record.RUNS,
        checkpoint_path=out / row["run_id"] / checkpoint.FILE,
    )
