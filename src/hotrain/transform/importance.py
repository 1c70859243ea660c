"""Importance sampling of the rows of a product along the tokens: which of them backward multiplies.

``AᵀB`` is the sum over rows r of ``A_rᵀ B_r``. `drawn` picks a fixed number of rows by systematic sampling with
probability p_r, proportional to ‖A_r‖·‖B_r‖ and at most about 1, and weights each pick with 1/p_r, so that the sum over
the picks is unbiased: row r is picked p_r times on average. For terms that are orthogonal these p have the least
variance.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import draws

FLOOR = 1e-12  # of the largest size
PASSES = 6  # of `probabilities`; what is left above 1 costs a pick that is taken twice, never the mean


def probabilities(size: Tensor, count: int) -> Tensor:
    """Expected numbers of picks, proportional to `size` where that is at most 1, with the sum `count`.

    Args:
        size: (R,), float64, not negative.
        count: at most R.

    Returns:
        (R,), float64; NaN where a size is not finite.
    """
    # Rows of zeros share what is left where fewer rows than `count` have a size at all.
    size = size.clamp_min(size.amax() * FLOOR) if size.numel() else size
    size = torch.where(size.sum() == 0, torch.ones_like(size), size)
    p = size * (count / size.sum())
    for _ in range(PASSES):
        full = p >= 1
        rest = torch.where(full, 0.0, p)
        left = (count - full.sum()) / rest.sum()  # not used where no row is left
        p = torch.where(full, 1.0, rest * left)
    return p * (count / p.sum())


def running_sum(t: Tensor) -> Tensor:
    """`t.cumsum(0)`, which CUDA refuses where deterministic algorithms are asked for: there by `by_doubling`."""
    refused = t.is_cuda and torch.are_deterministic_algorithms_enabled()
    return by_doubling(t) if refused else t.cumsum(0)


def by_doubling(t: Tensor) -> Tensor:
    """The running sum of (R,) in log₂ R additions: each entry gets the sum of 2, 4, 8, … entries that end at it."""
    step = 1
    while step < len(t):
        t = torch.cat((t[:step], t[step:] + t[:-step]))
        step *= 2
    return t


def drawn(size: Tensor, share: float, key: draws.Key) -> tuple[Tensor, Tensor]:
    """The rows to multiply and their weights; rows stay in order, and one may be picked twice.

    Args:
        size: (R,), ‖A_r‖·‖B_r‖.
        share: of the rows, in (0, 1); ⌈share·R⌉ are picked.
        key: of the draw.

    Returns:
        int64 (⌈share·R⌉,) and float64 weights of that shape; NaN weights where a size is not finite.
    """
    rows = size.numel()
    count = math.ceil(share * rows)
    p = probabilities(size.double(), count)
    start = (draws.hash_bits(1, key, draws.IMPORTANCE, size.device).double() + (2.0**31 + 0.5)) / 2.0**32
    ends = running_sum(p)
    picks = torch.arange(count, dtype=torch.float64, device=size.device) + start
    picked = torch.searchsorted(ends, picks).clamp_(max=max(0, rows - 1))
    return picked, p[picked].reciprocal()
