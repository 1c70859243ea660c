"""Factors of channels, by which rows with one scale each are divided before they are quantized.

A few channels of a large model may be far above all others, in every row: the scale of a row is theirs then, and the
others are rounded to zero. With c_j for channel j, a power of two,

    x_ij = c_j x'_ij,   c_j = max(1, 2^⌈log2(max_i |x_ij| / (6 (mean √|x|)²))⌉)

over some rows i, no x'_ij of these is above where normal numbers have their largest: 6 (mean √|x|)² is four of their
standard deviations, and outliers count little in it. Most channels have c = 1. As in SmoothQuant (Xiao et al., ICML
2023, arXiv 2211.10438), but from the tensor itself, and for backward alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGE, LEAST = 6.0, 1e-6  # times the squared mean of roots, and what that is taken for at least
_MOST = 1 << 15  # entries that are looked at


def sampled(columns: int) -> int:
    """How many rows give the factors, evenly spaced: 4 to 16, by the power of two from the columns on."""
    return max(4, min(16, _MOST >> max(0, columns - 1).bit_length()))


def factors(rows: Tensor) -> Tensor:
    """c of rows (..., C), (C,) in their dtype; 1 for all where a number that is looked at is not finite."""
    found = _some(rows).abs().to(torch.float32)
    ratio = found.amax(0) / (LARGE * found.sqrt().mean().square().clamp(min=LEAST))
    # Up to the next power of two; of a NaN the sign is set then.
    return ((ratio.view(torch.int32) + 0x7FFFFF) & -0x800000).view(torch.float32).clamp(min=1.0).to(rows.dtype)


def _some(rows: Tensor) -> Tensor:
    """The rows that are looked at, as a matrix; of rows in any memory layout, which `reshape` might copy."""
    *sizes, columns = rows.shape
    count = sampled(columns)
    place = torch.arange(count, device=rows.device) * math.prod(sizes) // count
    index = []
    for size in reversed(sizes):
        index.append(place % size)
        place = place // size
    return rows[tuple(index[::-1])] if sizes else rows[None]
