"""Rounding to integers: nearest, stochastic, pseudo-stochastic."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import draws

_STEP16 = 2.0**-16
_HALF16 = 0.5 + 2.0**-17  # int16 noise is centred on −½: this brings (noise + ½)/2¹⁶ + ½ into (0, 1)


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
