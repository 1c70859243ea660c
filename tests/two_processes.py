"""Two processes for tests of torch.distributed, on this machine."""

from __future__ import annotations

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
    mp.spawn(worker, args=(port, str(folder), *args), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]
