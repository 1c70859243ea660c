"""What tests of this folder start from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hotrain import geometry
from hotrain.compress.operators import base


@pytest.fixture
def small_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest tensors are compressed too (of two entries and more), so that tests may be small."""
    monkeypatch.setattr(base, "SMALL", 2)


@pytest.fixture
def laid_out_on_cpu() -> Iterator[None]:
    """Compiled code has on the CPU the memory layouts, and the products of patches, that it has on a GPU."""
    geometry.LAID_OUT.add("cpu")
    yield
    geometry.LAID_OUT.remove("cpu")
