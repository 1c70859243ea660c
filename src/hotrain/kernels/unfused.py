"""What a compiler fuses and eager mode does not: the codes of a norm, its gradients, and slopes times gradients.

::

    keep_normal     x, μ and r        ──►  codes and scales of x̂ = (x − μ) r, a group a row   `functions.Norm` forward
    norm_gradient   g_y, codes, r, γ  ──►  g_x, and Σ g, Σ g x̂ a channel                      its backward, by rows
    restore         codes, scales     ──►  what was kept                                      `saved.Grouped.restore`
    slope_gradient  g_y, codes        ──►  g_y f'(x)                                          of `functions.Slope`

Each is one pass over what it reads and writes, where the definition in plain PyTorch is twenty. `torch.compile` never
sees these: of the definition it makes one pass itself, with what is around it. Codes are packed in halves of a row
(`saved.pack`), so that a program loads both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .buffers import _LIFT4, _high, _is_wide, _larger, _low, _pair, _scale_of
from .compress import magnitude_bits
from .launch import aligned, cdiv, launch, multiprocessors, power_of_2

_TILE = 2048  # entries of a half of a tile
_WAVES = 4  # programs a multiprocessor of those that leave sums


def _lines(half: int) -> tuple[int, int, int]:
    """(entries of a padded half, rows a tile, warps)."""
    block = power_of_2(half)
    return block, max(1, _TILE // block), 4 if block <= _TILE else 8


@triton.jit
def _keep_normal_kernel(
    x, mean, r, codes, scale, rows,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_MEAN: tl.constexpr, BY_ROW: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """BY_ROW: whether μ and r are a row's, else a channel's."""
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
    found, inverse = _scale_of(tl.max(magnitude_bits(_larger(low, high)), axis=1), _LIFT4)
    tl.store(codes + place * HALF + column[None, :], _pair(low, high, inverse[:, None]), mask=inside)
    tl.store(scale + row, found, mask=live)


def keep_normal(x: Tensor, mean: Tensor | None, r: Tensor, by_row: bool) -> tuple[Tensor, Tensor]:
    """Codes of (x − μ) r in int4 with one group a row, uint8 (rows, 1, C/2), and scales, bfloat16 (rows, 1, 1).

    x: (rows, C), contiguous, C a multiple of 4.  mean, r: (rows,), or (C,) unless `by_row`; mean None for 0.
    """
    rows, columns = x.shape
    half = columns // 2
    codes = torch.empty(rows, 1, half, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, 1, 1, dtype=torch.bfloat16, device=x.device)
    block, each, warps = _lines(half)
    constants = {
        "HALF": half, "BLOCK": block, "ROWS": each, "HAS_MEAN": mean is not None, "BY_ROW": by_row,
        "WIDE": _is_wide(x.numel()),
    }  # fmt: skip
    tensors = (x, r if mean is None else mean, r, codes, scale)
    case = (x.device, rows, tuple(t.dtype for t in tensors), aligned(*tensors), tuple(constants.values()))
    launch(_keep_normal_kernel, cdiv(rows, each), case, (*tensors, rows), constants, num_warps=warps)
    return codes, scale


@triton.jit
def _norm_gradient_kernel(
    g, codes, scale, r, w, g_x, parts, rows, blocks, programs,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_W: tl.constexpr, CENTERED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """CENTERED: whether μ was taken off, so that the gradient's mean is."""
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
        normal_l, normal_h = _low(packed) * step, _high(packed) * step
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


def norm_gradient(
    g: Tensor, codes: Tensor, scale: Tensor, r: Tensor, w: Tensor | None, dtype: torch.dtype, centered: bool
) -> tuple[Tensor, Tensor]:
    """(g_x in `dtype`, [Σ g, Σ g x̂] as (2, C) in float32) of a norm over rows.

    g: (rows, C), contiguous.  codes, scale: of x̂, as `keep_normal` leaves them.  r: (rows,).  w: (C,) or None for 1.
    centered: for layer norm, whose x̂ has no mean.
    """
    rows, columns = g.shape
    half = columns // 2
    block, each, warps = _lines(half)
    blocks = cdiv(rows, each)
    programs = min(blocks, _WAVES * multiprocessors(g.device))
    g_x = torch.empty(rows, columns, dtype=dtype, device=g.device)
    parts = torch.empty(programs, 2, columns, dtype=torch.float32, device=g.device)
    constants = {
        "HALF": half, "BLOCK": block, "ROWS": each, "HAS_W": w is not None, "CENTERED": centered,
        "WIDE": _is_wide(g.numel()),
    }  # fmt: skip
    tensors = (g, codes, scale, r, r if w is None else w, g_x, parts)
    case = (g.device, rows, programs, tuple(t.dtype for t in tensors), aligned(*tensors), tuple(constants.values()))
    launch(_norm_gradient_kernel, programs, case, (*tensors, rows, blocks, programs), constants, num_warps=warps)
    return g_x, parts.sum(0)


