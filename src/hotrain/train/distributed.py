"""Distributed training: rank, world size and device of this process, and collectives over the process group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hotrain.train.models import resolve_device


@dataclass(frozen=True)
class Processes:
    """The processes of a run as one of them sees them: its index, their number, its device."""

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (a device is a value)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """Sum ``values`` element-wise over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every process, by rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Wait until every process has reached this call (a barrier)."""
        if self.world > 1:
            dist.barrier()


@contextlib.contextmanager
def processes(device: str) -> Iterator[Processes]:
    """Join torchrun's process group if there is one (``RANK`` is set), and leave it afterwards if it was joined here.

    Args:
        device: as for :func:`hotrain.train.models.resolve_device`; of several processes each takes its ``LOCAL_RANK``.

    Raises:
        ValueError: a CUDA device that is not available.
        RuntimeError: another process ended, or cannot be reached any more.
    """
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes(device=resolve_device(device))
        return
    here = resolve_device(device)
    if here.type == "cuda":
        here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(here)
    joined = not dist.is_initialized()
    try:
        if joined:
            dist.init_process_group("nccl" if here.type == "cuda" else "gloo")
        yield Processes(dist.get_rank(), dist.get_world_size(), here)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):  # gloo has no exception of its own
            raise
        own = f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
        raise RuntimeError(
            f"{own}: another process of this run has ended or cannot be reached; see what it printed. Resume from the "
            f"run's last checkpoint with as many processes. PyTorch says: {' '.join(str(error).split())}"
        ) from error
    finally:
        if joined and dist.is_initialized():
            dist.destroy_process_group()
