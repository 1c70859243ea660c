"""What tests of this folder start from."""

from __future__ import annotations

import pytest

from hotrain.compress.operators import base


@pytest.fixture
def small_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest tensors are compressed too (of two entries and more), so that tests may be small."""
    monkeypatch.setattr(base, "SMALL", 2)
