"""Rows drawn by importance: the number of picks, their mean, their variance, and the edges."""

from __future__ import annotations

import math

import pytest
import torch

from hotrain.transform.importance import by_doubling, drawn, probabilities

F64 = torch.float64
KEYS = 1000


def heavy(rows: int) -> torch.Tensor:
    """Sizes over four orders of magnitude, as the norms of gradients have."""
    return (3 * torch.randn(rows, dtype=F64, generator=torch.Generator().manual_seed(1))).exp()


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
def test_a_row_is_picked_as_often_as_its_weight_says(share: float) -> None:
    """E[Σ over picks of row r of 1/p_r] = 1: of 1,000 draws the mean is within 5·√(1/(1,000 p)), since the number of
    picks with mean p has a variance below p."""
    size = heavy(100)
    total = torch.zeros(100, dtype=F64)
    for key in range(KEYS):
        picked, weight = drawn(size, share, key)
        assert picked.tolist() == sorted(picked.tolist())
        assert len(picked) == math.ceil(share * 100)
        total.index_add_(0, picked, weight)
    p = probabilities(size, math.ceil(share * 100))
    assert float(((total / KEYS - 1).abs() / (1 / (KEYS * p)).sqrt()).max()) < 5
    assert float(p.max()) < 1.3  # what the passes leave above 1, at a share of 0.9
    assert float(p.sum()) == pytest.approx(math.ceil(share * 100), rel=1e-12)


def test_the_variance_is_far_below_that_of_even_draws() -> None:
    """Terms that are orthogonal: Σ (1/p − 1)‖M‖², against (1/share − 1) Σ ‖M‖² of even draws. On log-normal sizes
    (deviation 3) half of the rows hold all but Φ(−6) of the energy: the draws are left with less than a hundredth."""
    size = heavy(10000)
    p = probabilities(size, 5000)
    assert float(((1 / p.clamp(max=1.0) - 1) * size.square()).sum()) < 0.01 * float(size.square().sum())


def test_rows_of_zeros_are_left_out_where_others_suffice_and_nothing_else_is_lost() -> None:
    size = torch.zeros(64, dtype=F64)
    size[::8] = heavy(8)
    picked, weight = drawn(size, 0.5, 7)
    kept = size[picked] > 0
    assert sorted(picked[kept].tolist()) == list(range(0, 64, 8))  # each once: fewer than are asked for
    torch.testing.assert_close(weight[kept], torch.ones(8, dtype=F64), rtol=1e-9, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stays_so(bad: float) -> None:
    size = heavy(32)
    size[5] = bad
    assert bool(drawn(size, 0.5, 3)[1].isnan().all())


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_few_rows(rows: int) -> None:
    picked, weight = drawn(torch.ones(rows, dtype=F64), 0.5, 3)
    assert picked.shape == weight.shape == (math.ceil(rows / 2),)
    assert bool((picked < max(1, rows)).all())


def test_zeros_are_drawn_evenly() -> None:
    _, weight = drawn(torch.zeros(16, dtype=F64), 0.5, 3)
    torch.testing.assert_close(weight, torch.full((8,), 2.0, dtype=F64))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 1000, 1024, 1025])
def test_the_running_sum_by_doubling(rows: int) -> None:
    """To the rounding of float64 sums in another order: at most 11 additions of up to 1025 numbers below 1."""
    t = torch.rand(rows, dtype=torch.float64)
    torch.testing.assert_close(by_doubling(t), t.cumsum(0), rtol=1e-12, atol=0)
