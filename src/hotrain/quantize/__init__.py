"""Quantizers: symmetric integers, fp8, rounding modes, and packing of 4-bit codes."""

from __future__ import annotations

from collections.abc import Callable

from . import floating, integer
from .integer import Quantized

QUANTIZERS: dict[str, Callable[..., Quantized]] = {
    "int": integer.quantize,
    **{number: lambda t, *_, number=number: floating.quantize(t, number) for number in floating.DTYPES},
}
"""Number format of a method → Q, with the arguments of `integer.quantize`; fp8 is always rounded to nearest and has a
per-tensor scale."""
