"""Triton kernels of batch and group norm with a shortcut and an activation function; rows are pixels, columns channels.

::

    statistics  x              ──►  μ and σ² per channel
    normalize  x, its μ and r  ──►  y = f(γ x̂ + β + shortcut), codes of x̂, bits or derivatives of f
    gradient   g_y [+ other]   ──►  Σ g and Σ g x̂ per channel with g = g_y f', then g_x [+ after]

A group norm has μ, σ² and both sums for each sample and group of channels, (samples, groups), and a program the rows of
one sample; a batch norm is the case of one sample, and of a group for each channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import apply, is_closed, with_slope
from .codes import LIFT4, high_codes, larger, low_codes, pair, scale_of
from .launch import aligned, cdiv, is_wide, launch, multiprocessors, power_of_2
from .quantize_kernels import magnitude_bits
from .support import FUNCTIONS, compiler_errors, written_over

# A tile is (ROWS, RUNS, RUN) elements of each half of the channels. A run is 8 neighbours, or 4 where a half is no
# multiple of 8; bits are packed as in `saved.Bits`.


@triton.jit
def _slope_code(slope, row, at, FIRST: tl.constexpr, PER_ONE: tl.constexpr):
    """`saved.Levels` of a derivative, in 4 bits."""
    # `saved.dither` plus one, built in the mantissa.
    word = (((row * -0x3EC05657 + at * -0x6E1EF25B) >> 9) & 0x7FFFF8) | 0x3F800000
    steps = slope * PER_ONE + (word.to(tl.float32, bitcast=True) - (1.0 + FIRST))
    steps = tl.where(steps == steps, tl.minimum(tl.maximum(steps, 0.0), 15.0), PER_ONE - FIRST)
    return steps.to(tl.int32)


@triton.jit
def _columns(HALF: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr):
    """Of a half of the channels: offsets in runs, the runs, the channels, and masks of runs and channels."""
    k = tl.arange(0, RUN)[None, None, :]
    run = tl.arange(0, RUNS)
    whole = (run < HALF // RUN)[None, :]
    return k, run, (run * RUN)[None, :, None] + k, whole, whole[:, :, None] & (k >= 0)


@triton.jit
def _part(programs, BY_SAMPLE: tl.constexpr):
    """Which of so many programs of a sample this one is, and the sample."""
    if BY_SAMPLE:
        program, sample = tl.program_id(0) % programs, tl.program_id(0) // programs
    else:
        program, sample = tl.program_id(0), 0
    return program, sample


@triton.jit
def _lines(block, sample, rows, live, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Of a tile: its rows, their offsets in memory, and masks of rows and elements; ``rows`` are those of a sample."""
    own = block * ROWS + tl.arange(0, ROWS)
    row = sample * rows + own
    place = (row.to(tl.int64) if WIDE else row)[:, None, None]
    return row, place, own < rows, (own < rows)[:, None], (own < rows)[:, None, None] & live


