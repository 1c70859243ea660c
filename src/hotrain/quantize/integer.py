"""Symmetric integer quantization: value ≈ scale × code, codes from −(2^(b−1)−1) to 2^(b−1)−1, so zero is exact.

Rounding to integers is to nearest, stochastic or pseudo-stochastic; two 4-bit codes are packed into a byte.

Scales are per tensor, per row (a token, or a token-frequency) or per column. Edge cases are specified: zeros give zero
codes; a scale never falls below the smallest normal number, so denormals round to zero; a NaN or infinity makes its
scale non-finite, and with it everything that the scale multiplies: a non-finite gradient is never quantized away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import draws
from ..private import fakes

# On a CPU the passes of a quantizer run block after block of rows, small enough to stay in each core's L2 cache.
_BLOCK = 1 << 15  # elements per thread
_DIMS = {"tensor": None, "token": 1, "column": 0}

_STEP16 = 2.0**-16
_HALF16 = 0.5 + 2.0**-17  # int16 noise is centred on −½: this brings (noise + ½)/2¹⁶ + ½ into (0, 1)


def wide(t: Tensor) -> Tensor:
    """t in the dtype of the computation before rounding: float32, or float64 if it is."""
    if t.dtype in (torch.float32, torch.float64):
        return t
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
    # An even number of rows per block: pairs of neighbours share a hash (draws.noise).
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


# ---- rounding to integers ----


def stochastic(key: draws.Key | None, stream: int, device: torch.device) -> Callable[[Tensor, int], Tensor]:
    """⌊v + u⌋ with u uniform on (0, 1) in steps of 2⁻¹⁶, as in `ROUNDINGS`: E[result] = v within 2⁻¹⁷ of a step.

    The noise of an element depends only on (key, stream, start + its index in v). Integers are unchanged.

    Raises:
        ValueError: there is no key.
    """
    if key is None:
        raise ValueError("quantize: stochastic rounding needs a key (hotrain.draws)")
    noise = draws.noise(key, stream, device)
    return lambda v, start: v.add_(noise(start, v.numel()).view(v.shape), alpha=_STEP16).add_(_HALF16).floor_()


def pseudo(v: Tensor) -> Tensor:
    """Pseudo-stochastic rounding: the low bits of the fraction decide whether its high bits round up. In place.

    With a = |v|, i = ⌊a⌋, F = ⌊(a − i)·2²²⌋, p = F >> 11, t = F & 0x7FF: sign(v)·(i + (p > t)). The rule of NITI
    corrected for floats (docs/maths.md): it needs no generator but takes its noise from the mantissa, so v
    must have more bits than bf16: float32 computed from a transform does, raw bf16 values always round up.
    """
    magnitude = v.abs().to(torch.float32)
    whole = magnitude.floor()
    fraction = ((magnitude - whole) * 2**22).to(torch.int32)
    up = (fraction >> 11) > (fraction & 0x7FF)
    return v.copy_((whole + up).to(v.dtype).copysign(v))


# Name → (key, stream, device) → the rounding as a function of (v, start), in place: v is floating point, and start the
# index of its first element in the tensor that is rounded.
ROUNDINGS: dict[str, Callable[[draws.Key | None, int, torch.device], Callable[[Tensor, int], Tensor]]] = {
    "nearest": lambda *_: lambda v, _: v.round_(),  # halves to even
    "stochastic": stochastic,
    "pseudo": lambda *_: lambda v, _: pseudo(v),
}


# ---- codes ----


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
    inverse = inverse if inverse.dim() else inverse.view(1)  # a number would leave the product in t's dtype
    round_ = ROUNDINGS[rounding](key, stream, t.device)
    by_row = inverse.dim() == 2 and inverse.shape[0] == t.shape[0]
    for rows in blocks:
        v = t[rows] * (inverse[rows] if by_row else inverse)
        codes[rows].copy_(round_(v, rows.start * columns).clamp_(-limit, limit))
    return Quantized(codes, step, bits)


def pack(codes: Tensor) -> Tensor:
    """4-bit codes, two neighbours in a byte, even columns in the low half; an odd last column is paired with zero.

    int8 codes in [−8, 7], (R, C), to uint8, (R, ⌈C/2⌉).
    """
    if codes.shape[1] % 2:
        codes = F.pad(codes, (0, 1))
    nibbles = codes & 0xF
    return nibbles[:, 0::2].bitwise_or(nibbles[:, 1::2] << 4).view(dtype=torch.uint8)


def unpack(packed: Tensor, columns: int) -> Tensor:
    """The int8 codes that `pack` took: uint8, (R, ⌈columns/2⌉), to int8, (R, columns)."""
    signed = packed.view(torch.int8)
    codes = signed.new_empty(packed.shape[0], 2 * packed.shape[1])
    codes[:, 0::2] = (signed << 4) >> 4  # arithmetic shifts on int8 extend the sign
    codes[:, 1::2] = signed >> 4
    return codes[:, :columns]
