"""Launches by case: a compiled kernel is launched again only where it is valid."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hotrain.kernels.launch import aligned


def test_the_case_says_which_tensors_are_unaligned() -> None:
    """A kernel that reads the one in wide loads would read the other so."""
    words = torch.zeros(64, dtype=torch.int16)
    offset = -words.data_ptr() // 2 % 8
    even, odd = words[offset:], words[offset + 1 :]
    assert aligned(even, None, even) is True
    assert len({aligned(odd, even), aligned(even, odd), aligned(odd, odd), aligned(even, even)}) == 4
