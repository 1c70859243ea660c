"""timm must import beside a CPU-only PyTorch, whatever state torchvision is in."""

import importlib
import subprocess
import sys
from typing import Any

import pytest

from hotrain.train import torchvision_shim


def test_importing_the_trainer_makes_timm_importable() -> None:
    code = "import hotrain.train, timm, torchvision.transforms; print(timm.create_model('test_resnet').num_classes)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1000"


def test_a_working_torchvision_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(importlib, "import_module", imported.append)
    before = list(torchvision_shim._declared)
    assert torchvision_shim.ensure_torchvision()
    assert imported == ["torchvision"]
    assert torchvision_shim._declared == before  # nothing was declared


def _failing(error: Exception) -> Any:
    def fail(name: str) -> None:
        raise error

    return fail


def test_without_torchvision_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", _failing(ModuleNotFoundError(name="torchvision")))
    assert not torchvision_shim.ensure_torchvision()


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA driver too old"), ModuleNotFoundError(name="PIL")], ids=["runtime", "dependency"]
)
def test_other_failures_are_not_hidden(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(importlib, "import_module", _failing(error))
    with pytest.raises(type(error)):
        torchvision_shim.ensure_torchvision()
