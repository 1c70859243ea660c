"""Progress reports of the training loop, and a progress bar."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

PERIOD = 60.0
"""Seconds between two lines within an epoch."""


@dataclass(frozen=True)
class Progress:
    """The state of a run after an update, or after an epoch's evaluation (then ``accuracy`` is set).

    Args:
        epoch, epochs: number of the epoch, from 1, and of all.
        update, updates: finished optimizer updates, and all of the run.
        loss: mean training loss of the epoch so far.
        images_per_second: training images per second since the start of this process.
        eta_seconds: estimated seconds to the end of the run.
        peak_bytes: PyTorch's peak allocation on a CUDA device, else None.
        accuracy: percent of the test images.
    """

    epoch: int
    epochs: int
    update: int
    updates: int
    loss: float
    images_per_second: float
    eta_seconds: float
    peak_bytes: int | None = None
    accuracy: float | None = None

    def __str__(self) -> str:
        parts = [f"epoch {self.epoch}/{self.epochs}", f"loss {self.loss:.4f}"]
        if self.accuracy is not None:
            parts.append(f"accuracy {self.accuracy:.2f} %")
        parts.append(f"{self.images_per_second:,.0f} img/s")
        if self.peak_bytes is not None:
            parts.append(f"peak {self.peak_bytes / 2**30:.2f} GiB")
        return " · ".join(parts)


OnProgress = Callable[[Progress], None]


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[OnProgress]:
    """Show throughput, time left, loss and peak memory in a bar on a terminal, elsewhere in lines.

    In a log or a notebook there is a line for each epoch, and one a minute within an epoch, without control characters.
    """
    if not sys.stderr.isatty():
        printed = time.monotonic()

        def line(progress: Progress) -> None:
            nonlocal printed
            if progress.accuracy is not None or time.monotonic() - printed >= PERIOD:
                printed = time.monotonic()
                within = f"update {progress.update}/{progress.updates} · " * (progress.accuracy is None)
                print(f"{title} · {within}{progress}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    # The bar gets the width that the texts leave; names may contain brackets, so no markup.
    columns = (
        TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[left]}", markup=False, table_column=Column(no_wrap=True)),
    )
    console = Console(stderr=True)
    with Bar(*columns, console=console, expand=True) as bar:
        task = bar.add_task(title, total=1, text=title, left="")

        def update(progress: Progress) -> None:
            minutes, seconds = divmod(round(progress.eta_seconds), 60)
            left = f"{progress.update}/{progress.updates} · {minutes}:{seconds:02d} left"
            text = f"{title} · {progress}"
            if len(text) + len(left) > console.width - 4:
                text = str(progress)
            bar.update(task, completed=progress.update, total=progress.updates, text=text, left=left)

        yield update


def silent(progress: Progress) -> None:
    """Show nothing."""
