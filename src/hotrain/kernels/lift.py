"""The kernel that restores x̂ = PᵀP x from the saved codes, for products that need x at its own positions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..transform.tokens import Layout
from .launch import INTERPRETED, aligned, cdiv, launch, power_of_2
from .quantize_kernels import _index, _walsh_rows
from .rows import of_layout

_TILES = 4  # of 16 tokens, per program
_CHANNELS = 128  # per program, at most


@triton.jit
def _lift_kernel(
    codes, pitch, index, table, scale, out, C, total, singles, tile_blocks, dense_rows, chunks,
    TILES: tl.constexpr, RANK: tl.constexpr, RANKP: tl.constexpr, FIXED: tl.constexpr, GAIN: tl.constexpr,
    SAMPLED: tl.constexpr, CYCLE: tl.constexpr, STREAM: tl.constexpr, SQUARE: tl.constexpr, LINE: tl.constexpr,
    BC: tl.constexpr, WIDE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    SLOTS: tl.constexpr = TILES * 16
    ROWS: tl.constexpr = TILES * RANKP
    KEPT: tl.constexpr = codes.dtype.element_ty
    # Codes of 8 bits and ±1 are exact in bfloat16.
    DTYPE: tl.constexpr = tl.float32 if UPCAST else (tl.bfloat16 if KEPT.primitive_bitwidth == 8 else KEPT)
    b, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    s, j = tl.arange(0, SLOTS), tl.arange(0, ROWS)
    k = j % RANKP
    dense = b >= tile_blocks
    token = tl.load(index + b * SLOTS + s)
    # The slots of a dense block beyond its rows may repeat a token.
    inside = (token >= 0) & ((s < ROWS) | (b < tile_blocks))
    p, real = _walsh_rows(
        b, table, table, 0, 0, 0, s, j, k, total, singles, tile_blocks, False,
        ROWS, RANK, RANKP, TILES, False, FIXED, SAMPLED, CYCLE, STREAM, SQUARE, LINE,
    )  # fmt: skip
    r = tl.where(dense, dense_rows + (b - tile_blocks) * ROWS + j, (b * TILES + j // RANKP) * RANK + k)
    c = chunk * BC + tl.arange(0, BC)
    column = (c.to(tl.int64) if WIDE else c) * pitch
    z = tl.load(codes + column[:, None] + r[None, :], mask=(c < C)[:, None] & real[None, :], other=0.0)
    z = tl.trans(z.to(DTYPE))
    if SAMPLED:
        drawn = ((k >= FIXED) & (b < tile_blocks))[:, None]
        always, sometimes = tl.where(drawn, 0.0, p), tl.where(drawn, p, 0.0)
        x = tl.dot(tl.trans(always.to(DTYPE)), z, input_precision="ieee")
        x += GAIN * tl.dot(tl.trans(sometimes.to(DTYPE)), z, input_precision="ieee")
    else:
        x = tl.dot(tl.trans(p.to(DTYPE)), z, input_precision="ieee")
    x = x * (tl.where(dense, 1.0, 0.25) * tl.load(scale))
    row = (token.to(tl.int64) if WIDE else token) * C
    to = out + row[:, None] + c[None, :]
    tl.store(to, x.to(out.dtype.element_ty), mask=inside[:, None] & (c < C)[None, :])


def lift(codes: Tensor, scale: Tensor, rows: Tensor, lay: Layout, columns: int, dtype: torch.dtype) -> Tensor:
    """x̂ from what `dispatch.keep` returned.

    Args:
        codes: (C', R'), of P x, transposed.
        scale: float32, (1,), of the codes.
        rows: the natural rows that each tile keeps, uint8.
        lay: of x's tokens.
        columns: C, at most C'.
        dtype: of the result.

    Returns:
        (T, C).
    """
    rank = lay.lines.rank
    rankp = max(power_of_2(rank), 16 // _TILES)
    index, _ = _index(lay, _TILES, _TILES * rankp, codes.device)
    total, singles = lay.samples * lay.tiles, lay.samples * lay.dense
    bc = min(_CHANNELS, max(16, power_of_2(columns)))
    chunks, tokens = cdiv(columns, bc), lay.samples * lay.tokens
    out = torch.empty(tokens, columns, dtype=dtype, device=codes.device)
    constants = {
        "TILES": _TILES, "RANK": rank, "RANKP": rankp, "GAIN": lay.lines.gain, **of_layout(lay), "BC": bc,
        "WIDE": max(tokens * columns, codes.numel()) >= 1 << 31, "UPCAST": INTERPRETED,
    }  # fmt: skip
    args = (
        codes, codes.stride(0), index, rows, scale, out, columns, total, singles, cdiv(total, _TILES), total * rank,
        chunks,
    )  # fmt: skip
    case = (lay, columns, codes.dtype, dtype, codes.device, aligned(codes, rows, scale))
    launch(_lift_kernel, len(index) * chunks, case, args, constants, num_warps=4)
    return out