@triton.jit
def _groups(t, sample, at, live, C: tl.constexpr, GROUPS: tl.constexpr):
    """For each channel the number of its group in one line of t, (lines, GROUPS)."""
    return tl.load(t + sample * GROUPS + at // (C // GROUPS), mask=live, other=0)


@triton.jit
def _channels(t, at, live, HAS: tl.constexpr, ELSE: tl.constexpr):
    """A vector over channels in float32, (1, RUNS, RUN), or the number ELSE."""
    if HAS:  # noqa: SIM108
        found = tl.load(t + at, mask=live, other=0).to(tl.float32)
    else:
        found = tl.zeros_like(at).to(tl.float32) + ELSE
    return found


@triton.jit
def _moments_kernel(
    x, parts, rows, blocks, programs, columns,
    C: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    BY_SAMPLE: tl.constexpr,
):  # fmt: skip
    """Mean less the sample's row 0, and Σ (x − mean)², of the rows of each program, (programs, 2, C) float32."""
    program, column = tl.program_id(0) // columns, (tl.program_id(0) % columns) * COLUMNS + tl.arange(0, COLUMNS)
    own = parts + program * (2 * C) + column
    if BY_SAMPLE:
        sample, program = program // programs, program % programs
        x += (sample.to(tl.int64) if WIDE else sample) * rows * C
    live = column < C
    # Sums of differences from a row: where the mean is far from zero, x² would leave few bits for the variance.
    first = (program * ROWS).to(tl.int64) if WIDE else program * ROWS
    shift = tl.load(x + first * C + column, mask=live, other=0).to(tl.float32)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in tl.range(program, blocks, programs, num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS)
        place = (row.to(tl.int64) if WIDE else row)[:, None] * C + column[None, :]
        inside = (row < rows)[:, None] & live[None, :]
        d = tl.where(inside, tl.load(x + place, mask=inside, other=0).to(tl.float32) - shift[None, :], 0.0)
        sums += d
        squares += d * d
    count = _rows_of(program, rows, blocks, programs, ROWS)
    mean = tl.sum(sums, axis=0) / count
    tl.store(own, shift - tl.load(x + column, mask=live, other=0).to(tl.float32) + mean, mask=live)
    tl.store(own + C, tl.sum(squares, axis=0) - mean * mean * count, mask=live)


@triton.jit
def _rows_of(program, rows, blocks, programs, ROWS: tl.constexpr):
    """How many rows a program has read, in float32; the last block may be a part."""
    own = (blocks - program + programs - 1) // programs
    missing = tl.where((blocks - 1) % programs == program, blocks * ROWS - rows, 0)
    return (own * ROWS - missing).to(tl.float32)


@triton.jit
def _statistics_kernel(
    x, parts, mean, var, rows, blocks, programs,
    C: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Mean and variance of all rows, of those of each program (Chan, Golub & LeVeque 1983)."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    live = column < C
    shift = tl.load(parts + column, mask=live, other=0)[None, :]
    sums = tl.zeros((PARTS, COLUMNS), tl.float32)
    squares = tl.zeros((PARTS, COLUMNS), tl.float32)
    for start in tl.range(0, programs, PARTS):
        program = start + tl.arange(0, PARTS)[:, None]
        inside = (program < programs) & live[None, :]
        count = tl.where(program < programs, _rows_of(program, rows, blocks, programs, ROWS), 0.0)
        own = parts + program * (2 * C) + column[None, :]
        d = tl.where(inside, tl.load(own, mask=inside, other=0) - shift, 0.0)
        sums += d * count
        squares += d * d * count + tl.load(own + C, mask=inside, other=0)
    total = rows * 1.0
    offset = tl.sum(sums, axis=0) / total
    first = tl.load(x + column, mask=live, other=0).to(tl.float32)
    tl.store(mean + column, first + (tl.sum(shift, axis=0) + offset), mask=live)
    found = tl.sum(squares, axis=0) / total - offset * offset
    # A NaN must stay one.
    tl.store(var + column, tl.where(found < 0, 0.0, found), mask=live)


@triton.jit
def _group_statistics_kernel(
    x, parts, mean, var, rows, blocks, programs,
    C: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """As `_statistics_kernel`, of one group of a sample: its channels have means of their own as programs have."""
    sample, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    channel = tl.arange(0, PER)
    column, live = group * (C // GROUPS) + channel, channel < C // GROUPS
    x += (sample.to(tl.int64) if WIDE else sample) * rows * C
    parts += sample * programs * (2 * C)
    first = tl.load(x + column, mask=live, other=0).to(tl.float32)
    shift = tl.load(x + group * (C // GROUPS)).to(tl.float32)
    sums = tl.zeros((PARTS, PER), tl.float32)
    squares = tl.zeros((PARTS, PER), tl.float32)
    for start in tl.range(0, programs, PARTS):
        program = start + tl.arange(0, PARTS)[:, None]
        inside = (program < programs) & live[None, :]
        count = tl.where(program < programs, _rows_of(program, rows, blocks, programs, ROWS), 0.0)
        own = parts + program * (2 * C) + column[None, :]
        d = tl.where(inside, tl.load(own, mask=inside, other=0) + (first - shift)[None, :], 0.0)
        sums += d * count
        squares += d * d * count + tl.load(own + C, mask=inside, other=0)
    total = rows * (C // GROUPS) * 1.0
    offset = tl.sum(tl.sum(sums, axis=1), axis=0) / total
    tl.store(mean + tl.program_id(0), shift + offset)
    found = tl.sum(tl.sum(squares, axis=1), axis=0) / total - offset * offset
    tl.store(var + tl.program_id(0), tl.where(found < 0, 0.0, found))


@triton.jit
def _normal_half(x, mean, r, w, b, shortcut, row_at, at, inside, SHORTCUT: tl.constexpr):
    """x̂ and the argument of f."""
    # Not x r − μ r in one instruction: where x is the mean, x̂ is zero.
    normal = (tl.load(x + row_at + at, mask=inside, other=0).to(tl.float32) - mean) * r
    v = normal * w + b
    if SHORTCUT:
        v = v + tl.load(shortcut + row_at + at, mask=inside, other=0).to(tl.float32)
    return normal, v


@triton.jit
def _open_bits(v, k, F: tl.constexpr):
    """Whether f passes a gradient at v, the bits of a run in one number."""
    return tl.sum(tl.where(is_closed(v, F), 0, 1) << k, axis=2)


@triton.jit
def _normalize_kernel(
    x, mean, r, w, b, shortcut, y, codes, scale, marks, rows, blocks, programs,
    C: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr, SHORTCUT: tl.constexpr,
    HAS_W: tl.constexpr, HAS_B: tl.constexpr, MARKS: tl.constexpr, FIRST: tl.constexpr, PER_ONE: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr, GROUPS: tl.constexpr, BY_SAMPLE: tl.constexpr,
):  # fmt: skip
    """MARKS is 0 for none, 1 for bits, 4 for derivatives."""
    HALF: tl.constexpr = C // 2
    k, run, at, whole, live = _columns(HALF, RUNS, RUN)
    program, sample = _part(programs, BY_SAMPLE)
    r_l, r_h = _groups(r, sample, at, live, C, GROUPS), _groups(r, sample, at + HALF, live, C, GROUPS)
    mean_l, mean_h = _groups(mean, sample, at, live, C, GROUPS), _groups(mean, sample, at + HALF, live, C, GROUPS)
    w_l, w_h = _channels(w, at, live, HAS_W, 1.0), _channels(w, at + HALF, live, HAS_W, 1.0)
    b_l, b_h = _channels(b, at, live, HAS_B, 0.0), _channels(b, at + HALF, live, HAS_B, 0.0)
    for block in tl.range(program, blocks, programs, num_stages=STAGES):
        row, place, known, there, inside = _lines(block, sample, rows, live, ROWS, WIDE)
        normal_l, v_l = _normal_half(x, mean_l, r_l, w_l, b_l, shortcut, place * C, at, inside, SHORTCUT)
        normal_h, v_h = _normal_half(x, mean_h, r_h, w_h, b_h, shortcut, place * C, at + HALF, inside, SHORTCUT)
        largest = magnitude_bits(larger(normal_l, normal_h))
        found, inverse = scale_of(tl.max(tl.max(largest, axis=2), axis=1), LIFT4)
        tl.store(scale + row, found, mask=known)
        packed = pair(normal_l, normal_h, inverse[:, None, None])
        tl.store(codes + place * HALF + at, packed, mask=inside)
        if MARKS == 1:
            byte = (row.to(tl.int64) if WIDE else row)[:, None] * (C // 8) + run[None, :]
            if RUN == 8:
                tl.store(marks + byte, _open_bits(v_l, k, F).to(tl.uint8), mask=there & whole)
                tl.store(marks + byte + HALF // 8, _open_bits(v_h, k, F).to(tl.uint8), mask=there & whole)
            else:
                both = _open_bits(v_l, k, F) | (_open_bits(v_h, k, F) << 4)
                tl.store(marks + byte, both.to(tl.uint8), mask=there & whole)
        if MARKS == 4:
            line = row[:, None, None]
            v_l, slope_l = with_slope(v_l, F)
            v_h, slope_h = with_slope(v_h, F)
            slopes = _slope_code(slope_l, line, at, FIRST, PER_ONE)
            slopes = slopes | (_slope_code(slope_h, line, at + HALF, FIRST, PER_ONE) << 4)
            tl.store(marks + place * HALF + at, slopes.to(tl.uint8), mask=inside)
        else:
            v_l, v_h = apply(v_l, F), apply(v_h, F)
        tl.store(y + place * C + at, v_l.to(y.dtype.element_ty), mask=inside)
        tl.store(y + place * C + HALF + at, v_h.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _behind(
    g, other, marks, row, place, at, run, there, whole, inside, half: tl.constexpr, C: tl.constexpr,
    RUN: tl.constexpr, MARKS: tl.constexpr, ADDS: tl.constexpr, FIRST: tl.constexpr, PER_ONE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of the argument of f, of one half of the channels."""
    HALF: tl.constexpr = C // 2
    found = tl.load(g + place * C + half * HALF + at, mask=inside, other=0)
    if ADDS:
        second = tl.load(other + place * C + half * HALF + at, mask=inside, other=0).to(tl.float32)
        found = (found.to(tl.float32) + second).to(g.dtype.element_ty)
    if MARKS == 1:
        before: tl.constexpr = half * (HALF // 8) if RUN == 8 else 0
        lowest: tl.constexpr = 0 if RUN == 8 else 4 * half
        byte = (row.to(tl.int64) if WIDE else row)[:, None] * (C // 8) + before + run[None, :]
        passed = tl.load(marks + byte, mask=there & whole, other=0).to(tl.int32)[:, :, None] >> (at % RUN + lowest)
        # Not a product: where f' is 0 an infinite gradient must become 0.
        found = tl.where((passed & 1) != 0, found, 0.0)
    if MARKS == 4:
        code = (tl.load(marks + place * HALF + at, mask=inside, other=0).to(tl.int32) >> (4 * half)) & 15
        slope = (code.to(tl.float32) + FIRST) * (1.0 / PER_ONE)
        found = (found.to(tl.float32) * slope).to(g.dtype.element_ty)
    return found


@triton.jit
def _sums_kernel(
    g, other, codes, scale, marks, passed_on, sums, rows, blocks, programs,
    C: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, MARKS: tl.constexpr,
    ADDS: tl.constexpr, PASS_ON: tl.constexpr, FIRST: tl.constexpr, PER_ONE: tl.constexpr, WIDE: tl.constexpr,
    STAGES: tl.constexpr, BY_SAMPLE: tl.constexpr,
):  # fmt: skip
    """Σ g and Σ g x̂ of each program, (programs, 2, C) float32; `passed_on` gets (g + other) f'."""
    HALF: tl.constexpr = C // 2
    program, sample = _part(programs, BY_SAMPLE)
    _, run, at, whole, live = _columns(HALF, RUNS, RUN)
    g_l = tl.zeros((ROWS, RUNS, RUN), tl.float32)
    g_h = tl.zeros((ROWS, RUNS, RUN), tl.float32)
    gx_l = tl.zeros((ROWS, RUNS, RUN), tl.float32)
    gx_h = tl.zeros((ROWS, RUNS, RUN), tl.float32)
    for block in tl.range(program, blocks, programs, num_stages=STAGES):
        row, place, known, there, inside = _lines(block, sample, rows, live, ROWS, WIDE)
        step = tl.load(scale + row, mask=known, other=0).to(tl.float32)[:, None, None]
        packed = tl.load(codes + place * HALF + at, mask=inside, other=0).to(tl.int32)
        low = _behind(
            g, other, marks, row, place, at, run, there, whole, inside, 0, C, RUN, MARKS, ADDS, FIRST, PER_ONE, WIDE
        )  # fmt: skip
        high = _behind(
            g, other, marks, row, place, at, run, there, whole, inside, 1, C, RUN, MARKS, ADDS, FIRST, PER_ONE, WIDE
        )  # fmt: skip
        if PASS_ON:
            tl.store(passed_on + place * C + at, low.to(g.dtype.element_ty), mask=inside)
            tl.store(passed_on + place * C + HALF + at, high.to(g.dtype.element_ty), mask=inside)
        low, high = low.to(tl.float32), high.to(tl.float32)
        g_l += low
        g_h += high
        gx_l += low * (low_codes(packed) * step)
        gx_h += high * (high_codes(packed) * step)
    own = sums + tl.program_id(0) * (2 * C) + (run * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    valid = (run < HALF // RUN)[:, None] & (tl.arange(0, RUN) >= 0)[None, :]
    tl.store(own, tl.sum(g_l, axis=0), mask=valid)
    tl.store(own + HALF, tl.sum(g_h, axis=0), mask=valid)
    tl.store(own + C, tl.sum(gx_l, axis=0), mask=valid)
    tl.store(own + C + HALF, tl.sum(gx_h, axis=0), mask=valid)


@triton.jit
def _total_kernel(parts, sums, count, N: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Σ of `count` rows of parts, (count, N) float32."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    found = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        found += tl.load(parts + row * N + column, mask=(row < count) & (column < N), other=0)
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(sums + at, tl.sum(found, axis=0), mask=at < N)


@triton.jit
def _group_total_kernel(
    parts, w, sums, of_groups, programs, samples,
    C: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr, HAS_W: tl.constexpr,
):  # fmt: skip
    """Of one group of a sample Σ g and Σ g x̂ per channel, (2, samples, C), and times γ in all, (samples, 2, GROUPS)."""
    sample, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    channel = tl.arange(0, PER)
    column, live = group * (C // GROUPS) + channel, channel < C // GROUPS
    gamma = _channels(w, column, live, HAS_W, 1.0)
    for which in tl.static_range(2):
        found = tl.zeros((ROWS, PER), tl.float32)
        for start in tl.range(0, programs, ROWS):
            row = start + tl.arange(0, ROWS)[:, None]
            own = parts + (sample * programs + row) * (2 * C) + which * C + column[None, :]
            found += tl.load(own, mask=(row < programs) & live[None, :], other=0)
        total = tl.sum(found, axis=0)
        tl.store(sums + (which * samples + sample) * C + column, total, mask=live)
        tl.store(of_groups + (2 * sample + which) * GROUPS + group, tl.sum(total * gamma, axis=0))


@triton.jit
def _gradient_kernel(
    g, codes, scale, marks, sums, r, w, after, g_x, rows, blocks, programs, share,
    C: tl.constexpr, RUNS: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, MARKS: tl.constexpr,
    HAS_W: tl.constexpr, FIRST: tl.constexpr, PER_ONE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    AFTER: tl.constexpr, GROUPS: tl.constexpr, BY_SAMPLE: tl.constexpr,
):  # fmt: skip
    """g_x = r (γ g − Σ γ g share − x̂ Σ γ g x̂ share) + after.  sums: (samples, 2, GROUPS), times γ by sample alone."""
    HALF: tl.constexpr = C // 2
    share = tl.full((1,), share, tl.float32)  # Inductor passes a Python number as a double
    _, run, at, whole, live = _columns(HALF, RUNS, RUN)
    program, sample = _part(programs, BY_SAMPLE)
    r_l, r_h = _groups(r, sample, at, live, C, GROUPS), _groups(r, sample, at + HALF, live, C, GROUPS)
    f_l, f_h = r_l * _channels(w, at, live, HAS_W, 1.0), r_h * _channels(w, at + HALF, live, HAS_W, 1.0)
    if not BY_SAMPLE:
        r_l, r_h = f_l, f_h
    m_l = _groups(sums, 2 * sample, at, live, C, GROUPS) * share * r_l
    m_h = _groups(sums, 2 * sample, at + HALF, live, C, GROUPS) * share * r_h
    s_l = _groups(sums, 2 * sample + 1, at, live, C, GROUPS) * share * r_l
    s_h = _groups(sums, 2 * sample + 1, at + HALF, live, C, GROUPS) * share * r_h
    for block in tl.range(program, blocks, programs, num_stages=STAGES):
        row, place, known, there, inside = _lines(block, sample, rows, live, ROWS, WIDE)
        step = tl.load(scale + row, mask=known, other=0).to(tl.float32)[:, None, None]
        packed = tl.load(codes + place * HALF + at, mask=inside, other=0).to(tl.int32)
        low = _behind(
            g, g, marks, row, place, at, run, there, whole, inside, 0, C, RUN, MARKS, False, FIRST, PER_ONE, WIDE
        )  # fmt: skip
        high = _behind(
            g, g, marks, row, place, at, run, there, whole, inside, 1, C, RUN, MARKS, False, FIRST, PER_ONE, WIDE
        )  # fmt: skip
        low = low.to(tl.float32) * f_l - m_l - low_codes(packed) * step * s_l
        high = high.to(tl.float32) * f_h - m_h - high_codes(packed) * step * s_h
        if AFTER:
            low += tl.load(after + place * C + at, mask=inside, other=0).to(tl.float32)
            high += tl.load(after + place * C + HALF + at, mask=inside, other=0).to(tl.float32)
        tl.store(g_x + place * C + at, low.to(g_x.dtype.element_ty), mask=inside)
        tl.store(g_x + place * C + HALF + at, high.to(g_x.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Tiling:
    """Block sizes: least elements of half a tile, programs per multiprocessor, stages of loads in flight, warps."""

    entries: int
    waves: int
    stages: int
    warps: int = 4

    def cut(self, channels: int, rows: int, device: torch.device, samples: int = 1) -> tuple[dict[str, int], int, int]:
        """The constants of a tile, the number of tiles, and that of programs, both of one sample."""
        run = 8 if channels % 16 == 0 else 4
        runs = power_of_2(channels // (2 * run))
        each = max(1, self.entries // (run * runs))
        blocks = cdiv(rows, each)
        constants = {"RUNS": runs, "RUN": run, "ROWS": each}
        return constants, blocks, _programs(blocks, each, self.waves * multiprocessors(device), samples)


_LEAST_ROWS = 32  # of a program that has a part of a sample: it writes two numbers per channel


def _programs(blocks: int, each: int, most: int, samples: int) -> int:
    """Programs for so many tiles of a sample, of so many rows each."""
    if samples == 1:
        return min(blocks, most)
    return min(blocks, max(1, most // samples), max(1, blocks * each // _LEAST_ROWS))


# Measured on an H200 (docs/memory.md). Each program of the sums writes two numbers per channel: few programs where
# there are many channels.


def _normalize_tiling(channels: int) -> Tiling:
    if channels > 1024:
        return Tiling(512, 8, 1)
    return Tiling(512, 16 if channels <= 128 else 32, 1, warps=2)


def _sums_tiling(channels: int) -> Tiling:
    return Tiling(512, 16, 1) if channels < 1024 else Tiling(2048, 4, 1)


def _gradient_tiling(channels: int) -> Tiling:
    return Tiling(256, 16, 1, warps=2) if channels <= 256 else Tiling(512, 16, 1)


def _marks(name: str, levels: tuple[int, int] | None) -> dict[str, Any]:
    """Bits per element that f's gradient needs, 0, 1 or 4, and the levels of 4."""
    first, per_one = levels or (0, 1)
    return {"MARKS": 0 if not name else 4 if levels else 1, "FIRST": float(first), "PER_ONE": float(per_one)}


_COLUMNS = 128  # of x, that a program of the statistics reads


def statistics(
    x: Tensor, samples: int = 1, groups: int = 0, entries: int = 4096, waves: int = 8
) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel, or of each group of channels in each sample.

    Args:
        x: (rows, C), contiguous.
        samples: that the rows are of, each of as many.
        groups: of channels, neighbours; 0 for statistics per channel of all rows.
        entries, waves: elements of a tile, and programs per multiprocessor.

    Returns:
        Both (C,), or (samples, groups), in float32; the variance is the mean of (x − mean)².
    """
    channels, rows = x.shape[1], x.shape[0] // samples
    wide, by_sample = min(power_of_2(channels), _COLUMNS), groups > 0
    columns, each = cdiv(channels, wide), max(1, entries // wide)
    if by_sample:
        each = min(each, power_of_2(rows))
    blocks = cdiv(rows, each)
    programs = _programs(blocks, each, max(1, waves * multiprocessors(x.device) // columns), samples)
    parts = torch.empty(samples * programs, 2, channels, dtype=torch.float32, device=x.device)
    constants = {"C": channels, "COLUMNS": wide, "ROWS": each, "WIDE": is_wide(x.numel()), "STAGES": 1}
    constants["BY_SAMPLE"] = by_sample
    case = (x.device, rows, programs, samples, x.dtype, aligned(x), tuple(constants.items()))
    grid = samples * programs * columns
    launch(_moments_kernel, grid, case, (x, parts, rows, blocks, programs, columns), constants)
    shape = (samples, groups) if by_sample else (channels,)
    mean, var = (torch.empty(shape, dtype=torch.float32, device=x.device) for _ in range(2))
    if by_sample:
        per = power_of_2(channels // groups)
        own = {"C": channels, "GROUPS": groups, "PER": per, "PARTS": max(1, min(power_of_2(programs), 2048 // per))}
        own |= {"ROWS": each, "WIDE": is_wide(x.numel())}
        launch(
            _group_statistics_kernel, samples * groups,
            (x.device, x.dtype, aligned(x), rows, programs, tuple(own.items())),
            (x, parts, mean, var, rows, blocks, programs), own, num_warps=1 if own["PARTS"] * per <= 512 else 4,
        )  # fmt: skip
        return mean, var
    launch(
        _statistics_kernel, cdiv(channels, 8), (x.device, x.dtype, aligned(x), rows, programs, channels, each),
        (x, parts, mean, var, rows, blocks, programs), {"C": channels, "COLUMNS": 8, "PARTS": 512, "ROWS": each},
        num_warps=8,
    )  # fmt: skip
    return mean, var


def normalize(
    x: Tensor, mean: Tensor, r: Tensor, w: Tensor | None, b: Tensor | None, shortcut: Tensor | None, name: str,
    levels: tuple[int, int] | None, dtype: torch.dtype | None = None, in_place: bool = False,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Norm, residual and activation in one kernel: y = f(γ x̂ + β + shortcut), and all that backward needs.

    Args:
        x: (rows, C), contiguous, C a multiple of 8.
        mean, r: mean and 1/standard deviation, (C,), or (samples, groups) of a group norm; float32.
        w, b: γ and β, (C,) or None.
        shortcut: as x, or None.
        name: of f, "" for none.
        levels: of f's derivative (`saved.Levels`): the lowest, and the steps from 0 to 1; None for bits.
        dtype: of y; None for x's.
        in_place: whether y, of x's dtype, is written over x.
        tiling: block sizes.

    Returns:
        y, shaped as x; codes and scales of x̂ with per-row scales; marks of f, uint8, (rows, C/2) or (rows, C/8).
    """
    rows, channels = x.shape
    samples, of_groups = _by_sample(mean)
    tiling = tiling or _normalize_tiling(channels)
    kept = _marks(name, levels)
    y = x if in_place else torch.empty_like(x, dtype=dtype)
    codes = torch.empty(rows, 1, channels // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, 1, 1, dtype=torch.bfloat16, device=x.device)
    marks = torch.empty(rows, channels * kept["MARKS"] // 8, dtype=torch.uint8, device=x.device)
    rows //= samples
    tile, blocks, programs = tiling.cut(channels, rows, x.device, samples)
    constants = kept | tile | of_groups | {
        "C": channels, "F": FUNCTIONS[name], "SHORTCUT": shortcut is not None,
        "HAS_W": w is not None, "HAS_B": b is not None, "WIDE": is_wide(x.numel()), "STAGES": tiling.stages,
    }  # fmt: skip
    tensors = (x, mean, r, *(x if t is None else t for t in (w, b, shortcut)), y, codes, scale, marks)
    dtypes = tuple(t.dtype for t in tensors)
    case = (x.device, rows, programs, samples, dtypes, aligned(*tensors), tuple(constants.items()))
    given = (*tensors, rows, blocks, programs)
    launch(_normalize_kernel, samples * programs, case, given, constants, num_warps=tiling.warps)
    return y, codes, scale, marks


def _by_sample(r: Tensor) -> tuple[int, dict[str, Any]]:
    """The number of samples that have statistics of their own, and constants of the kernels."""
    samples, groups = r.shape if r.dim() == 2 else (1, r.shape[0])
    return samples, {"GROUPS": groups, "BY_SAMPLE": r.dim() == 2}


def gradient(
    g: Tensor, other: Tensor | None, codes: Tensor, scale: Tensor, marks: Tensor, r: Tensor, w: Tensor | None,
    name: str, levels: tuple[int, int] | None, passes_on: bool, dtype: torch.dtype | None = None,
    after: Tensor | None = None, in_place: bool = False,
    sums_tiling: Tiling | None = None, tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `normalize`.

    Args:
        g: (rows, C), contiguous.
        other: added to g, as g, or None.
        codes, scale, marks: of `normalize`.
        r, w, name, levels: as given to `normalize`.
        passes_on: whether the shortcut needs a gradient.
        dtype: of g_x; None for g's.
        after: added to g_x, of its shape and dtype, or None.
        in_place: whether the last result is written over g, which is scratch memory where it is not needed. Then g_x is
            written over `other`, or over g if there is no `other` and the shortcut needs no gradient.
        sums_tiling, tiling: block sizes.

    Returns:
        g_x, [Σ g, Σ g x̂] as (2, C) in float32, and the shortcut's gradient, empty if not needed.
    """
    rows, channels = g.shape
    samples, of_groups = _by_sample(r)
    by_sample = of_groups["BY_SAMPLE"]
    sums_tiling, tiling = sums_tiling or _sums_tiling(channels), tiling or _gradient_tiling(channels)
    rows //= samples
    writes = passes_on or other is not None  # the gradient of f's argument, which is then read instead of g
    passed_on = g.new_empty(0) if not writes else g if in_place else torch.empty_like(g)
    tile, blocks, programs = sums_tiling.cut(channels, rows, g.device, samples)
    parts = torch.empty(samples * programs, 2, channels, dtype=torch.float32, device=g.device)
    constants = _marks(name, levels) | tile | {"C": channels, "WIDE": is_wide(g.numel()), "STAGES": sums_tiling.stages}
    tensors = (g, g if other is None else other, codes, scale, marks, passed_on, parts)
    adds = other is not None
    case = (
        g.device, rows, programs, samples, adds, writes, tuple(t.dtype for t in tensors), aligned(*tensors),
        tuple(constants.items()),
    )  # fmt: skip
    summing = {**constants, "ADDS": adds, "PASS_ON": writes, "BY_SAMPLE": by_sample}
    given = (*tensors, rows, blocks, programs)
    launch(_sums_kernel, samples * programs, case, given, summing, num_warps=sums_tiling.warps)
    if by_sample:
        sums, totals = _of_groups(parts, w, samples, of_groups["GROUPS"])
    else:
        sums = totals = torch.empty(2, channels, dtype=torch.float32, device=g.device)
        launch(
            _total_kernel, cdiv(2 * channels, 8), (g.device, programs, channels), (parts, sums, programs),
            {"N": 2 * channels, "COLUMNS": 8, "ROWS": 1024}, num_warps=8,
        )  # fmt: skip
    # Behind f already, where it is there.
    source, marked = (passed_on, 0) if writes else (g, constants["MARKS"])
    tile, blocks, programs = tiling.cut(channels, rows, g.device, samples)
    constants |= tile | of_groups | {"MARKS": marked, "HAS_W": w is not None, "STAGES": tiling.stages}
    constants["AFTER"] = after is not None
    place = written_over(g, other, passes_on) if in_place else None
    g_x = torch.empty_like(g, dtype=dtype) if place is None else place
    read = (source, codes, scale, marks, totals, r, r if w is None else w, source if after is None else after, g_x)
    found = (g.device, rows, programs, samples, tuple(t.dtype for t in read), aligned(*read), tuple(constants.items()))
    share = 1.0 / (rows * channels // of_groups["GROUPS"])
    try:
        launch(
            _gradient_kernel, samples * programs, found, (*read, rows, blocks, programs, share), constants,
            num_warps=tiling.warps,
        )  # fmt: skip
    except compiler_errors() as error:
        if passed_on is g:  # the reference would read what the first kernel has written there
            raise RuntimeError(
                f"hotrain: a kernel of a norm's gradient failed on this device ({type(error).__name__}); set "
                "HOTRAIN_KERNELS=0 to train without kernels"
            ) from error
        raise
    return g_x, sums, passed_on if passes_on else g.new_empty(0)


def _of_groups(parts: Tensor, w: Tensor | None, samples: int, groups: int) -> tuple[Tensor, Tensor]:
    """Of the sums of programs those per channel, (2, C), and those of each group times γ, (samples, 2, groups)."""
    programs, channels = parts.shape[0] // samples, parts.shape[2]
    sums = torch.empty(2, samples, channels, dtype=torch.float32, device=parts.device)
    totals = torch.empty(samples, 2, groups, dtype=torch.float32, device=parts.device)
    per = power_of_2(channels // groups)
    constants = {"C": channels, "GROUPS": groups, "PER": per}
    constants |= {"ROWS": max(1, min(power_of_2(programs), 2048 // per)), "HAS_W": w is not None}
    tensors = (parts, parts if w is None else w, sums, totals)
    case = (parts.device, programs, samples, tuple(t.dtype for t in tensors), tuple(constants.items()))
    warps = 1 if constants["ROWS"] * per <= 512 else 4
    launch(
        _group_total_kernel, samples * groups, case, (*tensors, programs, samples), constants, num_warps=warps
    )  # fmt: skip
    return sums.sum(1), totals
