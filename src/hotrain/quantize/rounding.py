"""Rounding to integers: nearest, stochastic, pseudo-stochastic."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import draws

_STEP16 = 2.0**-16
_HALF16 = 0.5 + 2.0**-17  # int16 noise is centred on −½: this brings (noise + ½)/2¹⁶ + ½ into (0, 1)


def stochastic(key: draws.Key, stream: int, device: torch.device) -> Callable[[Tensor, int], Tensor]:
    """⌊v + u⌋ with u uniform on (0, 1) in steps of 2⁻¹⁶: E[result] = v within 2⁻¹⁷ of a step.

    The noise of an element depends only on (key, stream, start + its index in v). Integers are unchanged.
    """
    noise = draws.noise(key, stream, device)
    return lambda v, start: v.add_(noise(start, v.numel()).view(v.shape), alpha=_STEP16).add_(_HALF16).floor_()


def pseudo(v: Tensor, _: int = 0) -> Tensor:
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


def rounding_of(name: str, key: draws.Key | None, stream: int, device: torch.device) -> Callable[[Tensor, int], Tensor]:
    """The rounding of that name as a function of (v, start), which rounds v in place.

    Args:
        name: ``"stochastic"`` (needs `key`), ``"nearest"`` (halves to even) or ``"pseudo"``.
        key: of the draws.
        stream: of the draws.
        device: of v, which is floating point; start: the index of its first element in the tensor that is rounded.

    Raises:
        ValueError: stochastic rounding without a key, or another name.
    """
    if name == "stochastic":
        if key is None:
            raise ValueError("quantize: stochastic rounding needs a key (hotrain.draws)")
        return stochastic(key, stream, device)
    if name == "nearest":
        return lambda v, _: v.round_()
    if name == "pseudo":
        return pseudo
    raise ValueError(f"rounding {name!r} is not one of stochastic, nearest, pseudo")
