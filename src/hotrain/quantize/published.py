"""Quantizers of other papers that we compare against: LUQ's logarithmic gradients, SAWB's clip."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import draws

LUQ_LEVELS = 8  # powers of two 2⁰..2⁷, a sign and zero: 4 bits


def luq(t: Tensor, key: int, stream: int) -> tuple[Tensor, Tensor]:
    """Logarithmic unbiased quantization to 4 bits: (codes, alpha) with t ≈ alpha × codes.

    Below alpha a value becomes alpha with probability |t|/alpha, else 0; above, it becomes one of the two neighbouring
    powers of two so that the mean is t. Unlike the published code this takes the largest magnitude, not the largest
    value, and rounds between neighbouring powers by an exact Bernoulli draw (theirs is unbiased to about 1 %;
    docs/maths.md).

    Args:
        t: floating point, any shape.
        key: of the draws.
        stream: of the draws.

    Returns:
        Codes, floating point, shaped as t, in {0, ±1, ±2, ..., ±128}, and alpha = max|t|/128, ().
    """
    wide = t.to(torch.float64 if t.dtype == torch.float64 else torch.float32)
    largest = wide.abs().amax() if wide.numel() else wide.new_zeros(())
    alpha = (largest / 2 ** (LUQ_LEVELS - 1)).clamp(min=torch.finfo(wide.dtype).tiny)
    y = wide.abs() / alpha
    noise = draws.noise16(t.numel(), key, stream, t.device).view(t.shape)
    u = noise.to(wide.dtype).add_(0.5 + 2**15).mul_(2.0**-16)  # in (0, 1)
    floor = torch.exp2(torch.floor(torch.log2(y.clamp(min=1.0))))
    below, above = torch.where(y < 1, 0.0, floor), torch.where(y < 1, 1.0, 2 * floor)
    codes = torch.where(u * (above - below) < y - below, above, below)
    codes = codes.clamp(max=2.0 ** (LUQ_LEVELS - 1)).copysign(wide)
    # A NaN compares false everywhere; alpha carries it, as it carries an infinity.
    return codes, alpha


def sawb_step(t: Tensor, bits: int = 4) -> Tensor:
    """The step of SAWB ("statistics-aware weight binning"): clip/(2^(b−1)−1), clip = 12.1·rms − 12.2·mean|t|.

    Coefficients of LUQ for 4 bits. The clip is negative where the magnitudes are nearly equal, and may exceed the
    largest one: both are replaced by max|t|.

    Args:
        t: floating point, any shape.
        bits: 4.

    Returns:
        The scale, ().

    Raises:
        ValueError: other bits than 4.
    """
    if bits != 4:
        raise ValueError(f"SAWB's coefficients are for 4 bits, got {bits}")
    wide = t.to(torch.float64 if t.dtype == torch.float64 else torch.float32)
    if not wide.numel():
        return wide.new_full((), torch.finfo(wide.dtype).tiny)
    magnitude = wide.abs()
    largest = magnitude.amax()
    clip = 12.1 * wide.square().mean().sqrt() - 12.2 * magnitude.mean()
    clip = torch.where((clip > 0) & (clip < largest), clip, largest)
    return (clip / 7).clamp(min=torch.finfo(wide.dtype).tiny)
