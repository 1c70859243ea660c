"""Triton kernels of norms over rows, for eager mode; compiled, Inductor fuses the reference with its neighbours.

::

    pack      x, μ and r        ──►  codes and per-row scales of x̂ = (x − μ) r
    gradient  g_y, codes, r, γ  ──►  g_x, and Σ g, Σ g x̂ per channel

Each is one pass over its inputs and outputs, where the reference in plain PyTorch has twenty.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import LIFT4, high_codes, larger, low_codes, pair, scale_of, tile_of
from .launch import aligned, cdiv, is_wide, launch, multiprocessors
from .quantize_kernels import magnitude_bits

_WAVES = 4  # programs per multiprocessor of those that leave sums


@triton.jit
def _pack_kernel(
    x, mean, r, codes, scale, rows,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_MEAN: tl.constexpr, BY_ROW: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """BY_ROW is whether μ and r are per row, else per channel."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    live, there = row < rows, column < HALF
    inside = live[:, None] & there[None, :]
    place = (row.to(tl.int64) if WIDE else row)[:, None]
    at = x + place * (2 * HALF) + column[None, :]
    low = tl.load(at, mask=inside, other=0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0).to(tl.float32)
    if BY_ROW:
        if HAS_MEAN:
            middle = tl.load(mean + row, mask=live, other=0).to(tl.float32)[:, None]
            low, high = low - middle, high - middle
        factor = tl.load(r + row, mask=live, other=0).to(tl.float32)[:, None]
        low, high = low * factor, high * factor
    else:
        if HAS_MEAN:
            low = low - tl.load(mean + column, mask=there, other=0).to(tl.float32)[None, :]
            high = high - tl.load(mean + HALF + column, mask=there, other=0).to(tl.float32)[None, :]
        low = low * tl.load(r + column, mask=there, other=0).to(tl.float32)[None, :]
        high = high * tl.load(r + HALF + column, mask=there, other=0).to(tl.float32)[None, :]
    low, high = tl.where(inside, low, 0.0), tl.where(inside, high, 0.0)
    found, inverse = scale_of(tl.max(magnitude_bits(larger(low, high)), axis=1), LIFT4)
    tl.store(codes + place * HALF + column[None, :], pair(low, high, inverse[:, None]), mask=inside)
    tl.store(scale + row, found, mask=live)


def pack(x: Tensor, mean: Tensor | None, r: Tensor, by_row: bool) -> tuple[Tensor, Tensor]:
    """int4 codes of (x − μ) r with per-row scales.

    Args:
        x: (rows, C), contiguous, C a multiple of 4.
        mean, r: (rows,), or (C,) unless `by_row`; mean None for 0.
        by_row: whether mean and r are per row.

    Returns:
        Codes, uint8 (rows, 1, C/2), and scales, bfloat16 (rows, 1, 1).
    """
    rows, columns = x.shape
    half = columns // 2
    codes = torch.empty(rows, 1, half, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, 1, 1, dtype=torch.bfloat16, device=x.device)
    block, each, warps = tile_of(half)
    constants = {
        "HALF": half, "BLOCK": block, "ROWS": each, "HAS_MEAN": mean is not None, "BY_ROW": by_row,
        "WIDE": is_wide(x.numel()),
    }  # fmt: skip
    tensors = (x, r if mean is None else mean, r, codes, scale)
    case = (x.device, rows, tuple(t.dtype for t in tensors), aligned(*tensors), tuple(constants.values()))
    launch(_pack_kernel, cdiv(rows, each), case, (*tensors, rows), constants, num_warps=warps)
    return codes, scale


