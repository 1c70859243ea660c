"""Step 3, what forward leaves for backward: a format says its bytes, how a tensor goes in, and how it comes back.

Everything that is kept passes through a `Format`, and every memory figure asks it (and is checked against what
autograd really holds, `hotrain.saved_bytes`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import draws
from .method import Saved
from .quantize import floating, published
from .quantize.integer import Quantized, quantize

# What backward gets: codes with a scale, or the rows themselves.
Kept = Quantized | Tensor


@dataclass(frozen=True)
class Format:
    """A matrix of rows (R, C) of one dtype, kept as `spec` says: itself, int8, e4m3 or packed int4 codes."""

    spec: Saved
    columns: int
    dtype: torch.dtype

    def keep(self, rows: Tensor, key: int) -> tuple[Tensor, ...]:
        """The tensors to save for `rows`, (R, C): one, or codes and scale. Nothing else stays alive."""
        spec = self.spec
        if spec.bits is None:
            return (rows.to(self.dtype),)
        if spec.number == "e4m3":
            kept = floating.quantize(rows, "e4m3")
            return kept.codes, kept.scale
        step = published.sawb_step(rows, spec.bits) if spec.number == "sawb" else None
        axis = "token" if spec.scale == "row" else "tensor"
        kept = quantize(rows, spec.bits, axis, spec.rounding, key, draws.SAVED, step=step).pack()
        return kept.codes, kept.scale

    def restore(self, kept: tuple[Tensor, ...]) -> Kept:
        """What `keep` was given, as precisely as it was kept; codes stay codes."""
        if self.spec.bits is None:
            return kept[0]
        codes, scale = kept
        return Quantized(codes, scale, self.spec.bits, self.columns, packed=self.spec.bits == 4)

    def nbytes(self, rows: int) -> int:
        """Bytes that `keep` keeps for that many rows."""
        if self.spec.bits is None:
            return rows * self.columns * self.dtype.itemsize
        codes = rows * (self.columns if self.spec.bits == 8 else -(-self.columns // 2))
        scale = 8 if self.dtype == torch.float64 else 4
        return codes + scale * (rows if self.spec.scale == "row" else 1)


def values(kept: Kept, dtype: torch.dtype) -> Tensor:
    """The kept rows as numbers, (R, C)."""
    return kept.dequantize(dtype) if isinstance(kept, Quantized) else kept.to(dtype)
