"""Triton kernels for eager mode, where Inductor does not fuse: LayerNorm codes and gradients, activation gradients.

::

    keep_normal     x, μ and r        ──►  codes and per-row scales of x̂ = (x − μ) r          `functions.Norm` forward
    norm_gradient   g_y, codes, r, γ  ──►  g_x, and Σ g, Σ g x̂ per channel                    its backward, by rows
    restore         codes, scales     ──►  the dequantized tensor                             `saved.Grouped.restore`
    slope_gradient  g_y, codes        ──►  g_y f'(x)                                          of `functions.Slope`
    open_bits       x                 ──►  f(x), and a bit where f passes a gradient          the same of ReLU, forward
    bits_gradient   g_y, bits         ──►  g_y there, 0 elsewhere                             and backward
    keep_four       q, k, v, output   ──►  codes and scales of each                           `attention.Attention`
    restore_four    their codes       ──►  q, k, v, output                                    its backward

Each is one pass over its inputs and outputs, where the reference in plain PyTorch has twenty. Compiled graphs do not
use them: Inductor fuses the reference with the operations around it. Codes are packed in halves of a row
(`packing.pack_parts`), so that a program loads both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation_kernels import (
    _LIFT4,
    _RELU6,
    Rows,
    _apply,
    _high,
    _is_wide,
    _larger,
    _low,
    _pair,
    _scale_of,
    keep_groups,
)
from .dispatch import FUNCTIONS
from .launch import aligned, cdiv, launch, multiprocessors, power_of_2
from .quantize_kernels import magnitude_bits

_TILE = 2048  # entries of a half of a tile
_FLAT = 1024  # bytes of bits that a program makes or reads
_WAVES = 4  # programs a multiprocessor of those that leave sums


def _lines(half: int) -> tuple[int, int, int]:
    """(elements of a padded half, rows per tile, warps)."""
    block = power_of_2(half)
    return block, max(1, _TILE // block), 4 if block <= _TILE else 8


@triton.jit
def _keep_normal_kernel(
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
    found, inverse = _scale_of(tl.max(magnitude_bits(_larger(low, high)), axis=1), _LIFT4)
    tl.store(codes + place * HALF + column[None, :], _pair(low, high, inverse[:, None]), mask=inside)
    tl.store(scale + row, found, mask=live)


def keep_normal(x: Tensor, mean: Tensor | None, r: Tensor, by_row: bool) -> tuple[Tensor, Tensor]:
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
    """The gradients of a norm over rows.

    Args:
        g: (rows, C), contiguous.
        codes, scale: of x̂, from `keep_normal`.
        r: (rows,).
        w: γ, (C,), or None for 1.
        centered: whether the norm subtracts the mean, as layer norm does.
        dtype: of g_x.

    Returns:
        g_x in `dtype`, and [Σ g, Σ g x̂] as (2, C) in float32.
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
    """Derivatives are (code + FIRST) STEP. ACROSS is the number of blocks of columns."""
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
    """g f'(x) factor, as g, with f'(x) in 4 bits.

    Args:
        g: (rows, C), contiguous, C even.
        marks: codes of the derivative, uint8 (rows, C/2).
        levels: the lowest level, and the steps from 0 to 1 (`saved.Levels`).
        factor: a number.
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
def _open_bits_kernel(x, y, bits, eighth, F: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """A byte has the bits of eight elements that are an eighth of the tensor apart."""
    at = (tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    inside = at < eighth
    packed = tl.zeros((BLOCK,), tl.int32)
    for k in tl.static_range(8):
        v = tl.load(x + k * eighth + at, mask=inside, other=0).to(tl.float32)
        shut = v <= 0  # a NaN passes, as in PyTorch
        if F == _RELU6:
            shut = shut | (v >= 6.0)
        packed = packed | (tl.where(shut, 0, 1) << k)
        tl.store(y + k * eighth + at, _apply(v, F).to(y.dtype.element_ty), mask=inside)
    tl.store(bits + at, packed.to(tl.uint8), mask=inside)


def open_bits(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """f(x), and where f passes a gradient, as `saved.Bits`: uint8 (elements/8,).

    Args:
        x: contiguous, of a multiple of 8 elements.
        name: ``"relu"`` or ``"relu6"``.
    """
    eighth = x.numel() // 8
    y, bits = torch.empty_like(x), torch.empty(eighth, dtype=torch.uint8, device=x.device)
    constants = {"F": FUNCTIONS[name], "BLOCK": _FLAT, "WIDE": _is_wide(x.numel())}
    case = (x.device, x.dtype, eighth, name, aligned(x, y, bits))
    launch(_open_bits_kernel, cdiv(eighth, _FLAT), case, (x, y, bits, eighth), constants, num_warps=4)
    return y, bits


@triton.jit
def _bits_gradient_kernel(g, bits, g_x, eighth, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    at = (tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    inside = at < eighth
    packed = tl.load(bits + at, mask=inside, other=0).to(tl.int32)
    for k in tl.static_range(8):
        found = tl.load(g + k * eighth + at, mask=inside, other=0)
        # Not a product: where f' is 0 an infinite gradient must become 0.
        tl.store(g_x + k * eighth + at, tl.where(((packed >> k) & 1) != 0, found, 0.0), mask=inside)


def bits_gradient(g: Tensor, bits: Tensor) -> Tensor:
    """g where the bits of `open_bits` are set, 0 elsewhere; g is contiguous."""
    eighth, g_x = bits.numel(), torch.empty_like(g)
    case = (g.device, g.dtype, eighth, aligned(g, bits, g_x))
    constants = {"BLOCK": _FLAT, "WIDE": _is_wide(g.numel())}
    launch(_bits_gradient_kernel, cdiv(eighth, _FLAT), case, (g, bits, g_x, eighth), constants, num_warps=4)
    return g_x


@triton.jit
def _restore_groups(
    block, codes, scale, out, groups, BITS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    group = block * ROWS + tl.arange(0, ROWS)
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


@triton.jit
def _restore_kernel(
    codes, scale, out, groups, BITS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    _restore_groups(tl.program_id(0), codes, scale, out, groups, BITS, HALF, BLOCK, ROWS, WIDE)


def _output(codes: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, int, int]:
    """(the tensor to dequantize to, half of a group, number of groups)."""
    rows, groups, width = codes.shape
    group = width * 8 // bits
    return torch.empty(rows, groups * group, dtype=dtype, device=codes.device), group // 2, rows * groups


def restore(codes: Tensor, scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Dequantize the codes of `Grouped(bits).keep`, in groups without padding.

    Args:
        codes: uint8 (rows, groups, bytes).
        scale: bfloat16 (rows, groups, 1).
        bits: 4 or 8.
        dtype: of the result.

    Returns:
        (rows, C).
    """
    out, half, number = _output(codes, bits, dtype)
    block, each, warps = _lines(half)
    constants = {"BITS": bits, "HALF": half, "BLOCK": block, "ROWS": each, "WIDE": _is_wide(out.numel())}
    case = (codes.device, number, dtype, aligned(codes, scale, out), tuple(constants.values()))
    launch(_restore_kernel, cdiv(number, each), case, (codes, scale, out, number), constants, num_warps=warps)
    return out


