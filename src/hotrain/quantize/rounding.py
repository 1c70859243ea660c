"""Rounding to integers: nearest, stochastic, pseudo-stochastic; and dither."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import draws

_STEP16 = 2.0**-16
_HALF16 = 0.5 + 2.0**-17  # int16 noise is centred on −½: this brings (noise + ½)/2¹⁶ + ½ into (0, 1)


def wide(t: Tensor) -> Tensor:
    """t in the dtype of the computation before rounding: float32, or float64 if it is."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def stochastic(v: Tensor, key: draws.Key, stream: int, start: int = 0) -> Tensor:
    """⌊v + u⌋ with u uniform on (0, 1) in steps of 2⁻¹⁶: E[result] = v within 2⁻¹⁷ of a step. In place.

    The noise of an element depends only on (key, stream, start + its index in v). Integers are unchanged.
    """
    noise = draws.noise16(v.numel(), key, stream, v.device, start).view(v.shape)
    return v.add_(noise, alpha=_STEP16).add_(_HALF16).floor_()


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


def round_(v: Tensor, rounding: str, key: draws.Key, stream: int, start: int = 0) -> Tensor:
    """Round v in place.

    Args:
        v: floating point.
        rounding: ``"stochastic"``, ``"nearest"`` (halves to even) or ``"pseudo"``.
        key: of the draws, for stochastic rounding.
        stream: of the draws.
        start: index of v's first element, for stochastic rounding.

    Raises:
        ValueError: another rounding.
    """
    if rounding == "stochastic":
        return stochastic(v, key, stream, start)
    if rounding == "nearest":
        return v.round_()
    if rounding == "pseudo":
        return pseudo(v)
    raise ValueError(f"rounding {rounding!r} is not one of stochastic, nearest, pseudo")


def dither(rows: int, columns: int, device: torch.device, first: int = 0) -> Tensor:
    """Thresholds in [0, 1) for ⌊v + threshold⌋, equally distributed along rows and columns.

    A lattice of two irrational steps (those of the plastic number), modulo 1 by wrapping products of int32. They have
    20 bits, so that their sum with a level, at most 15, is not rounded: a value on a level stays there.

    Args:
        rows: of the result.
        columns: of the result.
        device: of the result.
        first: index of its first column.

    Returns:
        float32, (rows, columns).
    """
    # `| 0`: else a compiler takes the products for index arithmetic, which must not wrap.
    down = (torch.arange(rows, dtype=torch.int32, device=device) | 0) * -0x3EC05657  # 0.7549 of 2³²
    across = (torch.arange(first, first + columns, dtype=torch.int32, device=device) | 0) * -0x6E1EF25B  # 0.5698
    return (((down[:, None] + across) >> 12) & 0xFFFFF).to(torch.float32) * 2.0**-20
