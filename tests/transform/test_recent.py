"""Caches of index tensors: inputs of many sizes hold a bounded number of bytes."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from hotrain.transform import tokens
from hotrain.transform.tokens import recent


def test_index_tensors_of_many_lengths_are_bounded() -> None:
    """A step for each of 2,000 lengths held 33 bytes a token of each, also after the model was gone."""
    found = []
    for length in range(32768, 32768 + 2000):
        lay = tokens.layout((1, length), 16, 8, 0, "auto", None, True)
        found.append((weakref.ref(lay.places(torch.device("cpu"))), 8 * length))
    alive = [nbytes for reference, nbytes in found if reference() is not None]
    assert 0 < sum(alive) <= tokens.INDEX_BYTES
    assert found[-1][0]() is lay.places(torch.device("cpu"))


def test_what_was_used_last_is_held() -> None:
    """Not what was made last; one that is larger than the bound is held until the next."""
    made = []

    @recent(4 * 100, least=1)
    def numbers(first: int, count: int) -> tuple[Tensor, bool]:
        made.append(first)
        return torch.arange(first, first + count, dtype=torch.int32), True

    for first in (0, 1, 0, 2, 0, 1):  # 1 goes for 2, since 0 was used behind it
        assert numbers(first, 45)[0][0] == first
    assert made == [0, 1, 2, 1]
    assert numbers(7, 1000) is numbers(7, 1000)
    assert made == [0, 1, 2, 1, 7]
    numbers(0, 45)
    assert made == [0, 1, 2, 1, 7, 0]


def test_the_sizes_of_one_model_are_held() -> None:
    """Whatever their bytes: they are read again in the next step."""
    made = []

    @recent(1)
    def numbers(count: int) -> Tensor:
        made.append(count)
        return torch.arange(count)

    for _ in range(3):
        for count in range(1, 65):
            assert len(numbers(count)) == count
    assert made == list(range(1, 65))


def test_what_a_captured_graph_reads_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads it again at its address, whatever else was made since."""
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

    @recent(1, least=1)
    def numbers(first: int) -> Tensor:
        return torch.arange(first, first + 4)

    read, other = (weakref.ref(numbers(first)) for first in (0, 1))
    assert read() is None  # of a bound of one byte the newest is held
    capturing = True
    read = weakref.ref(numbers(2))
    capturing = False
    numbers(3)
    assert other() is None
    assert read() is numbers(2)
