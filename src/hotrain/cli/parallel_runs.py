"""Several runs at a time on a processor: each in a process of its own with one thread.

Small layers do not fill two threads; two processes of one thread each finish about twice as much.
"""

from __future__ import annotations

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


def train_cells(runs: Sequence[TrainRun], methods: Sequence[str], seeds: Sequence[int], jobs: int) -> list[Comparison]:
    """``hotrain.train.compare`` of every run, ``jobs`` cells at a time; a line on stderr for each that ends.

    Every cell runs with one thread. Raises ``ValueError`` for a bad method before any training.
    """
    from hotrain.cli.prepare import labels
    from hotrain.train import Comparison

    labels(runs[0], methods)
    cells = [(index, method, seed) for seed in seeds for method in methods for index in range(len(runs))]
    done: dict[tuple[int, str, int], Comparison] = {}
    if jobs == 1:
        for cell in cells:
            done[cell] = _tell(_one(runs[cell[0]], cell[1], cell[2]))
    else:
        context = multiprocessing.get_context("spawn")  # a forked child would inherit PyTorch's threads
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_parent) as pool:
            futures: dict[Future[Comparison], tuple[int, str, int]] = {
                pool.submit(_one, runs[index], method, seed): (index, method, seed) for index, method, seed in cells
            }
            try:
                for future in as_completed(futures):
                    done[futures[future]] = _tell(future.result())
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    merged = []
    for index in range(len(runs)):
        whole = Comparison()
        for method in methods:
            for seed in seeds:
                part = done[index, method, seed]
                whole.rows += part.rows
                whole.failures += part.failures
                whole.results += part.results
        merged.append(whole)
    return merged


def _end_with_parent() -> None:
    """Make this process end when the one that started it is gone, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _one(run: TrainRun, method: str, seed: int) -> Comparison:
    """One cell, in whatever process: quiet, with one thread."""
    import torch

    from hotrain.train import compare, silent

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return compare(run, [method], [seed], on_progress=silent)
    finally:
        torch.set_num_threads(threads)


def _tell(cell: Comparison) -> Comparison:
    for result in cell.results:
        note(progress_line(result))
    return cell
