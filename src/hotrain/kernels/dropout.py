"""The Triton kernel that draws the masks of dropout: a hash for each element, packed at once as `saved.Bits.keep` does.

A compiler draws a mask with ten rounds of Philox for an element, writes a byte, and reads it again to pack a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import aligned, cdiv, is_wide, launch
from .noise import hash_bits, stream_words

_BYTES = 512  # per program


@triton.jit
def _mask_kernel(key, out, run, STREAM: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    k0, k1 = stream_words(tl.load(key), STREAM)
    first = tl.program_id(0)
    byte = (first.to(tl.int64) if WIDE else first) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.zeros((BLOCK,), tl.int32)
    for place in tl.static_range(8):
        h = hash_bits((byte + place * run).to(tl.uint32), k0, k1)
        bits |= (h >= LIMIT).to(tl.int32) << place
    tl.store(out + byte, bits.to(tl.uint8), mask=byte < run)


def mask(key: Tensor, run: int, stream: int, limit: int) -> Tensor:
    """Bits of 8 `run` draws: whether `draws.hash_bits`, as an unsigned number, is at least `limit`.

    Args:
        key: int64, ().
        run: bytes.
        stream: of the draws.
        limit: from 0 to 2³² − 1.

    Returns:
        uint8, (run,): bit k of byte j is of draw k · run + j.
    """
    out = torch.empty(run, dtype=torch.uint8, device=key.device)
    constants = {"STREAM": stream, "LIMIT": limit, "BLOCK": _BYTES, "WIDE": is_wide(8 * run)}
    case = (tuple(constants.values()), run == 1, run % 16 == 0, run >= 1 << 31, key.device, aligned(key))
    launch(_mask_kernel, max(1, cdiv(run, _BYTES)), case, (key, out, run), constants, num_warps=4)
    return out
