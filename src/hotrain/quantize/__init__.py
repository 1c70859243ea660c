"""Quantizers: symmetric integers, fp8, rounding modes, and packing of 4-bit codes."""

from __future__ import annotations

from torch import Tensor

from .. import draws
from . import floating, integer
from .integer import Quantized


def encode(
    t: Tensor,
    number: str,
    bits: int,
    scale: str = "tensor",
    rounding: str = "nearest",
    key: draws.Key | None = None,
    stream: int = draws.SAVED,
) -> Quantized:
    """Q(t): the codes of a matrix in a number format of a method.

    Args:
        t: (R, C), floating point.
        number: ``"e4m3"`` or ``"e5m2"``, always to nearest and with a per-tensor scale; ``"int"``.
        bits: and the other arguments: as in `integer.quantize`.
    """
    if number in floating.DTYPES:
        return floating.quantize(t, number)
    return integer.quantize(t, bits, scale, rounding, key, stream)
