"""The kernel of `published.luq`: codes of g_y, a sign and a power of two or zero."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import aligned, cdiv, is_wide, launch
from .noise import hash_bits, stream_words

_BLOCK = 1024  # entries per program


@triton.jit
def _luq_kernel(
    t, out, alpha, key, count, C, P, STREAM: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    k0, k1 = stream_words(tl.load(key), STREAM)
    first = tl.program_id(0)
    i = (first.to(tl.int64) if WIDE else first) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    v = tl.load(t + i, mask=inside, other=0.0).to(tl.float32)
    y = tl.div_rn(tl.abs(v), tl.load(alpha))
    # The number of the entry in the tensor as its axes are named: channels before positions.
    row, c = i // C, i % C
    index = (row // P * C + c) * P + row % P
    h = hash_bits((index >> 1).to(tl.uint32), k0, k1).to(tl.int32, bitcast=True)
    noise = tl.where((index & 1) == 0, h << 16 >> 16, h >> 16).to(tl.float32)
    u = (noise + 32768.5) * (1.0 / 65536)
    # The exponent bits alone are the power of two that is not above y.
    floor = (tl.maximum(y, 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    below, above = tl.where(y < 1, 0.0, floor), tl.where(y < 1, 1.0, 2 * floor)
    code = tl.minimum(tl.where(u * (above - below) < y - below, above, below), 128.0)
    tl.store(out + i, tl.where(v < 0, -code, code).to(out.dtype.element_ty), mask=inside)


def luq(t: Tensor, alpha: Tensor, word: Tensor, stream: int, dtype: torch.dtype) -> Tensor:
    """The codes of `published.luq` in `dtype`, which holds them exactly.

    Args:
        t: (*, O), or an image (B, O, H, W), read in the order of its memory where that is channels-last.
        alpha: float32, ().
        word: the key, int64, ().
        stream: of the draws.
    """
    image = t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)
    t = t if image else t.contiguous()
    out = torch.empty_like(t, dtype=dtype)
    channels, positions = (t.shape[1], t.shape[2] * t.shape[3]) if image else (t.shape[-1], 1)
    sizes = t.numel(), channels, positions
    constants = {"STREAM": stream, "BLOCK": _BLOCK, "WIDE": is_wide(t.numel())}
    case = (stream, sizes, t.dtype, dtype, t.device, aligned(t, out, alpha, word))
    launch(_luq_kernel, max(1, cdiv(t.numel(), _BLOCK)), case, (t, out, alpha, word, *sizes), constants, num_warps=4)
    return out
