"""Symmetric integer quantization: value ≈ scale × code, codes from −(2^(b−1)−1) to 2^(b−1)−1, so zero is exact.

Scales are per tensor, per row (a token, or a token-frequency) or per column. Edge cases are specified: zeros give zero
codes; a scale never falls below the smallest normal number, so denormals round to zero; a NaN or infinity makes its
scale non-finite, and with it everything that the scale multiplies: a non-finite gradient is never quantized away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import draws
from ..private import fakes
from .rounding import ROUNDINGS

# On a CPU the passes of a quantizer run block after block of rows, small enough to stay in each core's L2 cache.
_BLOCK = 1 << 15  # elements per thread
_DIMS = {"tensor": None, "token": 1, "column": 0}


def wide(t: Tensor) -> Tensor:
    """t in the dtype of the computation before rounding: float32, or float64 if it is."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def largest_code(bits: int) -> int:
    """7 for 4 bits, 127 for 8: the magnitude of the largest code."""
    return (1 << (bits - 1)) - 1


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix: codes and scales.

    Attributes:
        codes: int8, or float8 of `hotrain.quantize.floating`, (R, C).
        scale: float32 (float64 for float64 input): () per tensor, (R, 1) per row, (1, C) per column.
        bits: 4 or 8.
    """

    codes: Tensor
    scale: Tensor
    bits: int

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """scale × codes, (R, C), in the scale's dtype or in `dtype`."""
        value = self.codes.to(self.scale.dtype) * self.scale
        return value if dtype is None else value.to(dtype)


def row_blocks(t: Tensor) -> Iterator[slice]:
    """The blocks of rows that a quantizer processes one by one; a single one but on CPUs, and of fake tensors."""
    # An even number of rows per block: pairs of neighbours share a hash (draws.noise16).
    height = max(2, _BLOCK * torch.get_num_threads() // max(1, t.shape[1]) // 2 * 2)
    if t.device.type != "cpu" or isinstance(t, fakes.tensor):
        height = max(1, t.shape[0])
    return (slice(first, min(first + height, t.shape[0])) for first in range(0, t.shape[0], height))


def amax(t: Tensor, dim: int | None = None) -> Tensor:
    """max|t|, zero of nothing: float32 (float64 for float64), (), or along one axis, which stays with size 1."""
    if dim is None:
        low, high = torch.aminmax(t) if t.numel() else (t.new_zeros(()),) * 2
    else:
        low, high = torch.aminmax(t, dim=dim, keepdim=True) if t.shape[dim] else (t.sum(dim, keepdim=True),) * 2
    return wide(torch.maximum(low.neg(), high))


def scale_of(t: Tensor, bits: int, axis: str) -> Tensor:
    """The scale that maps amax to the largest code.

    Args:
        t: (R, C), floating point.
        bits: 4 or 8.
        axis: ``"tensor"``, ``"token"`` (per row) or ``"column"``.

    Returns:
        float32 (float64 for float64), shaped as `Quantized.scale`.

    Raises:
        ValueError: another axis.
    """
    if axis not in _DIMS:
        raise ValueError(f"scale axis {axis!r} is not one of {', '.join(_DIMS)}")
    largest = amax(t, _DIMS[axis])
    return largest.div_(largest_code(bits)).clamp_(min=torch.finfo(largest.dtype).tiny)


def quantize(
    t: Tensor,
    bits: int,
    scale: str = "tensor",
    rounding: str = "nearest",
    key: draws.Key | None = None,
    stream: int = draws.SAVED,
    step: Tensor | None = None,
) -> Quantized:
    """Quantize a matrix.

    Equivalent to ``codes = round(t / scale)`` with ``scale = max|t| / largest_code(bits)``.

    Args:
        t: (R, C), floating point.
        bits: 4 or 8.
        scale: ``"tensor"``, ``"token"`` (per row) or ``"column"``.
        rounding: a name in `ROUNDINGS`; ``"stochastic"`` needs `key`.
        key: of the draws.
        stream: of the draws.
        step: a scale to use instead of the one of amax; codes are clamped to their range.

    Raises:
        ValueError: stochastic rounding without a key, or a name that is not accepted.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding {rounding!r} is not one of {', '.join(ROUNDINGS)}")
    step = scale_of(t, bits, scale) if step is None else step
    limit, columns, blocks = largest_code(bits), t.shape[1], row_blocks(t)
    codes = torch.empty(t.shape, dtype=torch.int8, device=t.device)
    inverse = step.reciprocal()
    round_ = ROUNDINGS[rounding](key, stream, t.device)
    by_row = inverse.dim() == 2 and inverse.shape[0] == t.shape[0]
    for rows in blocks:
        v = t[rows].to(step.dtype) * (inverse[rows] if by_row else inverse)
        codes[rows].copy_(round_(v, rows.start * columns).clamp_(-limit, limit))
    return Quantized(codes, step, bits)