# ---- four tensors of an attention at once: two of one format, two of another ----


@triton.jit
def _keep_four_kernel(
    q, k, v, o, q_codes, k_codes, v_codes, o_codes, q_scale, k_scale, v_scale, o_scale,
    q_segments, q_run, q_stride, k_segments, k_run, k_stride, v_segments, v_run, v_stride, o_segments, o_run, o_stride,
    blocks,
    BITS_QK: tl.constexpr, BITS_VO: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    which, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if which == 0:
        keep_groups(block, q, q_codes, q_scale, q_segments, q_run, q_stride, BITS_QK, HALF, BLOCK, ROWS, WIDE)
    elif which == 1:
        keep_groups(block, k, k_codes, k_scale, k_segments, k_run, k_stride, BITS_QK, HALF, BLOCK, ROWS, WIDE)
    elif which == 2:
        keep_groups(block, v, v_codes, v_scale, v_segments, v_run, v_stride, BITS_VO, HALF, BLOCK, ROWS, WIDE)
    else:
        keep_groups(block, o, o_codes, o_scale, o_segments, o_run, o_stride, BITS_VO, HALF, BLOCK, ROWS, WIDE)


def keep_four(tensors: Sequence[Tensor], group: int, bits: tuple[int, int]) -> list[Tensor]:
    """`activation_kernels.keep` of q, k, v and the output: codes and scales of each, eight tensors.

    Args:
        tensors: (..., C) each, of one dtype and one C.
        bits: of the first two, and of the last two.
    """
    rows = [Rows(t, group, bits[place // 2]) for place, t in enumerate(tensors)]
    half = rows[0].half
    block, each, warps = _lines(half)
    blocks = cdiv(max(one.place[0] for one in rows), each)
    constants = {
        "BITS_QK": bits[0], "BITS_VO": bits[1], "HALF": half, "BLOCK": block, "ROWS": each,
        "WIDE": any(one.wide for one in rows),
    }  # fmt: skip
    places = [word for one in rows for word in one.place]
    read = [one.x for one in rows]
    case = (read[0].device, read[0].dtype, tuple(places), aligned(*read), tuple(constants.values()))
    given = (*read, *(one.codes for one in rows), *(one.scale for one in rows), *places, blocks)
    launch(_keep_four_kernel, 4 * blocks, case, given, constants, num_warps=warps)
    return [part for one in rows for part in (one.codes, one.scale)]


@triton.jit
def _restore_four_kernel(
    q_codes, k_codes, v_codes, o_codes, q_scale, k_scale, v_scale, o_scale, q, k, v, o,
    q_groups, k_groups, v_groups, o_groups, blocks,
    BITS_QK: tl.constexpr, BITS_VO: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    which, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if which == 0:
        _restore_groups(block, q_codes, q_scale, q, q_groups, BITS_QK, HALF, BLOCK, ROWS, WIDE)
    elif which == 1:
        _restore_groups(block, k_codes, k_scale, k, k_groups, BITS_QK, HALF, BLOCK, ROWS, WIDE)
    elif which == 2:
        _restore_groups(block, v_codes, v_scale, v, v_groups, BITS_VO, HALF, BLOCK, ROWS, WIDE)
    else:
        _restore_groups(block, o_codes, o_scale, o, o_groups, BITS_VO, HALF, BLOCK, ROWS, WIDE)


def restore_four(kept: Sequence[Tensor], bits: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """`restore` of the codes of `keep_four`, or of its first three: (rows, C) each."""
    outputs = [_output(codes, bits[place // 2], dtype) for place, codes in enumerate(kept[::2])]
    half, numbers = outputs[0][1], [number for _, _, number in outputs]
    block, each, warps = _lines(half)
    blocks = cdiv(max(numbers), each)
    out = [output[0] for output in outputs]
    constants = {
        "BITS_QK": bits[0], "BITS_VO": bits[1], "HALF": half, "BLOCK": block, "ROWS": each,
        "WIDE": any(_is_wide(t.numel()) for t in out),
    }  # fmt: skip
    missing = 4 - len(out)  # which no program asks for
    columns = (list(kept[::2]), list(kept[1::2]), out)
    tensors = [t for column in columns for t in (*column, *column[-1:] * missing)]
    numbers += numbers[-1:] * missing
    case = (out[0].device, dtype, tuple(numbers), aligned(*tensors), tuple(constants.values()), missing)
    launch(_restore_four_kernel, len(out) * blocks, case, (*tensors, *numbers, blocks), constants, num_warps=warps)
    return out
