"""Rounding to integers: nearest, stochastic, pseudo-stochastic."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import draws

_STEP16 = 2.0**-16
_HALF16 = 0.5 + 2.0**-17  # int16 noise is centred on −½: this brings (noise + ½)/2¹⁶ + ½ into (0, 1)


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
