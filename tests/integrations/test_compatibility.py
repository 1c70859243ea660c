"""Two models of timm and two of transformers through every stage of benchmarks/compatibility.py; a command runs all."""

from __future__ import annotations

from typing import Any

import compatibility
import pytest

import hotrain

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:(?!hotrain)")


@pytest.mark.parametrize(
    ("name", "leave_out"), [("test_vit", "compile"), ("test_resnet", "compile"), ("vit", ""), ("llama", "compile")]
)
def test_a_model_passes_every_stage(name: str, leave_out: str) -> None:
    """Compiling takes most of the time: of one model here, of all by the command."""
    found = compatibility.tried(name, leave_out)
    assert found["stages"] == dict.fromkeys([s for s in compatibility.STAGES if s != leave_out], "")
    assert found["kept_bytes"] < 0.5 * found["exact_bytes"]


def test_a_stage_that_fails_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose inference changes when it is converted would be found, and so would one that is not reverted."""
    real = hotrain.convert

    def spoiled(model: Any) -> Any:
        report = real(model)
        next(model.parameters()).data.add_(1.0)
        return report

    monkeypatch.setattr(compatibility.hotrain, "convert", spoiled)
    monkeypatch.setattr(compatibility.hotrain, "revert", lambda model: None)
    monkeypatch.setattr(compatibility, "STEPS", 1)
    monkeypatch.setattr(compatibility, "compile_", None)
    stages = compatibility.tried("vit", "compile")["stages"]
    assert stages["convert"].startswith("AssertionError: outputs differ by")
    assert stages["revert"] == "AssertionError: classes differ from the exact model's"


def test_there_are_ten_models_of_each_library() -> None:
    libraries = [subject.library for subject in compatibility.SUBJECTS.values()]
    assert libraries.count("timm") == libraries.count("transformers") == 10
