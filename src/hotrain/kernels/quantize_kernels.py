"""The quantize kernel: reads a matrix once, writes its codes rotated along channels, projected along tokens, or both.

::

    g_y (T, O)  ──►  codes of g_y H   (T, O')        row-major: the left operand of g_x
                ──►  codes of P g_y   (O, R')        transposed: the left operand of g_w
                ──►  column sums      (O,)           the bias gradient
    x (T, I)    ──►  codes of P x     (I, R')        transposed: the right operand of g_w

A program processes `TILES` tiles of 16 tokens by `BC` channels. Both transforms are products with ±1 matrices that it
builds in registers; ¼ (and the gain of a drawn row) is multiplied afterwards, so 16-bit inputs are transformed
without any rounding but float32's.

**Delayed scaling.** An fp8 scale is a power of two, so a code times its scale does not depend on it while the code is a
normal number. The kernel takes the scale from the amax of the last step and measures this step's in the same pass;
`_correct_kernel` then checks whether the scale was right within a few binades, and only if not writes the codes again.
Where the hardware supports it, it is launched while the first still runs, and waits for it (OVERLAP). An integer scale
is the exact one of the reference: a first pass measures amax, the second writes codes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..layer_record import BINS, AmaxHistory
from ..transform.tokens import INDEX_BYTES, Layout, recent
from .activation import rough_slope, roughly
from .formats import (
    COPY,
    DTYPES,
    E4M3,
    E5M2,
    INT,
    NONE,
    NOTHING,
    PROJECTED,
    ROTATED,
    WEIGHT,
    Coded,
    Joined,
    Output,
    Tiling,
    channels_at_once,
    padded,
    whole,
)
from .launch import INTERPRETED, aligned, cdiv, launch, multiprocessors, overlaps, power_of_2
from .noise import noise16, round_nearest, round_stochastic, stream_words
from .rows import kept_rows, of_layout
from .support import FUNCTIONS

_INT, _E4M3, _E5M2, _COPY = (tl.constexpr(i) for i in (INT, E4M3, E5M2, COPY))

_BINS = tl.constexpr(BINS)
_HEADROOM = tl.constexpr(2)  # binades above the previous amax: a gradient may grow fourfold without a second pass
_SLACK = tl.constexpr(4)  # binades by which a scale may be too large before the codes are written again
_DERIVED = tl.constexpr(3)


@triton.jit
def magnitude_bits(v):
    """|v| as an int32 with the same order; infinity is larger than any number, NaN largest."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def exponent_for(bits, NUMBER: tl.constexpr):
    """Biased exponent of the smallest power of two that brings a magnitude into fp8's range, 1.75·2⁸ or 1.75·2¹⁵."""
    TOP: tl.constexpr = 8 if NUMBER == _E4M3 else 15
    exponent = (bits >> 23) - TOP + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.minimum(tl.maximum(exponent, 1), 253)


@triton.jit
def power(exponent):
    """2^(exponent − 127) as float32."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def guessed_exponent(bits, NUMBER: tl.constexpr):
    """The exponent of the scale predicted from the previous amax; that of 1.0 where there was none."""
    return tl.where(bits == 0, 127, tl.minimum(exponent_for(bits, NUMBER) + _HEADROOM, 253))


@triton.jit
def integer_scale(bits, LIMIT: tl.constexpr):
    """`quantize.integer.scale_of`: magnitude / largest code, at least the smallest normal number; NaN stays."""
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), bits.to(tl.float32, bitcast=True) * 0.0 + LIMIT)
    return tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)


@triton.jit
def on_fp8_grid(v, NUMBER: tl.constexpr):
    """v rounded to fp8's numbers, halves to even, as float32: the interpreter's own cast loses a carry."""
    DROPPED: tl.constexpr = 20 if NUMBER == _E4M3 else 21
    SMALLEST: tl.constexpr = 2.0**-6 if NUMBER == _E4M3 else 2.0**-14
    LIFT: tl.constexpr = 1.5 * 2.0**14 if NUMBER == _E4M3 else 1.5 * 2.0**7
    bits = v.to(tl.int32, bitcast=True)
    bits = bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)
    normal = ((bits >> DROPPED) << DROPPED).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(v) < SMALLEST, (v + LIFT) - LIFT, tl.where(v == v, normal, v))


@triton.jit
def encode(v, noise, NUMBER: tl.constexpr, LIMIT: tl.constexpr, STOCHASTIC: tl.constexpr, UPCAST: tl.constexpr):
    """Codes of v, which is divided by the scale already. A non-finite element becomes fp8's NaN."""
    if NUMBER == _INT:
        v = round_stochastic(v, noise) if STOCHASTIC else round_nearest(tl.minimum(tl.maximum(v, -300.0), 300.0))
        codes = tl.minimum(tl.maximum(v, -LIMIT), LIMIT).to(tl.int8)
    else:
        # The hardware's cast saturates; an infinity has made the scale NaN (`final_scale`), a NaN stays one.
        if UPCAST:
            v = on_fp8_grid(tl.where(v == v, tl.minimum(tl.maximum(v, -LIMIT), LIMIT), v), NUMBER)
        codes = v.to(tl.float8e4nv) if NUMBER == _E4M3 else v.to(tl.float8e5)
    return codes


