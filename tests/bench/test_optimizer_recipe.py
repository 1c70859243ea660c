"""docs/optimizer.md: its recipe runs as written."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "optimizer.md"


@pytest.fixture
def small(timm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A smaller ViT, and the compiler without the code it would make."""
    create, compiled = timm.create_model, torch.compile
    sizes = {"depth": 1, "embed_dim": 64, "num_heads": 2}
    monkeypatch.setattr(timm, "create_model", functools.partial(create, **sizes))
    monkeypatch.setattr(torch, "compile", lambda model, **_: compiled(model, backend="aot_eager"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    torch.compiler.reset()


def test_the_recipe_runs_as_written(small: None, adamw8bit: list[Any]) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    assert adamw8bit == [names["optimizer"]]
    assert torch.isfinite(names["loss"])
    # every parameter got a gradient in both steps
    assert len(names["optimizer"].state) == len(list(names["model"].parameters()))
