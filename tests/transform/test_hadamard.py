"""The Walsh–Hadamard matrix and the block rotation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import block_hadamard, hadamard, sign_changes

from hotrain.transform.hadamard import matrix, rotate, sequency, signs

ORDERS = [1, 2, 4, 8, 16, 64]


@pytest.mark.parametrize("n", ORDERS)
def test_signs_are_sylvesters(n: int) -> None:
    assert torch.equal(torch.tensor(signs(n), dtype=torch.float64), hadamard(n))


@pytest.mark.parametrize("n", ORDERS)
def test_the_matrix_is_orthonormal_and_symmetric(n: int) -> None:
    h = matrix(n, torch.float64, torch.device("cpu"))
    assert torch.equal(h, h.T)
    torch.testing.assert_close(h @ h, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-15 * n)


def test_sequency_of_order_16_is_the_documented_list() -> None:
    """As docs/maths.md lists them."""
    assert list(sequency(16)) == [0, 15, 7, 8, 3, 12, 4, 11, 1, 14, 6, 9, 2, 13, 5, 10]
    assert list(sequency(4)) == [0, 3, 1, 2]


@pytest.mark.parametrize("n", ORDERS)
def test_sequency_counts_sign_changes(n: int) -> None:
    assert list(sequency(n)) == [sign_changes(row) for row in hadamard(n)]
    assert sorted(sequency(n)) == list(range(n))


@pytest.mark.parametrize("n", [0, 3, 12, -4])
def test_other_orders_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        signs(n)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((5, 16), -1),  # one block
        ((5, 40), 1),  # a last block half full
        ((48, 5), 0),  # the weight's axis
        ((1, 3), 0),  # less than a block
        ((2, 19, 3), 1),  # in the middle
        ((2, 3, 17), -1),
        ((10,), 0),  # a vector
    ],
)
def test_rotation_is_the_dense_product(shape: tuple[int, ...], dim: int) -> None:
    t = torch.randn(shape, dtype=torch.float64)
    h = block_hadamard(shape[dim])
    padded = torch.zeros(*t.movedim(dim, -1).shape[:-1], len(h), dtype=torch.float64)
    padded[..., : shape[dim]] = t.movedim(dim, -1)
    torch.testing.assert_close(rotate(t, dim), (padded @ h).movedim(-1, dim), rtol=0, atol=1e-14)


def test_it_cancels_in_a_product_over_a_padded_axis() -> None:
    """(g H)(Hᵀ w) = g w at O = 100, which 16 does not divide: the reason that padding is exact."""
    g, w = torch.randn(7, 100, dtype=torch.float64), torch.randn(100, 9, dtype=torch.float64)
    torch.testing.assert_close(rotate(g) @ rotate(w, 0), g @ w, rtol=0, atol=1e-13)


def test_views_and_dtypes() -> None:
    t = torch.randn(32, 6).T
    assert not t.is_contiguous()
    torch.testing.assert_close(rotate(t), rotate(t.contiguous()))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert rotate(t.to(dtype)).dtype == dtype


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(0, 5), size=st.integers(1, 70), n=st.sampled_from([2, 4, 16, 64]), first=st.booleans())
def test_twice_is_the_padded_tensor_and_energy_is_kept(rows: int, size: int, n: int, first: bool) -> None:
    t = torch.randn((size, rows) if first else (rows, size), dtype=torch.float64)
    dim = 0 if first else 1
    once = rotate(t, dim, n)
    assert once.shape[dim] == math.ceil(size / n) * n
    torch.testing.assert_close(once.square().sum(), t.square().sum())
    back = rotate(once, dim, n)
    torch.testing.assert_close(back.narrow(dim, 0, size), t, rtol=0, atol=1e-13)
    assert float(back.narrow(dim, size, once.shape[dim] - size).abs().sum()) < 1e-12
