"""Triton kernels of norms over rows.

::

    channels  some rows of x, γ         ──►  c and γ c per channel
    pack      x, μ, r and c             ──►  codes and per-row scales of x̂ / c, x̂ = (x − μ) r
    forward   x (+ bias, branch · factor), γ, β  ──►  their sum, y, r, codes and per-row scales of x̂ / c, c and γ c
    gradient  g_y, codes, r, c, γ c     ──►  g_x (+ the gradient of a shortcut), and Σ g, Σ g x̂ per channel

Each but the first, which reads few rows, is one pass over its inputs and outputs, where the reference in plain PyTorch
has twenty. Eager mode packs what PyTorch's norm has read; compiled graphs run `forward`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantize.channels import sampled
from .codes import LIFT4, high_codes, larger, low_codes, pair, sampled_rows, scale_of, tile_of
from .launch import Plan, aligned, cdiv, is_wide, launch, multiprocessors, power_of_2
from .quantize_kernels import magnitude_bits

# Chosen on an H200 for 192 to 4096 channels: 80 to 90 % of a copy's rate, where other choices fall to a third of it.
_TILE = 512  # elements of a half of a tile of `forward`
_SUMMED_TILE = 256  # of `gradient`, whose sums of channels stay in registers
_ROUNDS = {torch.float16: 1, torch.bfloat16: 2}


def _of_gradient(block: int) -> tuple[int, int, int, int]:
    """Rows of a tile of `gradient`, warps, loads in flight, programs of a multiprocessor, by the columns of a half."""
    if block <= 256:
        return _SUMMED_TILE // block, 1, 2, 16
    return 1, block // 256, 3 if block > 1024 else 1, 8 if block == 512 else 4


@triton.jit
def _inverse(c):
    """1 / c of powers of two, exactly."""
    return (0x7F000000 - c.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _pack_kernel(
    x, mean, r, channels, codes, scale, rows,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_MEAN: tl.constexpr, BY_ROW: tl.constexpr,
    DIVIDES: tl.constexpr, WIDE: tl.constexpr,
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
    if DIVIDES:
        low *= _inverse(tl.load(channels + column, mask=there, other=1))[None, :]
        high *= _inverse(tl.load(channels + HALF + column, mask=there, other=1))[None, :]
    low, high = tl.where(inside, low, 0.0), tl.where(inside, high, 0.0)
    found, inverse = scale_of(tl.max(magnitude_bits(larger(low, high)), axis=1), LIFT4)
    tl.store(codes + place * HALF + column[None, :], pair(low, high, inverse[:, None]), mask=inside)
    tl.store(scale + row, found, mask=live)


@functools.lru_cache(maxsize=1024)
def _packs(
    device: torch.device, rows: int, columns: int, dtypes: Any, centered: bool, by_row: bool, divides: bool
) -> Plan:
    block, each, warps = tile_of(columns // 2)
    constants = {
        "HALF": columns // 2, "BLOCK": block, "ROWS": each, "HAS_MEAN": centered, "BY_ROW": by_row,
        "DIVIDES": divides, "WIDE": is_wide(rows * columns),
    }  # fmt: skip
    return Plan(_pack_kernel, cdiv(rows, each), constants, (rows,), warps, given=4)


def pack(
    x: Tensor, mean: Tensor | None, r: Tensor, by_row: bool, channels: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """int4 codes of (x − μ) r / c with per-row scales.

    Args:
        x: (..., C), contiguous, C a multiple of 4.
        mean, r: a number for each row, or (C,) unless `by_row`, contiguous; mean None for 0.
        by_row: whether mean and r are per row.
        channels: from the function of that name, whose first row is c; None for 1.

    Returns:
        Codes, uint8 (rows, 1, C/2), and scales, bfloat16 (rows, 1, 1).
    """
    device, columns, means = x.device, x.shape[-1], r if mean is None else mean
    rows = x.numel() // columns
    codes = torch.empty(rows, 1, columns // 2, dtype=torch.uint8, device=device)
    scale = torch.empty(rows, 1, 1, dtype=torch.bfloat16, device=device)
    dtypes = x.dtype, means.dtype, r.dtype
    plan = _packs(device, rows, columns, dtypes, mean is not None, by_row, channels is not None)
    plan.run(x, means, r, r if channels is None else channels, codes, scale)
    return codes, scale


@triton.jit
def _factors(
    factors, row, column, inside, live, span, times, COLUMNS: tl.constexpr, BITS: tl.constexpr,
    BY_CHANNEL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`times` the number of each `span` rows, of each channel, or where a bit is set, of eight runs of such rows."""
    if BITS:
        run = row // span
        place = row - run * span
        at = (place.to(tl.int64) if WIDE else place)[:, None] * COLUMNS + column[None, :]
        flags = tl.load(factors + at, mask=inside, other=0).to(tl.int32) >> run[:, None]
        return (flags & 1).to(tl.float32) * times
    elif BY_CHANNEL:
        return tl.load(factors + column, mask=column < COLUMNS, other=0).to(tl.float32)[None, :] * times
    else:
        return tl.load(factors + row // span, mask=live, other=0).to(tl.float32)[:, None] * times


@triton.jit
def _sum_of(
    x, branch, bias, factors, row, column, inside, live, there, span, times,
    COLUMNS: tl.constexpr, HAS_BRANCH: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FACTOR: tl.constexpr,
    BITS: tl.constexpr, BY_CHANNEL: tl.constexpr, ROUNDS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """x + bias + branch · factor, in float32, rounded as it is stored: to float16 (1), bfloat16 (2) or not (0)."""
    at = (row.to(tl.int64) if WIDE else row)[:, None] * COLUMNS + column[None, :]
    found = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    if HAS_BIAS:
        found += tl.load(bias + column, mask=there, other=0).to(tl.float32)[None, :]
    if HAS_BRANCH:
        more = tl.load(branch + at, mask=inside, other=0).to(tl.float32)
        if HAS_FACTOR:
            times_32 = tl.full((1,), times, tl.float32)
            more *= _factors(factors, row, column, inside, live, span, times_32, COLUMNS, BITS, BY_CHANNEL, WIDE)
        found += more
        if ROUNDS == 1:
            found = found.to(tl.float16).to(tl.float32)
        elif ROUNDS == 2:
            found = found.to(tl.bfloat16).to(tl.float32)
    return found


@triton.jit
def _channels_kernel(
    x, branch, w, bias, factors, mean, r, channels, rows, eps, span, times,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GIVEN: tl.constexpr, HAS_BRANCH: tl.constexpr,
    HAS_W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FACTOR: tl.constexpr, BITS: tl.constexpr,
    BY_CHANNEL: tl.constexpr, ROUNDS: tl.constexpr, CENTERED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """c and γ c, of ROWS rows; GIVEN is whether μ and r of all rows are, else these are computed. One program."""
    row = sampled_rows(rows, ROWS).to(tl.int32)
    column = tl.arange(0, BLOCK)
    live, there = row < rows, column < COLUMNS
    inside = live[:, None] & there[None, :]
    normal = _sum_of(
        x, branch, bias, factors, row, column, inside, live, there, span, times,
        COLUMNS, HAS_BRANCH, HAS_BIAS, HAS_FACTOR, BITS, BY_CHANNEL, ROUNDS, WIDE,
    )  # fmt: skip
    if CENTERED:
        if GIVEN:
            middle = tl.load(mean + row, mask=live, other=0).to(tl.float32)
        else:
            middle = tl.sum(tl.where(inside, normal, 0.0), axis=1) / COLUMNS
        normal -= middle[:, None]
    normal = tl.where(inside, tl.abs(normal), 0.0)
    if GIVEN:
        factor = tl.load(r + row, mask=live, other=0).to(tl.float32)
    else:
        factor = tl.rsqrt(tl.sum(normal * normal, axis=1) / COLUMNS + tl.full((1,), eps, tl.float32))
    normal *= factor[:, None]
    roots = tl.sqrt(normal)
    largest = tl.max(magnitude_bits(roots), axis=0).to(tl.float32, bitcast=True)
    root = (tl.sum(roots, axis=0) - largest) / (ROWS - 1)
    ratio = root / (tl.sum(root) / COLUMNS)
    ratio *= ratio
    # The power of two below: what is left without a mantissa. Of what is not finite, 1.
    whole = (ratio.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    c = tl.maximum(tl.where(ratio < float("inf"), whole, 1.0), 1.0)
    tl.store(channels + column, c, mask=there)
    if HAS_W:
        c *= tl.load(w + column, mask=there, other=0).to(tl.float32)
    tl.store(channels + COLUMNS + column, c, mask=there)


def _of_channels(columns: int) -> tuple[dict[str, int], int]:
    """Sizes, and warps."""
    rows, block = sampled(columns), power_of_2(columns)
    return {"COLUMNS": columns, "BLOCK": block, "ROWS": rows}, 4 if rows * block <= 8192 else 16


@functools.lru_cache(maxsize=1024)
def _channels(device: torch.device, rows: int, columns: int, dtypes: Any, centered: bool, has_w: bool) -> Plan:
    sizes, warps = _of_channels(columns)
    constants = {
        **sizes, "GIVEN": True, "HAS_BRANCH": False, "HAS_W": has_w, "HAS_BIAS": False,
        **_of_factor(None), "ROUNDS": 0, "CENTERED": centered, "WIDE": is_wide(rows * columns),
    }  # fmt: skip
    return Plan(_channels_kernel, 1, constants, (rows, 0.0, 1, 1.0), warps, given=7)


def channels(x: Tensor, mean: Tensor | None, r: Tensor, w: Tensor | None) -> Tensor:
    """What the channels of x̂ are divided by before they are quantized, and γ times that.

    Args:
        x: (..., C), contiguous.
        mean, r: a number for each row; mean None for 0.
        w: γ, (C,), or None for 1.

    Returns:
        (2, C) in float32: c, a power of two from 1, and γ c.
    """
    columns, means, weights = x.shape[-1], r if mean is None else mean, r if w is None else w
    found = torch.empty(2, columns, dtype=torch.float32, device=x.device)
    rows, dtypes = x.numel() // columns, (x.dtype, weights.dtype, means.dtype, r.dtype)
    plan = _channels(x.device, rows, columns, dtypes, mean is not None, w is not None)
    plan.run(x, x, weights, x, x, means, r, found)
    return found


@triton.jit
def _forward_kernel(
    x, branch, w, b, bias, factors, channels, total, y, r, codes, scale, rows, eps, span, times,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KEEPS: tl.constexpr, HAS_BRANCH: tl.constexpr,
    HAS_W: tl.constexpr, HAS_B: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FACTOR: tl.constexpr, BITS: tl.constexpr,
    BY_CHANNEL: tl.constexpr, ROUNDS: tl.constexpr, CENTERED: tl.constexpr, CAST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """KEEPS is whether the sum is stored, CENTERED whether μ is subtracted, CAST whether x̂ is rounded before γ."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    live, there = row < rows, column < HALF
    inside = live[:, None] & there[None, :]
    place = (row.to(tl.int64) if WIDE else row)[:, None]
    at = place * (2 * HALF) + column[None, :]
    low = _sum_of(
        x, branch, bias, factors, row, column, inside, live, there, span, times,
        2 * HALF, HAS_BRANCH, HAS_BIAS, HAS_FACTOR, BITS, BY_CHANNEL, ROUNDS, WIDE,
    )  # fmt: skip
    high = _sum_of(
        x, branch, bias, factors, row, column + HALF, inside, live, there, span, times,
        2 * HALF, HAS_BRANCH, HAS_BIAS, HAS_FACTOR, BITS, BY_CHANNEL, ROUNDS, WIDE,
    )  # fmt: skip
    if KEEPS:
        tl.store(total + at, low.to(total.dtype.element_ty), mask=inside)
        tl.store(total + at + HALF, high.to(total.dtype.element_ty), mask=inside)
    if CENTERED:
        middle = (tl.sum(low + high, axis=1) / (2 * HALF))[:, None]
        low, high = tl.where(inside, low - middle, 0.0), tl.where(inside, high - middle, 0.0)
    # Inductor passes a Python number as a double.
    factor = tl.rsqrt(tl.sum(low * low + high * high, axis=1) / (2 * HALF) + tl.full((1,), eps, tl.float32))
    tl.store(r + row, factor, mask=live)
    low, high = low * factor[:, None], high * factor[:, None]
    less_l = low * _inverse(tl.load(channels + column, mask=there, other=1))[None, :]
    less_h = high * _inverse(tl.load(channels + HALF + column, mask=there, other=1))[None, :]
    found, inverse = scale_of(tl.max(magnitude_bits(larger(less_l, less_h)), axis=1), LIFT4)
    tl.store(codes + place * HALF + column[None, :], pair(less_l, less_h, inverse[:, None]), mask=inside)
    tl.store(scale + row, found, mask=live)
    if CAST:
        low, high = low.to(y.dtype.element_ty).to(tl.float32), high.to(y.dtype.element_ty).to(tl.float32)
    if HAS_W:
        low = low * tl.load(w + column, mask=there, other=0).to(tl.float32)[None, :]
        high = high * tl.load(w + HALF + column, mask=there, other=0).to(tl.float32)[None, :]
    if HAS_B:
        low = low + tl.load(b + column, mask=there, other=0).to(tl.float32)[None, :]
        high = high + tl.load(b + HALF + column, mask=there, other=0).to(tl.float32)[None, :]
    tl.store(y + at, low.to(y.dtype.element_ty), mask=inside)
    tl.store(y + at + HALF, high.to(y.dtype.element_ty), mask=inside)


def forward(
    x: Tensor, branch: Tensor | None, w: Tensor | None, b: Tensor | None, eps: float,
    dtypes: tuple[torch.dtype, torch.dtype], centered: bool, cast: bool, keeps: bool = True, bias: Tensor | None = None,
    factor: Tensor | None = None, times: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """A layer or RMS norm over rows, of x + bias + branch · factor.

    Args:
        x: (rows, C), contiguous, C a multiple of 4.
        branch: as x, or None for 0.
        w, b: γ and β, (C,), or None for 1 and 0.
        eps: added to the mean of squares.
        dtypes: of the sum and of y.
        centered: whether the mean is subtracted.
        cast: whether x̂ is rounded to y's dtype before γ.
        keeps: whether the sum with the branch is wanted.
        bias: (C,), contiguous, added in float32; None for 0.
        factor: of the branch: one for each of as many runs of rows, (n,) with n a divisor of rows; one for each
            channel, (1, C); or uint8, the bits of `saved.Bits`, (rows · C / 8,) with rows a multiple of 8; None for 1.
        times: what the factor is multiplied with.

    Returns:
        The sum (empty if there is no branch, or if it is not wanted) and y, both (rows, C); r, (rows,) in float32;
        codes of x̂ / c, uint8 (rows, 1, C/2), and scales, bfloat16 (rows, 1, 1); c and γ c, as `channels` has them.
    """
    rows, columns = x.shape
    half = columns // 2
    keeps = keeps and branch is not None
    total = x.new_empty((rows, columns) if keeps else (0,), dtype=dtypes[0])
    y, r = x.new_empty(rows, columns, dtype=dtypes[1]), x.new_empty(rows, dtype=torch.float32)
    codes = x.new_empty(rows, 1, half, dtype=torch.uint8)
    scale = x.new_empty(rows, 1, 1, dtype=torch.bfloat16)
    block = power_of_2(half)
    each, warps = max(1, _TILE // block), 4 if block <= 512 else 8
    shared = {
        "HAS_BRANCH": branch is not None, "HAS_W": w is not None, "HAS_BIAS": bias is not None,
        **_of_factor(_kind(factor)), "ROUNDS": _ROUNDS.get(dtypes[0], 0), "CENTERED": centered,
        "WIDE": is_wide(x.numel()),
    }  # fmt: skip
    of_rows = {"HALF": half, "BLOCK": block, "ROWS": each, "KEEPS": keeps, "HAS_B": b is not None, "CAST": cast}
    before, gamma, beta, added, times_of = (x if t is None else t for t in (branch, w, b, bias, factor))
    found = x.new_empty(2, columns, dtype=torch.float32)
    numbers = rows, eps, _span(factor, rows), times

    def run(kernel: Any, programs: int, tensors: tuple[Tensor, ...], constants: dict[str, Any], warps: int) -> None:
        case = (x.device, numbers, tuple(t.dtype for t in tensors), aligned(*tensors), tuple(constants.values()))
        launch(kernel, programs, case, (*tensors, *numbers), constants, num_warps=warps)

    given = x, before, gamma, added, times_of, x, x, found
    sizes, of_channels = _of_channels(columns)
    run(_channels_kernel, 1, given, {**sizes, "GIVEN": False, **shared}, of_channels)
    tensors = x, before, gamma, beta, added, times_of, found, total, y, r, codes, scale
    run(_forward_kernel, cdiv(rows, each), tensors, of_rows | shared, warps)
    return total, y, r, codes, scale, found


def _kind(factor: Tensor | None) -> tuple[torch.dtype, int] | None:
    return None if factor is None else (factor.dtype, factor.dim())


def _of_factor(kind: tuple[torch.dtype, int] | None) -> dict[str, bool]:
    bits, by_channel = kind is not None and kind[0] == torch.uint8, kind is not None and kind[1] == 2
    return {"HAS_FACTOR": kind is not None, "BITS": bits, "BY_CHANNEL": by_channel}


def _span(factor: Tensor | None, rows: int) -> int:
    """Rows of a factor, or of a run of bits."""
    if factor is None or factor.dim() == 2:
        return 1
    runs = 8 if factor.dtype == torch.uint8 else factor.numel()
    assert rows % runs == 0, (rows, runs)
    return rows // runs


@triton.jit
def _gradient_kernel(
    g, codes, scale, r, channels, other, factors, g_x, copy, parts, rows, blocks, programs, span, times,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_OTHER: tl.constexpr,
    HAS_COPY: tl.constexpr, HAS_FACTOR: tl.constexpr, BITS: tl.constexpr, BY_CHANNEL: tl.constexpr,
    CENTERED: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """CENTERED is whether μ was subtracted, so that the gradient's mean is subtracted too."""
    column = tl.arange(0, BLOCK)
    there = column < HALF
    c_l = tl.load(channels + column, mask=there, other=1)[None, :]
    c_h = tl.load(channels + HALF + column, mask=there, other=1)[None, :]
    w_l = tl.load(channels + 2 * HALF + column, mask=there, other=0)[None, :] * _inverse(c_l)
    w_h = tl.load(channels + 3 * HALF + column, mask=there, other=0)[None, :] * _inverse(c_h)
    g_l = tl.zeros((ROWS, BLOCK), tl.float32)
    g_h = tl.zeros((ROWS, BLOCK), tl.float32)
    n_l = tl.zeros((ROWS, BLOCK), tl.float32)
    n_h = tl.zeros((ROWS, BLOCK), tl.float32)
    for number in tl.range(tl.program_id(0), blocks, programs, num_stages=STAGES):
        row = number * ROWS + tl.arange(0, ROWS)
        live = row < rows
        inside = live[:, None] & there[None, :]
        place = (row.to(tl.int64) if WIDE else row)[:, None]
        at = place * (2 * HALF) + column[None, :]
        low = tl.load(g + at, mask=inside, other=0).to(tl.float32)
        high = tl.load(g + at + HALF, mask=inside, other=0).to(tl.float32)
        packed = tl.load(codes + place * HALF + column[None, :], mask=inside, other=0x77).to(tl.int32)
        step = tl.load(scale + row, mask=live, other=0).to(tl.float32)[:, None]
        factor = tl.load(r + row, mask=live, other=0).to(tl.float32)[:, None]
        if HAS_OTHER:
            more_l = tl.load(other + at, mask=inside, other=0).to(tl.float32)
            more_h = tl.load(other + at + HALF, mask=inside, other=0).to(tl.float32)
        if STAGES == 1:  # without a pipeline programs hide the loads: in registers, c leaves room for fewer
            c_l = tl.load(channels + column, mask=there, other=1)[None, :]
            c_h = tl.load(channels + HALF + column, mask=there, other=1)[None, :]
        normal_l, normal_h = low_codes(packed) * step * c_l, high_codes(packed) * step * c_h
        g_l += low
        g_h += high
        n_l += low * normal_l
        n_h += high * normal_h
        low, high = low * w_l, high * w_h
        slope = (tl.sum(low * normal_l + high * normal_h, axis=1) / (2 * HALF))[:, None]
        out_l, out_h = low - normal_l * slope, high - normal_h * slope
        if CENTERED:
            mean = (tl.sum(low + high, axis=1) / (2 * HALF))[:, None]
            out_l, out_h = out_l - mean, out_h - mean
        out_l, out_h = out_l * factor, out_h * factor
        if HAS_OTHER:
            out_l, out_h = out_l + more_l, out_h + more_h
        tl.store(g_x + at, out_l.to(g_x.dtype.element_ty), mask=inside)
        tl.store(g_x + at + HALF, out_h.to(g_x.dtype.element_ty), mask=inside)
        if HAS_COPY:
            if HAS_FACTOR:
                times_32 = tl.full((1,), times, tl.float32)
                out_l *= _factors(factors, row, column, inside, live, span, times_32, 2 * HALF, BITS, BY_CHANNEL, WIDE)
                out_h *= _factors(
                    factors, row, column + HALF, inside, live, span, times_32, 2 * HALF, BITS, BY_CHANNEL, WIDE
                )
            tl.store(copy + at, out_l.to(copy.dtype.element_ty), mask=inside)
            tl.store(copy + at + HALF, out_h.to(copy.dtype.element_ty), mask=inside)
    left = parts + tl.program_id(0).to(tl.int64) * (4 * HALF) + column
    tl.store(left, tl.sum(g_l, axis=0), mask=there)
    tl.store(left + HALF, tl.sum(g_h, axis=0), mask=there)
    tl.store(left + 2 * HALF, tl.sum(n_l, axis=0), mask=there)
    tl.store(left + 3 * HALF, tl.sum(n_h, axis=0), mask=there)


@triton.jit
def _sums_kernel(parts, to, rows, columns, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = (column < columns)[None, :]
    total = tl.zeros((BLOCK, COLUMNS), tl.float32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        total += tl.load(parts + row[:, None] * columns + column[None, :], mask=(row < rows)[:, None] & there, other=0)
    tl.store(to + column, tl.sum(total, axis=0), mask=column < columns)


@functools.lru_cache(maxsize=1024)
def _sums(device: torch.device, rows: int, columns: int) -> Plan:
    constants = {"BLOCK": 512, "COLUMNS": 16}
    return Plan(_sums_kernel, cdiv(columns, 16), constants, (rows, columns))


@functools.lru_cache(maxsize=1024)
def _gradients(
    device: torch.device, rows: int, columns: int, dtypes: tuple[torch.dtype | None, ...], centered: bool,
    factor: tuple[torch.dtype, int] | None, span: int, times: float,
) -> Plan:  # fmt: skip
    """Of `gradient`; the dtypes are None where there is no tensor."""
    *_, copy, other = dtypes
    block = power_of_2(columns // 2)
    each, warps, stages, programs = _of_gradient(block)
    blocks = cdiv(rows, each)
    programs = min(blocks, programs * multiprocessors(device))
    constants = {
        "HALF": columns // 2, "BLOCK": block, "ROWS": each, "HAS_OTHER": other is not None,
        "HAS_COPY": copy is not None, **_of_factor(factor),
        "CENTERED": centered, "WIDE": is_wide(rows * columns), "STAGES": stages,
    }  # fmt: skip
    given = 5 if other is None and factor is None else 7
    return Plan(_gradient_kernel, programs, constants, (rows, blocks, programs, span, times), warps, given)


def gradient(
    g: Tensor, codes: Tensor, scale: Tensor, r: Tensor, channels: Tensor, dtype: torch.dtype, centered: bool,
    other: Tensor | None = None, copy: torch.dtype | None = None, factor: Tensor | None = None, times: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of a norm over rows.

    Args:
        g: (rows, C), contiguous.
        codes, scale: of x̂ / c, from `pack`.
        r: (rows,).
        channels: c and γ c, from the function of that name.
        dtype: of g_x.
        centered: whether the norm subtracts the mean, as layer norm does.
        other: (rows, C), contiguous, which is added to g_x; None for 0.
        copy: of g_x · factor, its dtype; None for none.
        factor, times: as of `forward`.

    Returns:
        g_x in `dtype`; [Σ g, Σ g x̂] as (2, C) in float32; the copy (empty without one).
    """
    rows, columns = g.shape
    dtypes = g.dtype, r.dtype, dtype, copy, None if other is None else other.dtype
    plan = _gradients(g.device, rows, columns, dtypes, centered, _kind(factor), _span(factor, rows), times)
    g_x = g.new_empty(rows, columns, dtype=dtype)  # a tuple of sizes takes longer
    twin = g.new_empty(0, dtype=dtype) if copy is None else g.new_empty(rows, columns, dtype=copy)
    parts = g.new_empty(plan.numbers[2], 2, columns, dtype=torch.float32)  # one for each program
    given = g, codes, scale, r, channels, g if other is None else other, r if factor is None else factor
    plan.run(*given, g_x, twin, parts)
    sums = g.new_empty(2, columns, dtype=torch.float32)
    _sums(g.device, plan.numbers[2], 2 * columns).run(parts, sums)
    return g_x, sums, twin
