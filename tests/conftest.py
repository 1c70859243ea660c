"""What every test starts from: one thread, the same seeds, and timm importable where a test asks for it."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest
import torch

# Without a GPU kernels run in Triton's interpreter. Its own functions are made for it when Triton is imported, which
# torch._inductor does too: so it is said before anything else is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hotrain


def pytest_configure(config: pytest.Config) -> None:
    """`make test-gpu` without a device is told so once, not by a hundred tests."""
    if config.getoption("markexpr") == "gpu" and not torch.cuda.is_available():
        pytest.exit("-m gpu needs a CUDA device that PyTorch finds; `make test` runs what needs none", returncode=2)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _strides_as_on_a_gpu() -> None:
    """Inductor pads the strides of what it writes, on a GPU above 1024 elements: here of small tensors as well."""
    config = importlib.import_module("torch._inductor.config")
    config.disable_padding_cpu, config.padding_stride_threshold = False, 64


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """The same random numbers for a test whatever ran before it."""
    torch.manual_seed(0)
    hotrain.manual_seed(0)


@pytest.fixture(scope="session")
def timm() -> ModuleType:
    """timm, importable beside a CPU-only PyTorch because `hotrain.train` declares what torchvision lacks there."""
    importlib.import_module("hotrain.train")
    return importlib.import_module("timm")
