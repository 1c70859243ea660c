"""Kernel tests run on a GPU where there is one, and in Triton's interpreter elsewhere: the same tests, fewer sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs on a GPU is chosen with the other tests that do (`make test-gpu`)."""
    if torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.gpu)


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
