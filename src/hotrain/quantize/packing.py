"""Packing of codes into bytes, in two orders.

`pack`: two 4-bit codes of neighbours, even columns in the low half. `pack_parts`: codes of several parts of the last
axis, so that a compiler fuses packing and unpacking into the operations before and after them.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def pack_parts(codes: Sequence[Tensor], bits: int) -> Tensor:
    """Pack 8/bits tensors of codes in 0 … 2^bits − 1, each (..., n), into one: uint8, (..., n), lowest bits first."""
    packed = codes[0].to(_UINT8)
    for place, part in enumerate(codes[1:], 1):
        packed = packed | (part.to(_UINT8) << (bits * place))
    return packed


def unpack_parts(packed: Tensor, bits: int) -> Tensor:
    """The parts that `pack_parts` took: uint8, (..., 8/bits, n).

    The caller flattens them, once and at the end: after two steps a compiler makes the index to read from a remainder
    of a remainder, and then reads byte by byte.
    """
    if bits == 8:
        return packed.unsqueeze(-2)
    # Not cached: a compiler that traces this needs its own tensor.
    shifts = bits * torch.arange(8 // bits, dtype=_UINT8, device=packed.device).unsqueeze(-1)
    return (packed.unsqueeze(-2) >> shifts) & (2**bits - 1)


def parts(t: Tensor, bits: int) -> list[tuple[int, Tensor]]:
    """The parts of the last axis that `pack_parts` packs into one, each with its first index.

    They are cut before they are quantized: a compiler would write codes that several parts are cut from to memory.
    """
    each = 8 // bits
    n = t.shape[-1] // each
    return [(place * n, t[..., place * n : (place + 1) * n]) for place in range(each)]