@triton.jit
def _slope_gradient_kernel(
    g, marks, g_x, rows, FIRST: tl.constexpr, STEP: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, ACROSS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Slopes are (code + FIRST) STEP. ACROSS: blocks of columns."""
    row = (tl.program_id(0) // ACROSS) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % ACROSS) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < HALF)[None, :]
    place = (row.to(tl.int64) if WIDE else row)[:, None]
    packed = tl.load(marks + place * HALF + column[None, :], mask=inside, other=0).to(tl.int32)
    at = place * (2 * HALF) + column[None, :]
    low = tl.load(g + at, mask=inside, other=0).to(tl.float32) * (((packed & 15).to(tl.float32) + FIRST) * STEP)
    high = tl.load(g + at + HALF, mask=inside, other=0).to(tl.float32) * (
        (((packed >> 4) & 15).to(tl.float32) + FIRST) * STEP
    )
    tl.store(g_x + at, low.to(g_x.dtype.element_ty), mask=inside)
    tl.store(g_x + at + HALF, high.to(g_x.dtype.element_ty), mask=inside)


def slope_gradient(g: Tensor, marks: Tensor, levels: tuple[int, int], factor: float) -> Tensor:
    """g f'(x) factor, as g, with f'(x) in four bits.

    g: (rows, C), contiguous, C even.  marks: uint8 (rows, C/2).  levels: the lowest and how many to one.
    """
    rows, columns = g.shape
    half = columns // 2
    block = min(power_of_2(half), _TILE)
    each = max(1, _TILE // block)
    across = cdiv(half, block)
    g_x = torch.empty_like(g)
    constants = {
        "FIRST": float(levels[0]), "STEP": factor / levels[1], "HALF": half, "BLOCK": block, "ROWS": each,
        "ACROSS": across, "WIDE": _is_wide(g.numel()),
    }  # fmt: skip
    case = (g.device, rows, g.dtype, aligned(g, marks, g_x), tuple(constants.values()))
    programs = cdiv(rows, each) * across
    launch(_slope_gradient_kernel, programs, case, (g, marks, g_x, rows), constants, num_warps=4)
    return g_x


@triton.jit
def _restore_kernel(
    codes, scale, out, groups, BITS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    live = group < groups
    inside = live[:, None] & (column < HALF)[None, :]
    place = (group.to(tl.int64) if WIDE else group)[:, None]
    step = tl.load(scale + group, mask=live, other=0).to(tl.float32)[:, None]
    at = place * (2 * HALF) + column[None, :]
    if BITS == 4:
        packed = tl.load(codes + place * HALF + column[None, :], mask=inside, other=0).to(tl.int32)
        low, high = _low(packed), _high(packed)
    else:
        low = tl.load(codes + at, mask=inside, other=0).to(tl.float32) - 127.0
        high = tl.load(codes + at + HALF, mask=inside, other=0).to(tl.float32) - 127.0
    tl.store(out + at, (low * step).to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + HALF, (high * step).to(out.dtype.element_ty), mask=inside)


def restore(codes: Tensor, scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """What `Grouped(bits).keep` was given, of 4 or 8 bits, in groups that fill the rows: (rows, C).

    codes: uint8 (rows, groups, bytes).  scale: bfloat16 (rows, groups, 1).
    """
    rows, groups, width = codes.shape
    group = width * 8 // bits
    half, number = group // 2, rows * groups
    block, each, warps = _lines(half)
    out = torch.empty(rows, groups * group, dtype=dtype, device=codes.device)
    constants = {"BITS": bits, "HALF": half, "BLOCK": block, "ROWS": each, "WIDE": _is_wide(out.numel())}
    case = (codes.device, number, dtype, aligned(codes, scale, out), tuple(constants.values()))
    launch(_restore_kernel, cdiv(number, each), case, (codes, scale, out, number), constants, num_warps=warps)
    return out
