"""Trackers: a run's measurements for TensorBoard and trackio, written by their own libraries."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hotrain.train.run import TrainRun

Track = Callable[[int, Mapping[str, Any]], None]
"""Takes the number of finished updates, and measurements by name. What is not a number is left out."""


def untracked(update: int, values: Mapping[str, Any]) -> None:
    """Write nothing."""


@contextlib.contextmanager
def tracker(run: TrainRun, folder: Path, update: int) -> Iterator[Track]:
    """Open the tracker that ``run.log`` names, and close it at the end.

    TensorBoard's file is in the run's folder. trackio has one place for all runs; its project is the run's name, and
    what it prints goes to stderr.

    Args:
        folder: the run's folder, whose name identifies it.
        update: the update that it starts or continues from. TensorBoard hides what was written after it before.
    """
    if run.log is None:
        yield untracked
    elif run.log == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(folder), purge_step=update + 1) as writer:  # type: ignore[no-untyped-call]
            writer.add_text("run", f"```\n{json.dumps(run.to_dict(), indent=1)}\n```", update)  # type: ignore[no-untyped-call]

            def scalars(update: int, values: Mapping[str, Any]) -> None:
                for name, value in _numbers(values).items():
                    writer.add_scalar(name, value, update)  # type: ignore[no-untyped-call]

            yield scalars
    else:
        import trackio

        with contextlib.redirect_stdout(sys.stderr):
            trackio.init(project=run.name, name=folder.name, config=run.to_dict(), resume="allow")
        try:
            yield lambda update, values: trackio.log(_numbers(values), step=update)
        finally:
            with contextlib.redirect_stdout(sys.stderr):
                trackio.finish()


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float) and name != "update"}
