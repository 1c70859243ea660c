"""What the loop measures while it trains, without waiting for the device."""

from __future__ import annotations

import math

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


def finite(value: float) -> float | None:
    """``value``, or None if it is not finite, which JSON cannot represent."""
    return value if math.isfinite(value) else None
