"""fp8 quantization, e4m3 or e5m2: value ≈ scale × code, the scale a power of two.

Scaling by a power of two is exact, so a code's relative error, at most 2⁻⁴ (e4m3) or 2⁻³ (e5m2), does not depend on
the scale; nor does scale × code, except for elements whose code is below fp8's smallest normal number. Edge cases
are specified: zeros give zero codes; the scale never falls below float32's smallest normal number; a non-finite
element becomes a NaN code and does not change the scale or any other code.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .integer import Quantized, amax, row_blocks

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_SMALLEST = -126  # exponent of float32's smallest normal number


def largest_code(number: str) -> float:
    """448 for e4m3, 57344 for e5m2."""
    return torch.finfo(DTYPES[number]).max


def scale_of(t: Tensor, number: str) -> Tensor:
    """The smallest power of two, not below 2⁻¹²⁶, that brings every finite element of t within ±`largest_code`.

    Equivalent to ``2 ** ceil(log2(max|t| / largest_code))`` over the finite elements, without the error of a logarithm.

    Args:
        t: floating point, any shape.
        number: ``"e4m3"`` or ``"e5m2"``.

    Returns:
        float32 (float64 for float64), ().
    """
    largest = amax(t.nan_to_num(0.0, 0.0, 0.0))
    (mantissa, exponent), (top, top_exponent) = torch.frexp(largest), math.frexp(largest_code(number))
    exponent = exponent - top_exponent + (mantissa > top).to(exponent.dtype)
    exponent = torch.where(largest > 0, exponent.clamp(min=_SMALLEST), _SMALLEST)
    # Built from its bits: a power function need not be exact.
    if largest.dtype == torch.float64:
        return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def quantize(t: Tensor, number: str, scale: Tensor | None = None) -> Quantized:
    """Quantize a matrix to fp8.

    Equivalent to ``codes = (t / scale).to(torch.float8_…)`` in float32 (float64 elements are rounded to float32 after
    scaling), to nearest with halves to even, and NaN where t is not finite.

    Args:
        t: (R, C), floating point.
        number: ``"e4m3"`` or ``"e5m2"``.
        scale: a power of two, at least `scale_of`, which is the default.
    """
    scale = scale_of(t, number) if scale is None else scale
    codes = torch.empty(t.shape, dtype=DTYPES[number], device=t.device)
    inverse = scale.reciprocal()
    for rows in row_blocks(t):
        v = (t[rows].to(scale.dtype) * inverse).to(torch.float32)
        # A cast makes an infinity a NaN, an infinity or the largest code, depending on format, device and version.
        codes[rows].copy_(v.nan_to_num_(math.nan, math.nan, math.nan))
    return Quantized(codes, scale, 8)
