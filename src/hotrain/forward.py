"""The forward product in low precision, for a method that asks for it: ``y = Q(x) Q(w)ᵀ + b``.

The papers keep y exact, and so do the presets. With ``forward="fp8"`` both operands are e4m3 codes with per-tensor
scales; with ``"int8"`` x has per-token and w per-output-channel scales. Rounding is to nearest. The gradients stay the
method's own, of the exact product, with respect to x and w themselves.
"""

from __future__ import annotations

from torch import Tensor

from .products import code_matmul
from .quantize import QUANTIZERS
from .quantize.integer import wide


def product(x: Tensor, w: Tensor, b: Tensor | None, number: str) -> Tensor:
    """Q(x) Q(w)ᵀ + b.

    Args:
        x: (T, I), floating point.
        w: (O, I), floating point.
        b: (O,) or None.
        number: ``"fp8"`` or ``"int8"``.

    Returns:
        (T, O), in x's dtype.
    """
    form, axis = ("e4m3", "tensor") if number == "fp8" else ("int", "token")
    left, right = (QUANTIZERS[form](wide(t), 8, axis) for t in (x, w))
    y = code_matmul(left.codes, right.codes.T, 16, left.scale.dtype) * left.scale
    y = y * (right.scale.T if right.scale.dim() else right.scale)
    return (y if b is None else y + b.to(y.dtype)).to(x.dtype)