@triton.jit
def parity_sign(bits):
    """(−1)^(number of set bits) of 4 bits, float32: 0x6996 holds the parities of 0..15."""
    return (((0x6996 >> bits) & 1) << 31 | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def hadamard16():
    """Sylvester's H16, ±1, (16, 16) float32."""
    i = tl.arange(0, 16)
    return parity_sign(i[:, None] & i[None, :])


@triton.jit
def _decoded(
    codes, step, gamma, beta, row, c0, inside, C, BC: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, NORMED: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr,
    F: tl.constexpr, SLOPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """BC channels from c0 on of the matrix of a `formats.Coded`, float32, of one half of a group; 0 for no token.

    With SLOPED it is f'(x), with which the gradient is multiplied. `step` has the tokens' scales.
    """
    HALF: tl.constexpr = GROUP // 2
    group, c, unit = c0 // GROUP, c0 + tl.arange(0, BC), step.to(tl.float32)[:, None]
    if BITS == 4:
        half = (c0 - group * GROUP) // HALF
        first = c0 - (group + half) * HALF  # bytes of the groups before, and of this one
        at = codes + row[:, None] * (C // 2) + (first + tl.arange(0, BC))[None, :]
        packed = (tl.load(at, mask=inside[:, None], other=0).to(tl.int32) >> (half * 4)) & 15
        v = ((packed | 0x4B000000).to(tl.float32, bitcast=True) - 8388615.0) * unit
    else:
        at = codes + row[:, None] * C + c[None, :]
        v = tl.load(at, mask=inside[:, None], other=0).to(tl.float32)
        v = tl.fma(v, unit, unit * -127.0)  # rounded once
    if NORMED:
        if HAS_W:
            v = v * tl.load(gamma + c).to(tl.float32)[None, :]
        if HAS_B:
            v = v + tl.load(beta + c).to(tl.float32)[None, :]
    v = rough_slope(v, F) if SLOPED else roughly(v, F)
    if MASKED:
        v = tl.where(inside[:, None], v, 0.0)
    return v


@triton.jit
def _walsh_rows(
    b, table, key, tiles, square, line, s, j, k, total, singles, tile_blocks, write,
    ROWS: tl.constexpr, RANK: tl.constexpr, RANKP: tl.constexpr, TILES: tl.constexpr,
    DRAW: tl.constexpr, FIXED: tl.constexpr, SAMPLED: tl.constexpr, CYCLE: tl.constexpr, STREAM: tl.constexpr,
    SQUARE: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """P of block b as ±1 and 0, (ROWS, SLOTS), and a mask of the rows that exist.

    Row j is place k of tile j // RANKP, or, in a dense block, the token of slot j itself. DRAW: the rows of the tiles
    are drawn, and written to the table where `write`; else they are read from it.
    """
    if b >= tile_blocks:
        p = (j[:, None] == s[None, :]).to(tl.float32)
        real = (b - tile_blocks) * ROWS + j < singles
    else:
        tile = b * TILES + j // RANKP
        real = (tile < total) & (k < RANK)
        if DRAW:
            here, places = b * TILES + tl.arange(0, TILES), tl.arange(0, RANKP)
            natural = tl.reshape(
                kept_rows(here, places, key, tiles, square, line, FIXED, SAMPLED, CYCLE, STREAM, SQUARE, LINE), (ROWS,)
            )
            tl.store(table + tile * RANK + k, natural.to(tl.uint8), mask=real & write)
        else:
            natural = tl.load(table + tile * RANK + k, mask=real, other=0).to(tl.int32)
        own = real[:, None] & ((j // RANKP)[:, None] == (s // 16)[None, :])
        p = tl.where(own, parity_sign(natural[:, None] & (s % 16)[None, :]), 0.0)
    return p, real


@triton.jit
def _within_threads(v, M: tl.constexpr, N: tl.constexpr, EACH: tl.constexpr):
    """The largest of every EACH neighbours, (M, N) to (M, N/EACH): reduced within a thread."""
    return tl.max(tl.reshape(v, (M, N // EACH, EACH)), axis=2)


@triton.jit
def _block(
    b, first, t, stride, steps, gamma, beta, index, table, key, rot, rot_pitch, proj, proj_pitch, sums, rot_max,
    proj_max, rot_scale, proj_scale, rot_inverse, proj_inverse, C, CP, tiles, square, line, total, singles,
    tile_blocks, dense_rows, chunks,
    ROT: tl.constexpr, ROTATE: tl.constexpr, ROT_LIMIT: tl.constexpr, ROT_EACH: tl.constexpr, ROT_NOISE: tl.constexpr,
    PROJ: tl.constexpr, PROJ_LIMIT: tl.constexpr, PROJ_EACH: tl.constexpr, PROJ_NOISE: tl.constexpr,
    PROJ_STREAM: tl.constexpr, ROT_STREAM: tl.constexpr,
    MEASURE: tl.constexpr, WRITE: tl.constexpr, SUMS: tl.constexpr, EVEN: tl.constexpr,
    FULL: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr, DERIVED: tl.constexpr, WIDE: tl.constexpr,
    TILES: tl.constexpr, RANK: tl.constexpr, RANKP: tl.constexpr, FIXED: tl.constexpr, GAIN: tl.constexpr,
    DRAW: tl.constexpr, SAMPLED: tl.constexpr, CYCLE: tl.constexpr, STREAM: tl.constexpr, SQUARE: tl.constexpr,
    LINE: tl.constexpr,
    BC: tl.constexpr, LOOP: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr, ROT_FLOAT: tl.constexpr,
    BITS: tl.constexpr, GROUPED: tl.constexpr, NORMED: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr,
    F: tl.constexpr, FLOAT: tl.constexpr, SLOPED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Block b of tokens by LOOP chunks of BC channels from chunk `first` on. Blocks of tiles precede dense ones.

    With PART the matrix is three of so many channels side by side: t, steps and gamma.
    """
    SLOTS: tl.constexpr = TILES * 16
    ROWS: tl.constexpr = TILES * RANKP
    QUARTER: tl.constexpr = 0.25 if ROTATE else 1.0
    # FLOAT: 0 for the matrix itself, else which dtype that of the codes has.
    SOURCE: tl.constexpr = (
        t.dtype.element_ty if FLOAT == 0 else tl.float16 if FLOAT == 1 else tl.bfloat16 if FLOAT == 2 else tl.float32
    )
    DTYPE: tl.constexpr = tl.float32 if UPCAST else SOURCE
    MASKED: tl.constexpr = not (FULL and WHOLE)
    s = tl.arange(0, SLOTS)
    token = tl.load(index + b * SLOTS + s)
    inside = token >= 0
    row = token.to(tl.int64) if WIDE else token
    is_dense = b >= tile_blocks
    if ROT:
        h = hadamard16().to(DTYPE)
        rot_found = tl.zeros((SLOTS, BC // 8), tl.int32 if ROT == _INT else tl.float32)
        if WRITE and ROT_EACH == 1:
            scale = integer_scale(tl.load(rot_max + row, mask=inside, other=0), ROT_LIMIT)
            rot_factor = (QUARTER * tl.div_rn(scale * 0.0 + 1.0, scale))[:, None]
            tl.store(rot_scale + row, scale, mask=inside & (first == 0))
        else:
            rot_factor = rot_inverse * QUARTER
        if ROT_NOISE:
            r0, r1 = stream_words(tl.load(key), ROT_STREAM)
    if PROJ or SUMS:
        j = tl.arange(0, ROWS)
        k = j % RANKP
        p, real = _walsh_rows(
            b, table, key, tiles, square, line, s, j, k, total, singles, tile_blocks, first == 0,
            ROWS, RANK, RANKP, TILES, DRAW, FIXED, SAMPLED, CYCLE, STREAM, SQUARE, LINE,
        )  # fmt: skip
        p = p.to(DTYPE)
        factor = tl.where(is_dense, 1.0, tl.where(k < FIXED, 0.25, 0.25 * GAIN))
        if RANK == RANKP:
            start = tl.where(is_dense, dense_rows + (b - tile_blocks) * ROWS, b * (TILES * RANK))
            if ALIGNED:
                start = tl.multiple_of(start, 16)
            r = start + j
        else:
            r = tl.where(is_dense, dense_rows + (b - tile_blocks) * ROWS + j, (b * TILES + j // RANKP) * RANK + k)
        proj_found = tl.zeros((ROWS, BC // 2), tl.int32 if PROJ == _INT else tl.float32)
        if PROJ_NOISE:
            p0, p1 = stream_words(tl.load(key), PROJ_STREAM)
        # A row of ones sums the tokens on the tensor cores; slots that repeat a token are masked.
        once = tl.where(is_dense, s < ROWS, s >= 0)
        ones = tl.broadcast_to(once[None, :], (16, SLOTS)).to(DTYPE)
    if BITS != 0:
        scales = steps + row * (C // GROUPED)
        step = tl.load(scales + first * BC // GROUPED, mask=inside, other=0)
    for chunk in tl.range(first, tl.minimum(first + LOOP, chunks), num_stages=STAGES):
        c0 = chunk * BC
        c = c0 + tl.arange(0, BC)
        # FULL: every slot has a token. WHOLE: the channels are a multiple of BC.
        if BITS != 0:
            # 16 bits are too few for the compiler's pipeline: the next block's scales are loaded here.
            ahead = tl.load(scales + tl.minimum(c0 + BC, C - BC) // GROUPED, mask=inside, other=0)
            if SLOPED:
                x = tl.load(t + row[:, None] * stride + c[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
                x = x * _decoded(
                    gamma, step, gamma, beta, row, c0, inside, C, BC, BITS, GROUPED, False, False, False, F, True,
                    MASKED,
                )  # fmt: skip
            else:
                x = _decoded(
                    t, step, gamma, beta, row, c0, inside, C, BC, BITS, GROUPED, NORMED, HAS_W, HAS_B, F, False, MASKED
                )  # fmt: skip
            x = x.to(SOURCE)
            step = ahead
        elif PART != 0:
            part = c0 // PART
            own = tl.where(part == 0, t, tl.where(part == 1, steps, gamma))
            at = own + row[:, None] * stride + (c0 - part * PART + tl.arange(0, BC))[None, :]
            x = tl.load(at, mask=inside[:, None], other=0.0) if MASKED else tl.load(at)
        elif MASKED:
            x = tl.load(t + row[:, None] * stride + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0)
        else:
            x = tl.load(t + row[:, None] * stride + c[None, :])
        x = x.to(DTYPE)
        if ROT:
            if ROTATE:
                v = tl.reshape(tl.dot(tl.reshape(x, (SLOTS * BC // 16, 16)), h, input_precision="ieee"), (SLOTS, BC))
            else:
                v = x.to(tl.float32)
            if MEASURE and ROT_EACH == 2:
                tl.store(rot_max + b * C + c, tl.max(magnitude_bits(v * QUARTER), axis=0), mask=c < C)
            elif MEASURE:
                size = magnitude_bits(v) if ROT == _INT else tl.abs(v)
                rot_found = tl.maximum(rot_found, _within_threads(size, SLOTS, BC, 8))
            if WRITE:
                if ROT_EACH == 2:
                    of_channels = tl.load(rot_scale + c, mask=c < C, other=1.0)
                    v = v * (QUARTER * tl.div_rn(of_channels * 0.0 + 1.0, of_channels))[None, :]
                else:
                    v = v * rot_factor
                noise = v
                if ROT_NOISE:  # numbered as in the definition, which pads to whole blocks only to rotate
                    if ROTATE:
                        noise = noise16(row[:, None], c0, CP, r0, r1, BC, True)
                    else:
                        noise = noise16(row[:, None], c0, C, r0, r1, BC, EVEN)
                codes = encode(v, noise, ROT, ROT_LIMIT, ROT_NOISE, UPCAST)
                if ROT_FLOAT:
                    codes = codes.to(tl.float32)
                    if ROT_EACH == 1:
                        codes = codes * scale[:, None]
                    codes = codes.to(rot.dtype.element_ty)
                to = rot + row[:, None] * rot_pitch + c[None, :]
                if MASKED:
                    tl.store(to, codes, mask=inside[:, None] & (c < CP)[None, :])
                else:
                    tl.store(to, codes)
        if SUMS:
            added = tl.dot(ones, x, input_precision="ieee")
            first_row = (tl.arange(0, 16) == 0)[:, None]
            lines = tl.arange(0, 16)[:, None] * 0
            tl.store(sums + b * C + c[None, :] + lines, added, mask=first_row & (c < C)[None, :])
        if PROJ:
            z = tl.dot(p, x, input_precision="ieee")
            if MEASURE and PROJ_EACH:  # only integers have per-channel scales
                tl.store(proj_max + b * C + c, tl.max(magnitude_bits(z * factor[:, None]), axis=0), mask=c < C)
            elif MEASURE and not DERIVED and PROJ != _COPY:
                size = magnitude_bits(z * factor[:, None]) if PROJ == _INT else tl.abs(z)
                proj_found = tl.maximum(proj_found, _within_threads(size, ROWS, BC, 2))
            if WRITE:
                if PROJ == _COPY:
                    codes = (z * factor[:, None]).to(proj.dtype.element_ty)
                else:
                    if PROJ_EACH:
                        of_outputs = tl.load(proj_scale + c, mask=c < C, other=1.0)
                        z = z * factor[:, None] * tl.div_rn(of_outputs * 0.0 + 1.0, of_outputs)[None, :]
                    elif PROJ == _INT:
                        z = z * factor[:, None] * proj_inverse
                    else:
                        z = z * (factor * proj_inverse)[:, None]
                    noise = z
                    if PROJ_NOISE:
                        noise = noise16(r[:, None], c0, C, p0, p1, BC, EVEN)
                    codes = encode(z, noise, PROJ, PROJ_LIMIT, PROJ_NOISE, UPCAST)
                to = proj + (c.to(tl.int64) if WIDE else c)[:, None] * proj_pitch + r[None, :]
                if MASKED:
                    tl.store(to, tl.trans(codes), mask=(c < C)[:, None] & real[None, :])
                else:
                    tl.store(to, tl.trans(codes))
    if MEASURE and ROT and ROT_EACH != 2:
        if ROT_EACH == 1:
            largest = tl.max(rot_found, axis=1).to(tl.float32, bitcast=True) * QUARTER
            tl.atomic_max(rot_max + row, magnitude_bits(largest), mask=inside, sem="relaxed")
        else:
            largest = tl.max(rot_found)
            if ROT == _INT:
                largest = largest.to(tl.float32, bitcast=True)
            tl.atomic_max(rot_max + (b + first) % _BINS, magnitude_bits(largest * QUARTER), sem="relaxed")
    if MEASURE and PROJ and PROJ != _COPY and not (PROJ_EACH or DERIVED):
        largest = tl.max(proj_found)
        if PROJ == _INT:
            largest = largest.to(tl.float32, bitcast=True)
        else:
            # The largest factor for all rows: a binade too much at most.
            largest = largest * tl.where(is_dense, 1.0, 0.25 * GAIN)
        tl.atomic_max(proj_max + (b + first) % _BINS, magnitude_bits(largest), sem="relaxed")


@triton.jit
def derived_exponent(exponent):
    """The scale of P g from that of g: |P g| is at most 4·√3·max|g| for the rows in use, three binades."""
    return tl.minimum(exponent + _DERIVED, 253)


@triton.jit
def _compress_kernel(
    t, stride, steps, gamma, beta, index, table, key, rot, rot_pitch, proj, proj_pitch, sums, rot_max, proj_max,
    rot_hint, proj_hint, rot_scale, proj_scale, C, CP, tiles, square, line, total, singles, tile_blocks, dense_rows,
    blocks, chunks, slices,
    ROT: tl.constexpr, ROTATE: tl.constexpr, ROT_LIMIT: tl.constexpr, ROT_EACH: tl.constexpr, ROT_NOISE: tl.constexpr,
    PROJ: tl.constexpr, PROJ_LIMIT: tl.constexpr, PROJ_EACH: tl.constexpr, PROJ_NOISE: tl.constexpr,
    PROJ_STREAM: tl.constexpr, ROT_STREAM: tl.constexpr,
    MEASURE: tl.constexpr, WRITE: tl.constexpr, SUMS: tl.constexpr, EVEN: tl.constexpr,
    FULL: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr, DERIVED: tl.constexpr, WIDE: tl.constexpr,
    TILES: tl.constexpr, RANK: tl.constexpr, RANKP: tl.constexpr, FIXED: tl.constexpr, GAIN: tl.constexpr,
    DRAW: tl.constexpr, SAMPLED: tl.constexpr, CYCLE: tl.constexpr, STREAM: tl.constexpr, SQUARE: tl.constexpr,
    LINE: tl.constexpr,
    BC: tl.constexpr, LOOP: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr, ROT_FLOAT: tl.constexpr,
    GROUP: tl.constexpr, OVERLAP: tl.constexpr,
    BITS: tl.constexpr, GROUPED: tl.constexpr, NORMED: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr,
    F: tl.constexpr, FLOAT: tl.constexpr, SLOPED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    # Programs that run at once have GROUP blocks of tokens by all channels: whole rows are read, whole lines written.
    pid = tl.program_id(0)
    group = pid // (GROUP * slices)
    height = tl.minimum(blocks - group * GROUP, GROUP)
    inner = pid - group * GROUP * slices
    b, piece = group * GROUP + inner % height, inner // height
    rot_inverse, proj_inverse = 1.0, 1.0
    if WRITE:
        if ROT == _INT and ROT_EACH == 0:
            scale = integer_scale(tl.max(tl.load(rot_max + tl.arange(0, _BINS))), ROT_LIMIT)
            rot_inverse = tl.div_rn(scale * 0.0 + 1.0, scale)
            tl.store(rot_scale, scale, mask=pid == 0)
        if ROT == _E4M3 or ROT == _E5M2:
            exponent = guessed_exponent(tl.load(rot_hint), ROT)
            rot_inverse = power(254 - exponent)
        if PROJ == _INT and not PROJ_EACH:
            scale = integer_scale(tl.max(tl.load(proj_max + tl.arange(0, _BINS))), PROJ_LIMIT)
            proj_inverse = tl.div_rn(scale * 0.0 + 1.0, scale)
            tl.store(proj_scale, scale, mask=pid == 0)
        if DERIVED:
            proj_inverse = power(254 - derived_exponent(exponent))
        elif PROJ == _E4M3 or PROJ == _E5M2:
            proj_inverse = power(254 - guessed_exponent(tl.load(proj_hint), PROJ))
    _block(
        b, piece * LOOP, t, stride, steps, gamma, beta, index, table, key, rot, rot_pitch, proj, proj_pitch, sums,
        rot_max, proj_max, rot_scale, proj_scale, rot_inverse, proj_inverse, C, CP, tiles, square, line, total, singles,
        tile_blocks, dense_rows, chunks,
        ROT, ROTATE, ROT_LIMIT, ROT_EACH, ROT_NOISE, PROJ, PROJ_LIMIT, PROJ_EACH, PROJ_NOISE, PROJ_STREAM, ROT_STREAM,
        MEASURE, WRITE, SUMS, EVEN, FULL, WHOLE, ALIGNED, DERIVED, WIDE, TILES, RANK, RANKP, FIXED, GAIN, DRAW,
        SAMPLED, CYCLE, STREAM, SQUARE, LINE, BC, LOOP, STAGES, UPCAST, ROT_FLOAT, BITS, GROUPED, NORMED, HAS_W,
        HAS_B, F, FLOAT, SLOPED, PART,
    )  # fmt: skip


@triton.jit
def corrected(hint, NUMBER: tl.constexpr):
    """(exponent to use, whether the codes must be written again, amax of this step) of one tensor."""
    found = tl.max(tl.load(hint + 2 + tl.arange(0, _BINS)))
    used = guessed_exponent(tl.load(hint), NUMBER)
    need = exponent_for(found, NUMBER)
    wrong = ((used < need) | ((used > need + _SLACK) & (found > 0))) & (found < 0x7F800000)
    return tl.where(wrong, need, used), wrong, found


@triton.jit
def final_scale(exponent, found):
    """The scale as float32; NaN where an element is infinite, which fp8's saturating cast would hide."""
    return tl.where(found < 0x7F800000, power(exponent), float("nan"))


@triton.jit
def remember(hint, found):
    """Store this step's amax for the next step and clear the bins."""
    tl.store(hint, tl.where((found > 0) & (found < 0x7F800000), found, tl.load(hint)))
    tl.store(hint + 2 + tl.arange(0, _BINS), tl.zeros((_BINS,), tl.int32))


@triton.jit
def _add_columns(partial, to, me, count, rows, C, BLOCK: tl.constexpr):
    """The sum over the rows of `partial`, (rows, C); the programs share the columns."""
    for first in range(me * 32, C, count * 32):
        c = first + tl.arange(0, 32)
        total = tl.zeros((BLOCK, 32), tl.float32)
        for start in range(0, rows, BLOCK):
            r = start + tl.arange(0, BLOCK)
            total += tl.load(
                partial + r[:, None] * C + c[None, :], mask=(r < rows)[:, None] & (c < C)[None, :], other=0.0
            )
        tl.store(to + c, tl.sum(total, axis=0).to(to.dtype.element_ty), mask=c < C)


@triton.jit
def _sums_kernel(partial, to, rows, C, BLOCK: tl.constexpr):
    _add_columns(partial, to, tl.program_id(0), tl.num_programs(0), rows, C, BLOCK)


@triton.jit
def _channel_scales_kernel(partial, to, rows, C, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """The integer scales of channels, of their amax in each of so many blocks, (rows, C)."""
    c = tl.program_id(0) * 32 + tl.arange(0, 32)
    found = tl.zeros((BLOCK, 32), tl.int32)
    for start in range(0, rows, BLOCK):
        r = start + tl.arange(0, BLOCK)
        inside = (r < rows)[:, None] & (c < C)[None, :]
        found = tl.maximum(found, tl.load(partial + r[:, None] * C + c[None, :], mask=inside, other=0))
    tl.store(to + c, integer_scale(tl.max(found, axis=0), LIMIT), mask=c < C)


@triton.jit
def _correct_kernel(
    t, stride, steps, gamma, beta, index, table, key, rot, rot_pitch, proj, proj_pitch, partial, total_sums, rot_hint,
    proj_hint, rot_scale, proj_scale, C, CP, tiles, square, line, total, singles, tile_blocks, dense_rows, blocks,
    chunks, slices,
    ROT: tl.constexpr, ROTATE: tl.constexpr, ROT_LIMIT: tl.constexpr,
    PROJ: tl.constexpr, PROJ_LIMIT: tl.constexpr, SUMS: tl.constexpr,
    FULL: tl.constexpr, WHOLE: tl.constexpr, ALIGNED: tl.constexpr, DERIVED: tl.constexpr, WIDE: tl.constexpr,
    TILES: tl.constexpr, RANK: tl.constexpr, RANKP: tl.constexpr, FIXED: tl.constexpr, GAIN: tl.constexpr,
    SAMPLED: tl.constexpr, CYCLE: tl.constexpr, STREAM: tl.constexpr, SQUARE: tl.constexpr, LINE: tl.constexpr,
    BC: tl.constexpr, LOOP: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr, ROT_FLOAT: tl.constexpr,
    OVERLAP: tl.constexpr,
    BITS: tl.constexpr, GROUPED: tl.constexpr, NORMED: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr,
    F: tl.constexpr, FLOAT: tl.constexpr, SLOPED: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Write the scales and the column sums; write codes again where a predicted scale was wrong. Integers are NONE."""
    if OVERLAP:
        gdc_wait()
    me, count = tl.program_id(0), tl.num_programs(0)
    if SUMS:
        _add_columns(partial, total_sums, me, count, blocks, C, 128)
    rot_inverse, proj_inverse = 1.0, 1.0
    wrong = False
    ticket = rot_hint if ROT else proj_hint
    if ROT:
        exponent, off, rot_found = corrected(rot_hint, ROT)
        rot_inverse = power(254 - exponent)
        wrong = wrong | off
        tl.store(rot_scale, final_scale(exponent, rot_found), mask=me == 0)
        if DERIVED:
            exponent = derived_exponent(exponent)
            proj_inverse = power(254 - exponent)
            tl.store(proj_scale, final_scale(exponent, rot_found), mask=me == 0)
    if PROJ and not DERIVED:
        exponent, off, proj_found = corrected(proj_hint, PROJ)
        proj_inverse = power(254 - exponent)
        wrong = wrong | off
        tl.store(proj_scale, final_scale(exponent, proj_found), mask=me == 0)
    tl.debug_barrier()
    # The last program to have read the bins clears them.
    if tl.atomic_add(ticket + 1, 1) == count - 1:
        tl.store(ticket + 1, 0)
        if ROT:
            remember(rot_hint, rot_found)
        if PROJ and not DERIVED:
            remember(proj_hint, proj_found)
    if wrong:
        for i in range(me, blocks * slices, count):
            _block(
                i // slices, i % slices * LOOP, t, stride, steps, gamma, beta, index, table, key, rot, rot_pitch, proj,
                proj_pitch, t, t, t, rot_scale, proj_scale, rot_inverse, proj_inverse, C, CP, tiles, square, line,
                total, singles, tile_blocks, dense_rows, chunks,
                ROT, ROTATE, ROT_LIMIT, 0, False, PROJ, PROJ_LIMIT, False, False, 0, 0, False, True, False, False,
                FULL, WHOLE, ALIGNED, DERIVED, WIDE, TILES, RANK, RANKP, FIXED, GAIN, False, SAMPLED, CYCLE, STREAM,
                SQUARE, LINE, BC, LOOP, 1, UPCAST, ROT_FLOAT, BITS, GROUPED, NORMED, HAS_W, HAS_B, F, FLOAT, SLOPED,
                PART,
            )  # fmt: skip


def index_of(lay: Layout, tiling: Tiling, device: torch.device) -> tuple[Tensor, bool]:
    """The tokens of the blocks that a launch over a layout reads, made once; and whether every slot has one."""
    return _index(lay, tiling.tiles, tiling.tiles * _places(lay, tiling), device)


def _places(lay: Layout, tiling: Tiling) -> int:
    """Rows of a tile that a block has a place for."""
    return max(power_of_2(lay.lines.rank), 16 // tiling.tiles)


@recent(INDEX_BYTES)
def _index(lay: Layout, tiles: int, rows: int, device: torch.device) -> tuple[Tensor, bool]:
    """The token in every slot of every block, int32, −1 for none, (blocks, 16·tiles); and whether all are filled.

    Blocks of `tiles` tiles of any samples come first, then blocks of `rows` dense tokens.
    """
    slots = lay.slots
    start = torch.arange(lay.samples, device="cpu")[:, None] * lay.tokens
    end = lay.tiles * 16

    def blocks(part: Tensor, each: int) -> Tensor:
        t = torch.where(part >= 0, start + part, -1).flatten()
        t = torch.nn.functional.pad(t, (0, -t.numel() % each), value=-1).view(-1, each)
        return torch.nn.functional.pad(t, (0, 16 * tiles - each), value=-1)

    index = torch.cat((blocks(slots[:end], 16 * tiles), blocks(slots[end:], rows)))
    # A dense block fills `rows` of its slots; the others may read any token, P has zeros for them.
    filled = bool((index[: -(-lay.samples * lay.tiles // tiles)] >= 0).all()) and lay.samples * lay.dense % rows == 0
    if filled:
        index = torch.where(index < 0, index[:, :1], index)
    return index.to(torch.int32).to(device), filled


@dataclass(frozen=True, eq=False)
class _Plan:
    """Launch parameters of a call that depend on its shapes and formats only; it is hashed by its identity."""

    wide: int
    kept: int
    blocks: int
    programs: int
    where: tuple[int, ...]
    write: dict[str, Any]
    measure: dict[str, Any]
    correct: dict[str, Any]
    fp8: bool
    integers: bool
    options: dict[str, Any]
    correcting: dict[str, Any]  # the options of the correction


Kind = tuple[int, int, bool, str, torch.dtype, torch.dtype | None, torch.dtype | None, bool]  # `Coded.kind`
_FLOATS = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}


def _source(kind: Kind | None) -> dict[str, Any]:
    """What a kernel reads: the matrix, or its codes."""
    bits, group, normed, name, dtype, w, b, sloped = kind or (0, 0, False, "", None, None, None, False)
    return {
        "BITS": bits, "GROUPED": group, "NORMED": normed, "HAS_W": w is not None,
        "HAS_B": b is not None, "F": FUNCTIONS[name], "FLOAT": 0 if dtype is None or sloped else _FLOATS[dtype],
        "SLOPED": sloped,
    }  # fmt: skip


_TILING, _TILING_OF_WEIGHTS = Tiling(), Tiling(2, 128, 4, 2)
_plans: dict[tuple[Any, ...], tuple[_Plan, Layout]] = {}
_MOST_PLANS = 4096  # inputs of many lengths have one each


def _plan(
    tokens: int, channels: int, stride: int, kind: Kind | None, part: int, lay: Layout, rotated: Output,
    projected: Output, rotate: bool, sums: bool, draw: bool, tiling: Tiling, device: torch.device,
) -> _Plan:  # fmt: skip
    rank, rows_of = lay.lines.rank, lay.lines
    wide, kept = padded(channels), padded(lay.rows)
    rankp = _places(lay, tiling)
    bc = min(tiling.channels, max(16, power_of_2(wide)) if kind is None else channels_at_once(*kind[:2]))
    if bc > 64 and channels % bc:  # the last block of channels would not be full
        bc //= 2
    if part:
        bc = min(bc, part & -part)
    index, full = index_of(lay, tiling, device)
    total, singles = lay.samples * lay.tiles, lay.samples * lay.dense
    tile_blocks, blocks, chunks = cdiv(total, tiling.tiles), len(index), cdiv(wide, bc)
    # Loops of nearly equal length.
    wanted = cdiv(int(tiling.programs * multiprocessors(device)), max(1, blocks))
    slices = cdiv(chunks, max(1, min(tiling.loop, chunks // wanted)))
    loop = cdiv(chunks, slices)
    # 4·gain·max|t| bounds P t; with a gain above 2 it would take another binade.
    derived = rotated.is_fp8 and projected.number == rotated.number and not rotate and rows_of.gain <= 2
    shape = {
        "FULL": full and rank == rankp, "WHOLE": channels % bc == 0,
        "ALIGNED": total * rank % 16 == 0 and tiling.tiles * rank % 16 == 0,
        "DERIVED": derived, "WIDE": max(tokens, 16) * max(wide, stride) >= 1 << 31 or wide * kept >= 1 << 31,
        "TILES": tiling.tiles, "RANK": rank, "RANKP": rankp, "GAIN": rows_of.gain, **of_layout(lay), "BC": bc,
        "LOOP": loop, "STAGES": tiling.stages, "UPCAST": INTERPRETED, "ROT_FLOAT": rotated.dtype is not None,
        "OVERLAP": overlaps(device), **_source(kind), "PART": part,
    }  # fmt: skip
    fp8 = rotated.is_fp8 or projected.is_fp8

    def constants(
        rotated: Output, projected: Output, measure: bool, write: bool, sums: bool, draw: bool
    ) -> dict[str, Any]:
        return {
            "ROT": rotated.number, "ROTATE": rotate, "ROT_LIMIT": rotated.limit,
            "ROT_EACH": 2 if rotated.across else int(rotated.each),
            "ROT_NOISE": rotated.stochastic, "PROJ": projected.number, "PROJ_LIMIT": projected.limit,
            "PROJ_EACH": projected.each, "PROJ_NOISE": projected.stochastic, "PROJ_STREAM": projected.stream,
            "ROT_STREAM": rotated.stream, "MEASURE": measure, "WRITE": write, "SUMS": sums, "EVEN": channels % 2 == 0,
            "GROUP": tiling.group, "DRAW": draw, **shape,
        }  # fmt: skip

    def only(output: Output, wanted: bool) -> Output:
        return output if wanted else NOTHING

    correcting = {
        "ROT": only(rotated, rotated.is_fp8).number, "ROTATE": rotate, "ROT_LIMIT": rotated.limit,
        "PROJ": only(projected, projected.is_fp8).number, "PROJ_LIMIT": projected.limit, "SUMS": sums, **shape,
    }  # fmt: skip
    options: dict[str, Any] = {"num_warps": tiling.warps, "enable_fp_fusion": False}
    if tiling.registers is not None:
        options["maxnreg"] = tiling.registers
    measured = only(rotated, rotated.number == INT), only(projected, projected.number == INT)
    return _Plan(
        wide, kept, blocks, blocks * slices,
        (channels, wide, lay.tiles, lay.square, lay.line, total, singles, tile_blocks, total * rank, blocks, chunks,
         slices),
        # Of two passes with P the first draws its rows, the second reads them.
        constants(rotated, projected, fp8, True, sums, draw and projected.number != INT),
        constants(*measured, True, False, False, draw), correcting, fp8, INT in (rotated.number, projected.number),
        options, {**options, "launch_pdl": True} if shape["OVERLAP"] else options,
    )  # fmt: skip


def compress(
    t: Tensor | Coded | Joined,
    lay: Layout,
    rows: Tensor | None,
    key: Tensor,
    rotated: Output = NOTHING,
    projected: Output = NOTHING,
    *,
    rotate: bool = True,
    sums: bool = False,
    draw: bool = False,
    history: AmaxHistory | None = None,
    quantities: tuple[int, int] = (ROTATED, PROJECTED),
    scale_to: Tensor | None = None,
    tiling: Tiling = _TILING,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Codes of t H and of P t, transposed, with their scales, and the column sums of t.

    Args:
        t: (T, C), unit stride along C, tokens as in `lay`, or its codes, or its three parts.
        lay: of the tokens.
        rows: the natural indices of the rows of P, uint8, (samples·tiles, rank), needed for P: read, or drawn and
            written with `draw`.
        key: of the draws, int64, ().
        rotated: format of t H.
        projected: format of P t.
        rotate: False leaves out H (the plain cast of a forward operand).
        sums: whether to compute the column sums.
        draw: whether to draw the rows of P.
        history: the layer's amax history, needed for fp8.
        quantities: its rows for t H and P t.
        scale_to: float32: where to write the scale of P t, into its first element.
        tiling: block sizes.

    Returns:
        (rotated codes (T, C'), their scale, projected codes (C', R'), their scale, sums (C,) in t's dtype), None for
        what was not requested. Scales are float32, (), or (T,) per token, (C,) per channel. C' is C, R' is `lay.rows`,
        each padded to a multiple of 16.

    Raises:
        ValueError: the matrix has 2³¹ tokens or more, which exceeds the kernel's indices.
    """
    tokens, channels = t.shape
    if tokens >= 1 << 31:
        raise ValueError(f"hotrain.kernels: {tokens} tokens; the kernels' indices reach 2³¹ − 1. Split the batch.")
    device, dtype, part = t.device, t.dtype, 0
    source: tuple[Tensor, Tensor, Tensor]
    if isinstance(t, Joined):
        matrix, *others = t.parts
        part = stride = matrix.shape[1]
        kind, source = None, (others[0], others[1], matrix)
    elif isinstance(t, Coded) and t.g is not None:
        matrix, stride, kind, source = t.g, t.g.stride(0), t.kind, (t.scale, t.codes, t.codes)
    elif isinstance(t, Coded):
        matrix, stride, kind = t.codes, channels, t.kind
        source = (t.scale, matrix if t.w is None else t.w, matrix if t.b is None else t.b)
    else:
        matrix, stride, kind, source = t, t.stride(0), None, (t, t, t)
    kinds = kind or dtype, part
    case = (id(lay), tokens, channels, stride, kinds, rotated, projected, rotate, sums, draw, tiling, device)
    found = _plans.get(case)
    if found is None:
        plan = _plan(tokens, channels, stride, kind, part, lay, rotated, projected, rotate, sums, draw, tiling, device)
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[case] = found = plan, lay  # keeps the layout alive, so that its id is not reused
    plan, (index, _) = found[0], index_of(lay, tiling, device)
    rot = proj = None
    if rotated.number:
        rot = torch.empty(tokens, plan.wide, dtype=rotated.dtype or DTYPES[rotated.number], device=device)
    if projected.number:
        of_rows = projected.dtype or DTYPES.get(projected.number, dtype)
        proj = torch.empty(plan.wide, plan.kept, dtype=of_rows, device=device)
        if plan.wide > channels:
            proj[channels:].zero_()
        if plan.kept > lay.rows:
            proj[:, lay.rows :].zero_()
    # A separate tensor for each scale: `torch._scaled_mm` requires alignment to 16 bytes. Where one is not wanted, the
    # other is passed in its place.
    of_scales, own = (tokens, tokens) if rotated.by_token else (channels if rotated.across else (), BINS)
    made = torch.empty(of_scales, dtype=torch.float32, device=device) if rotated.number else None
    if scale_to is None and (made is None or projected.number):
        scale_to = torch.empty((channels,) if projected.each else (), dtype=torch.float32, device=device)
    rot_scale, proj_scale = (scale_to if made is None else made), (made if scale_to is None else scale_to)
    assert rot_scale is not None
    assert proj_scale is not None
    rot_hint, proj_hint = (
        (matrix, matrix) if history is None else (history.rows[quantities[0]], history.rows[quantities[1]])
    )
    # The amax of fp8 is reduced in the layer's history, that of integers in zeroed memory of this call; that of
    # channels is stored for each block, since so many atomics would take longer than the rest.
    rot_max = proj_max = rot_scale
    if plan.integers:
        own += -own % 4
        zeros = torch.zeros(own + BINS, dtype=torch.int32, device=device)
        rot_max, proj_max = zeros, zeros[own:]
    by_channel = []
    if rotated.across:
        rot_max = torch.empty(plan.blocks, channels, dtype=torch.int32, device=device)
        by_channel.append((rot_max, rot_scale, rotated.limit))
    if projected.each:
        proj_max = torch.empty(plan.blocks, channels, dtype=torch.int32, device=device)
        by_channel.append((proj_max, proj_scale, projected.limit))
    if rotated.is_fp8 and history is not None:
        rot_max = history.bins[quantities[0]]
    if projected.is_fp8 and history is not None:
        proj_max = history.bins[quantities[1]]
    partial = torch.empty(plan.blocks, channels, dtype=torch.float32, device=device) if sums else rot_scale
    table = matrix if rows is None else rows
    rot_to, proj_to = (matrix if rot is None else rot), (matrix if proj is None else proj)
    args = (
        matrix, stride, *source, index, table, key, rot_to, plan.wide, proj_to, plan.kept, partial, rot_max,
        proj_max, rot_hint, proj_hint, rot_scale, proj_scale, *plan.where,
    )  # fmt: skip
    launched = (plan, quantities, aligned(matrix, *source, rows, scale_to), rows is None, key.dim())
    if plan.integers:
        launch(_compress_kernel, plan.programs, (launched, "measure"), args, plan.measure, **plan.options)
    for largest, scale, limit in by_channel:
        own_args, constants = (largest, scale, plan.blocks, channels), {"LIMIT": limit, "BLOCK": 128}
        launch(_channel_scales_kernel, cdiv(channels, 32), (launched, limit), own_args, constants)
    launch(_compress_kernel, plan.programs, launched, args, plan.write, **plan.options)
    total = torch.empty(channels, dtype=dtype, device=device) if sums else rot_scale
    if plan.fp8:
        args = (
            matrix, stride, *source, index, table, key, rot_to, plan.wide, proj_to, plan.kept, partial, total,
            rot_hint, proj_hint, rot_scale, proj_scale, *plan.where,
        )  # fmt: skip
        programs = min(plan.programs, 2 * multiprocessors(device))
        launch(_correct_kernel, programs, launched, args, plan.correct, **plan.correcting)
    elif sums:
        launch(_sums_kernel, cdiv(channels, 32), launched, (partial, total, plan.blocks, channels), {"BLOCK": 128})
    return (
        rot,
        None if rot is None else rot_scale,
        proj,
        None if projected.number in (NONE, COPY) else proj_scale,
        total if sums else None,
    )


@functools.lru_cache(maxsize=256)
def natural_rows(size: int, device: torch.device) -> Tensor:
    """Every row of H16 in natural order, block after block: `rows` for `whole(size, True)`."""
    return torch.arange(16, dtype=torch.uint8, device=device).repeat(-(-size // 16))


def compress_weight(
    w: Tensor,
    key: Tensor,
    output: Output,
    history: AmaxHistory | None,
    rotate: bool = True,
    tiling: Tiling = _TILING_OF_WEIGHTS,
) -> tuple[Tensor, Tensor]:
    """Codes of Hᵀ w, or of w, transposed: the right operand of g_x.

    To rotate along O is a projection that keeps every row.

    Args:
        w: (O, I), unit stride along I.
        key: of the draws, int64, ().
        output: format; `each` is per input channel.
        history: the layer's amax history, needed for fp8.
        rotate: whether to rotate along O.
        tiling: block sizes.

    Returns:
        Codes (I', O'), and float32 scales, () or (I,).
    """
    lay = whole(w.shape[0], rotate)
    rows = natural_rows(w.shape[0], w.device)
    _, _, codes, scale, _ = compress(
        w, lay, rows, key, NOTHING, output, history=history, quantities=(ROTATED, WEIGHT), tiling=tiling
    )
    assert codes is not None
    assert scale is not None
    return codes, scale
