"""What the loop measures while it trains, without waiting for the device."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor


class DelayedRead:
    """Reads two numbers from the device without synchronizing: on a GPU as they were at the previous call."""

    def __init__(self, device: torch.device) -> None:
        self.host = torch.tensor([0.0, math.inf], device="cpu")
        self.copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.host = self.host.pin_memory()

    def look(self, first: Tensor, second: Tensor) -> list[float]:
        """Return the numbers of the previous call, or on a CPU of this one."""
        now = torch.stack((first.float(), second.reshape(()).float()))
        if not self.host.is_pinned():
            return now.tolist()
        if self.copied is not None:
            self.copied.synchronize()
        seen = self.host.tolist()
        self.host.copy_(now, non_blocking=True)
        self.copied = torch.cuda.Event()
        self.copied.record()
        return seen


class StepTimer:
    """Milliseconds of every update, by CUDA events (read on demand) or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.done_ms: list[float] = []
        self.pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.began: Any = None

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self.began = self._now()

    def stop(self) -> None:
        if self.cuda:
            self.pending.append((self.began, self._now()))
        else:
            self.done_ms.append((self._now() - self.began) * 1e3)

    def all_ms(self) -> list[float]:
        for begin, end in self.pending:
            end.synchronize()
            self.done_ms.append(begin.elapsed_time(end))
        self.pending.clear()
        return self.done_ms

    def median_ms(self) -> float | None:
        times = self.all_ms()
        return statistics.median(times) if times else None


def finite(value: float) -> float | None:
    """``value``, or None if it is not finite, which JSON cannot represent."""
    return value if math.isfinite(value) else None
