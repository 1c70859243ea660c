"""Packing of two 4-bit codes per byte: even columns in the low half, odd ones in the high half."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_INT8, _UINT8 = torch.int8, torch.uint8


def pack(codes: Tensor) -> Tensor:
    """int8 codes in [−8, 7], (R, C), to uint8, (R, ⌈C/2⌉); an odd last column is paired with zero."""
    if codes.shape[1] % 2:
        codes = F.pad(codes, (0, 1))
    nibbles = codes & 0xF
    return nibbles[:, 0::2].bitwise_or(nibbles[:, 1::2] << 4).view(dtype=_UINT8)


def unpack(packed: Tensor, columns: int) -> Tensor:
    """The int8 codes that `pack` took: uint8, (R, ⌈columns/2⌉), to int8, (R, columns)."""
    signed = packed.view(_INT8)
    codes = signed.new_empty(packed.shape[0], 2 * packed.shape[1])
    codes[:, 0::2] = (signed << 4) >> 4  # arithmetic shifts on int8 extend the sign
    codes[:, 1::2] = signed >> 4
    return codes[:, :columns]
