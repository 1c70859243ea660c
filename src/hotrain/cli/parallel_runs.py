"""Parallel training runs on a CPU: each in its own process with one thread.

Small layers do not use two threads well; two processes with one thread each have about twice the throughput.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING

from hotrain.cli.errors import note
from hotrain.cli.run_records import progress_line

if TYPE_CHECKING:
    from hotrain.train import Comparison, TrainRun

COSTS = {"exact": 1.0, "hq8": 4.0, "hot": 2.7, "hot-unbiased": 3.9, "hla": 1.8, "lbp-wht": 2.1, "int4": 2.3}
"""Time of a step over that of exact training, measured on one CPU core: of the demo's ResNet, whose runs are longer."""
OTHERS = 3.0

Cell = tuple[int, str, int]
"""A run's index, a method and a seed."""


def train_cells(runs: Sequence[TrainRun], methods: Sequence[str], seeds: Sequence[int], jobs: int) -> Comparison:
    """Run ``hotrain.train.compare`` for every run.

    Prints to stderr one line per finished cell (run, method, seed), and an estimate of the time left after the first.

    Args:
        runs: runs to compare the methods on.
        methods: methods as on the command line.
        seeds: seeds of every method.
        jobs: cells at a time, each in a process with one thread.

    Returns:
        The cells in the order of runs, methods and seeds.

    Raises:
        ValueError: a bad method, before any training.
    """
    from hotrain.cli.prepare import labels
    from hotrain.train import Comparison

    labels(runs[0], methods)
    cells = [(index, method, seed) for seed in seeds for method in methods for index in range(len(runs))]
    done: dict[Cell, Comparison] = {}

    def finish(cell: Cell, outcome: Comparison) -> None:
        first, done[cell] = not any(each.results for each in done.values()), outcome
        for result in outcome.results:
            note(progress_line(result))
            if first and len(cells) > 1:
                left = minutes(time_left(cells, cell, result.seconds, jobs))
                note(f"about {left} left for the other {len(cells) - 1} runs")

    context = multiprocessing.get_context("spawn")  # a forked child would inherit PyTorch's threads
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_parent) as pool:
        futures: dict[Future[Comparison], Cell] = {
            pool.submit(_one, runs[index], method, seed): (index, method, seed) for index, method, seed in cells
        }
        try:
            for future in as_completed(futures):
                finish(futures[future], future.result())
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    whole = Comparison()
    for cell in itertools.product(range(len(runs)), methods, seeds):
        whole.failures += done[cell].failures
        whole.results += done[cell].results
    return whole


def time_left(cells: Sequence[Cell], first: Cell, seconds: float, jobs: int) -> float:
    """Estimate the time until all cells are trained.

    Args:
        cells: all cells. Runs are taken to be equally long.
        first: the first finished one.
        seconds: its time.
        jobs: cells at a time.

    Returns:
        Seconds.
    """
    costs = {cell: COSTS.get(cell[1], OTHERS) for cell in cells}
    return max(0.0, seconds * (sum(costs.values()) / costs[first] / jobs - 1))


def minutes(seconds: float) -> str:
    """Return a time as minutes:seconds."""
    whole, rest = divmod(round(seconds), 60)
    return f"{whole}:{rest:02d} min"


def _end_with_parent() -> None:
    """Make this process exit when its parent has ended for any reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _one(run: TrainRun, method: str, seed: int) -> Comparison:
    """Train one cell in this process with one thread and without a progress bar."""
    import torch

    from hotrain.train import compare, silent

    torch.set_num_threads(1)
    return compare(run, [method], [seed], on_progress=silent)
