"""Kernel tests run on a GPU where there is one, and in Triton's interpreter elsewhere: the same tests, fewer sizes."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poison(device: torch.device) -> None:
    """Fill freed memory with NaN bytes, so that an entry that no program writes shows."""
    if device.type == "cuda":
        blocks = [torch.full((1 << 20,), 0x7F, dtype=torch.uint8, device=device) for _ in range(64)]
        del blocks
