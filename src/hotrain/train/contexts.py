"""What a run changes in the process, and restores: PyTorch's settings, signal handlers and random generators.

States of generators are data for ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
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
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms alone."""
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


# ---- random generators ----


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and PyTorch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy's legacy generator takes 32 bits; timm's Mixup draws from it
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return the states of the global generators: tensors, numbers and lists only."""
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state()
    state = {
        "python": [version, list(words), gauss],
        "numpy": [legacy[0], torch.from_numpy(legacy[1].astype(np.int64)), *legacy[2:]],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the states that :func:`rng_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, words, *rest = state["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"][: torch.cuda.device_count()]])


@contextlib.contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Run a block with the CPU generators seeded by ``seed``; restore their states afterwards."""
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)
