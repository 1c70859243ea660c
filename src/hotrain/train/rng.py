"""Random number generators of a run: seeding, and their states as data for ``torch.load(weights_only=True)``."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


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
        states = [s.cpu() for s in state["cuda"]][: torch.cuda.device_count()]
        for device, s in enumerate(states):
            torch.cuda.set_rng_state(s, device)


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
