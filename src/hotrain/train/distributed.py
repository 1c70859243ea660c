"""The little that distributed training needs here: who am I, one process writes, sums over all processes."""

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
    """This process among those of the run. ``world`` is 1 outside of torchrun."""

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (a device is a value)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """The element-wise sum of ``values`` over all processes."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every process, by rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Go on when every process has come here."""
        if self.world > 1:
            dist.barrier()

    def first(self, value: Any) -> Any:
        """``value`` of process 0."""
        if self.world == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


@contextlib.contextmanager
def processes(device: str) -> Iterator[Processes]:
    """Join the process group when torchrun started us (``RANK`` is set), and leave it if we joined it.

    Raises:
        ValueError: a CUDA device that is not there.
    """
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes(device=resolve_device(device))
        return
    here = resolve_device(device)
    if here.type == "cuda":
        here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(here)
    joined = not dist.is_initialized()
    if joined:
        dist.init_process_group("nccl" if here.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), here)
    finally:
        if joined:
            dist.destroy_process_group()
