"""Two processes for tests of torch.distributed, on this machine."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def found_by_each(worker: Callable[..., None], folder: Path, *args: Any) -> list[dict[str, Any]]:
    """Run `worker(rank, port, folder, *args)` in two processes; each saves what it found as `RANK.pt` in the folder.

    A port that is free here may be taken by a test beside this one before rank 0 listens on it: then by another.
    """
    for attempt in range(3):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        try:
            mp.spawn(_run, args=(worker, port, str(folder), *args), nprocs=2)
            break
        except mp.ProcessRaisedException as error:
            if "EADDRINUSE" not in str(error) or attempt == 2:
                raise
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@contextlib.contextmanager
def process_group(rank: int, port: int, kind: str = "cpu") -> Iterator[torch.device]:
    """The group of both processes: gloo on CPUs, or (kind "cuda") a GPU each; yields this one's device."""
    # NVLink multicast is left alone: it is a resource of the host that not every lent GPU may use.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", NCCL_NVLS_ENABLE="0")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    on_gpu = {"device_id": device, "timeout": timedelta(seconds=120)}
    dist.init_process_group(rank=rank, world_size=2, **(on_gpu if kind == "cuda" else {"backend": "gloo"}))
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _run(rank: int, worker: Callable[..., None], *args: Any) -> None:
    """Run the worker and end without Python's finalization.

    What still refers to the process group keeps gloo's threads alive after ``destroy_process_group``. One that frees
    a collective's last tensor then asks for the GIL of an interpreter that is ending, which aborts the process.
    """
    worker(rank, *args)
    atexit.register(os._exit, 0)
