"""Two codes a byte: nothing is lost, and the layout is the documented one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrain.quantize.integer import pack, unpack


def test_all_256_bytes_both_ways() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(16, 16)
    codes = unpack(every, 32)
    assert codes.dtype == torch.int8
    assert torch.equal(pack(codes), every)
    pairs = {(int(a), int(b)) for a, b in codes.view(-1, 2)}
    assert pairs == {(a, b) for a in range(-8, 8) for b in range(-8, 8)}


@pytest.mark.parametrize(
    ("even", "odd", "byte"),
    [(0, 0, 0x00), (1, 0, 0x01), (0, 1, 0x10), (-1, 7, 0x7F), (7, -1, 0xF7), (-7, -7, 0x99), (-8, -8, 0x88)],
)
def test_even_columns_lie_in_the_low_half(even: int, odd: int, byte: int) -> None:
    assert pack(torch.tensor([[even, odd]], dtype=torch.int8)).tolist() == [[byte]]


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 7), columns=st.integers(0, 33), seed=st.integers(0, 1000))
def test_round_trip_of_any_shape(rows: int, columns: int, seed: int) -> None:
    codes = torch.randint(-8, 8, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    packed = pack(codes)
    assert packed.shape == (rows, -(-columns // 2))
    assert torch.equal(unpack(packed, columns), codes)


def test_a_transposed_view_is_packed_by_its_own_columns() -> None:
    codes = torch.randint(-7, 8, (6, 10)).to(torch.int8)
    assert torch.equal(unpack(pack(codes.T), 6), codes.T)
