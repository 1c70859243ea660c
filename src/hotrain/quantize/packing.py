"""Packing of two neighbouring 4-bit codes into a byte, even columns in the low half."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def pack(codes: Tensor) -> Tensor:
    """int8 codes in [−8, 7], (R, C), to uint8, (R, ⌈C/2⌉); an odd last column is paired with zero."""
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
