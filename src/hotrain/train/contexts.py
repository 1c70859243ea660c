"""What a run changes in the process while it trains, and restores: PyTorch's settings and signal handlers."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hotrain.train.distributed import Processes


@contextlib.contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Disable cuDNN's attention.

    Its backward gave a NaN in dq for finite bf16 inputs with a logit range of 365 within a row, where the flash,
    memory-efficient and math kernels are finite (seen with torch 2.11 on an H200; docs/limitations.md).
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Use deterministic algorithms alone, if wanted."""
    if not wanted:
        yield
        return
    # cuBLAS sums in a fixed order only with a workspace of fixed size, which it reads when first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


@contextlib.contextmanager
def interrupts(ranks: Processes) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the number of a received SIGINT or SIGTERM, or 0; a second signal stops at once."""
    seen: list[int] = []
    previous: dict[signal.Signals, Any] = {}

    def note(number: int, frame: types.FrameType | None) -> None:
        seen.append(number)
        _restore(previous)
        if ranks.is_main:
            name = signal.Signals(number).name
            # Not print, which is not reentrant.
            with contextlib.suppress(OSError):  # stderr is closed
                os.write(2, f"\n{name}: finishing this update, then a checkpoint; again stops at once\n".encode())

    def asked() -> int:
        own = seen[0] if seen else 0
        if ranks.world == 1:
            return own
        # Signals reach processes at different updates; all must stop at the same one.
        anyone = ranks.total(torch.tensor([own], device=ranks.device)).item()
        return own or (signal.SIGTERM if anyone else 0)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, note)
    try:
        yield asked
    finally:
        _restore(previous)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
