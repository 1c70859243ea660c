"""Factors of channels, by which rows with one scale each are divided before they are quantized, and their middles.

A few channels of a large model may be far above all others, in every row: the scale of a row is theirs then, and the
others are rounded to zero. With c_j for channel j, a power of two,

    x_ij = c_j x'_ij,   c_j = max(1, 2^⌊log2(s_j / s)⌋),   s_j = (mean_i √|x_ij|)²,   s = (mean_ij √|x_ij|)²

over some rows i, but for the largest of each channel: one row in which a channel stands out, as the first token of a
language model may be, must not divide that channel in all others. Outliers count little in a mean of roots, so s is the
size of most channels, and most have c = 1. As in SmoothQuant (Xiao et al., ICML 2023, arXiv 2211.10438), but from the
tensor itself, and for backward alone.

Where backward is the same for rows less a constant, as attention's is for keys, a channel's middle is subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_MOST = 1 << 15  # entries that are looked at, if these are rows enough
# Of places: multiples of the golden ratio, which no period of tokens meets, and their bits. 16 STRIDE is below 2^31:
# Inductor computes k STRIDE as an index, in int32.
STRIDE, SPAN = 0x9E3779, 24
OF_MIDDLES = 16  # rows that give a middle


def sampled(columns: int) -> int:
    """How many rows give the factors: 8 to 16, by the power of two from the columns on."""
    return max(8, min(16, _MOST >> max(0, columns - 1).bit_length()))


def factors(rows: Tensor) -> Tensor:
    """c of rows (..., C), (C,) in their dtype; 1 for all where a number that is looked at is not finite."""
    roots = _some(rows, sampled(rows.shape[-1])).abs().to(torch.float32).sqrt()
    root = (roots.sum(0) - roots.amax(0)) / (len(roots) - 1)
    ratio = (root / root.mean()).square()
    # The power of two below: what is left without a mantissa.
    whole = (ratio.view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where(ratio.isfinite(), whole, 1.0).clamp(min=1.0).to(rows.dtype)


def middles(tensors: Sequence[Tensor]) -> Tensor:
    """The mean of some tokens of each sample, head and channel, without the largest and the least.

    Args:
        tensors: (B, T, H, D) each, of one shape.

    Returns:
        float32, (tensors, B, H, D); 0 where it is not finite.
    """
    return torch.stack([_middles(t) for t in tensors])


def _middles(t: Tensor) -> Tensor:
    tokens = t[:, _places(OF_MIDDLES, t.shape[1], t.device)].to(torch.float32)
    middle = (tokens.sum(1) - tokens.amax(1) - tokens.amin(1)) / (OF_MIDDLES - 2)
    return torch.where(middle.isfinite(), middle, 0.0)


def _places(count: int, size: int, device: torch.device) -> Tensor:
    """So many of `size` places; of fewer, some more than once."""
    number = torch.arange(count, device=device)
    return (((number * STRIDE) & ((1 << SPAN) - 1)) * size) >> SPAN


def _some(rows: Tensor, count: int) -> Tensor:
    """So many rows of the last axis, (count, C); of rows in any memory layout, which `reshape` might copy."""
    sizes = rows.shape[:-1]
    place = _places(count, math.prod(sizes), rows.device)
    index = []
    for size in reversed(sizes):
        index.append(place % size)
        place = place // size
    return rows[tuple(index[::-1])] if sizes else rows.expand(count, -1)