@triton.jit
def _gradient_kernel(
    g, codes, scale, r, w, g_x, parts, rows, blocks, programs,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_W: tl.constexpr, CENTERED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """CENTERED is whether μ was subtracted, so that the gradient's mean is subtracted too."""
    column = tl.arange(0, BLOCK)
    there = column < HALF
    w_l = tl.full((1, BLOCK), 1.0, tl.float32)
    w_h = tl.full((1, BLOCK), 1.0, tl.float32)
    if HAS_W:
        w_l = tl.load(w + column, mask=there, other=0).to(tl.float32)[None, :]
        w_h = tl.load(w + HALF + column, mask=there, other=0).to(tl.float32)[None, :]
    g_l = tl.zeros((ROWS, BLOCK), tl.float32)
    g_h = tl.zeros((ROWS, BLOCK), tl.float32)
    n_l = tl.zeros((ROWS, BLOCK), tl.float32)
    n_h = tl.zeros((ROWS, BLOCK), tl.float32)
    for number in tl.range(tl.program_id(0), blocks, programs):
        row = number * ROWS + tl.arange(0, ROWS)
        live = row < rows
        inside = live[:, None] & there[None, :]
        place = (row.to(tl.int64) if WIDE else row)[:, None]
        at = place * (2 * HALF) + column[None, :]
        low = tl.load(g + at, mask=inside, other=0).to(tl.float32)
        high = tl.load(g + at + HALF, mask=inside, other=0).to(tl.float32)
        packed = tl.load(codes + place * HALF + column[None, :], mask=inside, other=0).to(tl.int32)
        step = tl.load(scale + row, mask=live, other=0).to(tl.float32)[:, None]
        factor = tl.load(r + row, mask=live, other=0).to(tl.float32)[:, None]
        normal_l, normal_h = low_codes(packed) * step, high_codes(packed) * step
        g_l += low
        g_h += high
        n_l += tl.where(inside, low * normal_l, 0.0)
        n_h += tl.where(inside, high * normal_h, 0.0)
        low, high = low * w_l, high * w_h
        along = tl.where(inside, low * normal_l, 0.0) + tl.where(inside, high * normal_h, 0.0)
        slope = (tl.sum(along, axis=1) / (2 * HALF))[:, None]
        out_l, out_h = low - normal_l * slope, high - normal_h * slope
        if CENTERED:
            mean = (tl.sum(low + high, axis=1) / (2 * HALF))[:, None]
            out_l, out_h = out_l - mean, out_h - mean
        tl.store(g_x + at, (out_l * factor).to(g_x.dtype.element_ty), mask=inside)
        tl.store(g_x + at + HALF, (out_h * factor).to(g_x.dtype.element_ty), mask=inside)
    left = parts + tl.program_id(0).to(tl.int64) * (4 * HALF) + column
    tl.store(left, tl.sum(g_l, axis=0), mask=there)
    tl.store(left + HALF, tl.sum(g_h, axis=0), mask=there)
    tl.store(left + 2 * HALF, tl.sum(n_l, axis=0), mask=there)
    tl.store(left + 3 * HALF, tl.sum(n_h, axis=0), mask=there)


def gradient(
    g: Tensor, codes: Tensor, scale: Tensor, r: Tensor, w: Tensor | None, dtype: torch.dtype, centered: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of a norm over rows.

    Args:
        g: (rows, C), contiguous.
        codes, scale: of x̂, from `pack`.
        r: (rows,).
        w: γ, (C,), or None for 1.
        centered: whether the norm subtracts the mean, as layer norm does.
        dtype: of g_x.

    Returns:
        g_x in `dtype`, and [Σ g, Σ g x̂] as (2, C) in float32.
    """
    rows, columns = g.shape
    half = columns // 2
    block, each, warps = tile_of(half)
    blocks = cdiv(rows, each)
    programs = min(blocks, _WAVES * multiprocessors(g.device))
    g_x = torch.empty(rows, columns, dtype=dtype, device=g.device)
    parts = torch.empty(programs, 2, columns, dtype=torch.float32, device=g.device)
    constants = {
        "HALF": half, "BLOCK": block, "ROWS": each, "HAS_W": w is not None, "CENTERED": centered,
        "WIDE": is_wide(g.numel()),
    }  # fmt: skip
    tensors = (g, codes, scale, r, r if w is None else w, g_x, parts)
    case = (g.device, rows, programs, tuple(t.dtype for t in tensors), aligned(*tensors), tuple(constants.values()))
    launch(_gradient_kernel, programs, case, (*tensors, rows, blocks, programs), constants, num_warps=warps)
    return g_x, parts.sum(0)
