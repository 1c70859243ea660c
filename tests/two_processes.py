"""Two processes for tests of torch.distributed, on this machine."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp


def found_by_each(worker: Callable[..., None], folder: Path, *args: Any) -> list[dict[str, Any]]:
    """Run `worker(rank, port, folder, *args)` in two processes; each saves what it found as `RANK.pt` in the folder."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_run, args=(worker, port, str(folder), *args), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


def _run(rank: int, worker: Callable[..., None], *args: Any) -> None:
    """Run the worker and end without Python's finalization.

    What still refers to the process group keeps gloo's threads alive after ``destroy_process_group``. One that frees
    a collective's last tensor then asks for the GIL of an interpreter that is ending, which aborts the process.
    """
    worker(rank, *args)
    atexit.register(os._exit, 0)
