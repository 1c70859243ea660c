"""Triton kernels of matrices with a scale per row: packing x, picking the rows of g_w, and codes of what was picked.

The operands are copies of P x and P g_y, transposed, (C', R') float32: their rows are its columns. Codes, weights and
draws are those of `saved.Format` and `transform.importance`, but for the order of sums.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import draws
from ..layer_record import BINS
from ..transform.importance import FLOOR, PASSES, running_sum
from .launch import INTERPRETED, aligned, cdiv, launch, power_of_2
from .noise import hash_bits, noise16, stream_words
from .quantize_kernels import (
    DTYPES,
    INT,
    Output,
    encode,
    exponent_for,
    final_scale,
    integer_scale,
    magnitude_bits,
    padded,
    power,
)

_INT, _BINS, _IMPORTANCE = tl.constexpr(INT), tl.constexpr(BINS), tl.constexpr(draws.IMPORTANCE)
_CHUNK = 16384  # rows at a time of the one program that draws


@triton.jit
def _nibbles(byte):
    """The two signed codes of a byte, as int32: even columns are in the low half."""
    signed = byte.to(tl.int32)
    return (signed << 28) >> 28, (signed << 24) >> 28


@triton.jit
def _pack_kernel(
    copied, pitch, codes, scales, key, C, R, BYTES,
    LIMIT: tl.constexpr, STOCHASTIC: tl.constexpr, STREAM: tl.constexpr, EVEN: tl.constexpr, FOUR: tl.constexpr,
    UPCAST: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    inside = r < R
    found = tl.zeros((BR,), tl.int32)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        v = tl.load(copied + c[None, :] * pitch + r[:, None], mask=inside[:, None] & (c < C)[None, :], other=0.0)
        found = tl.maximum(found, tl.max(magnitude_bits(v), axis=1))
    scale = integer_scale(found, LIMIT)
    tl.store(scales + r, scale, mask=inside)
    inverse = tl.div_rn(scale * 0.0 + 1.0, scale)
    k0, k1 = stream_words(tl.load(key), STREAM)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        v = tl.load(copied + c[None, :] * pitch + r[:, None], mask=inside[:, None] & (c < C)[None, :], other=0.0)
        v = v * inverse[:, None]
        noise = v
        if STOCHASTIC:
            noise = noise16(r[:, None], c0, C, k0, k1, BC, EVEN)
        found_codes = encode(v, noise, _INT, LIMIT, STOCHASTIC, UPCAST)
        if FOUR:
            low, high = tl.split(tl.reshape(found_codes.to(tl.int32), (BR, BC // 2, 2)))
            b = c0 // 2 + tl.arange(0, BC // 2)
            byte = ((low & 15) | ((high & 15) << 4)).to(tl.uint8)
            tl.store(codes + r[:, None] * BYTES + b[None, :], byte, mask=inside[:, None] & (b < BYTES)[None, :])
        else:
            tl.store(codes + r[:, None] * BYTES + c[None, :], found_codes, mask=inside[:, None] & (c < C)[None, :])


@triton.jit
def _size_kernel(
    copied, pitch, kept, scales, size, largest, C, R, BYTES,
    PICKS: tl.constexpr, FOUR: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Of every row: the largest magnitude in P g_y, its bits; and where PICKS, ‖P g_y‖·‖P x‖."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    inside = r < R
    found = tl.zeros((BR,), tl.int32)
    of_g = tl.zeros((BR,), tl.float64)
    for c0 in range(0, C, BC):
        c = c0 + tl.arange(0, BC)
        v = tl.load(copied + c[None, :] * pitch + r[:, None], mask=inside[:, None] & (c < C)[None, :], other=0.0)
        found = tl.maximum(found, tl.max(magnitude_bits(v), axis=1))
        if PICKS:
            of_g += tl.sum(v.to(tl.float64) * v.to(tl.float64), axis=1)
    tl.store(largest + r, found, mask=inside)
    if PICKS:
        of_x = tl.zeros((BR,), tl.float64)
        for b0 in range(0, BYTES, BC):
            b = b0 + tl.arange(0, BC)
            byte = tl.load(kept + r[:, None] * BYTES + b[None, :], mask=inside[:, None] & (b < BYTES)[None, :], other=0)
            if FOUR:
                low, high = _nibbles(byte)
                squares = low * low + high * high
            else:
                squares = byte.to(tl.int32) * byte.to(tl.int32)
            of_x += tl.sum(squares, axis=1).to(tl.float64)
        scale = tl.load(scales + r, mask=inside, other=0.0).to(tl.float64)
        tl.store(size + r, tl.sqrt(of_g) * tl.sqrt(of_x) * scale, mask=inside)


@triton.jit
def _raised(factor, size, floor, wanted, R, CHUNK: tl.constexpr):
    """The factor with which the sizes below 1 have the sum that those which reach 1 leave of `wanted`."""
    full = tl.zeros((), tl.float64)
    rest = tl.zeros((), tl.float64)
    for start in range(0, R, CHUNK):
        r = start + tl.arange(0, CHUNK)
        v = tl.maximum(tl.load(size + r, mask=r < R, other=0.0), floor) * factor
        full += tl.sum(tl.where((r < R) & (v >= 1), 1.0, 0.0).to(tl.float64))
        rest += tl.sum(tl.where((r < R) & (v < 1), v, 0.0))
    return tl.where(rest > 0, factor * ((wanted - full) / rest), factor)


@triton.jit
def _draw_kernel(
    size, p, count, R, SMALLEST: tl.constexpr, TIMES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`importance.probabilities`, by one program. What is below 1 is always the size times one factor."""
    top = tl.zeros((), tl.float64)
    total = tl.zeros((), tl.float64)
    for start in range(0, R, CHUNK):
        r = start + tl.arange(0, CHUNK)
        s = tl.load(size + r, mask=r < R, other=0.0)
        top = tl.maximum(top, tl.max(s))
        total += tl.sum(s)
    poison = total - total  # NaN where a size is not finite
    # Where no row has a size all are alike.
    none = total == 0
    floor = tl.where(none, 1.0, top * SMALLEST)
    wanted = total * 0.0 + count
    total = tl.zeros((), tl.float64)
    for start in range(0, R, CHUNK):
        r = start + tl.arange(0, CHUNK)
        s = tl.maximum(tl.load(size + r, mask=r < R, other=0.0), floor)
        total += tl.sum(tl.where(r < R, s, 0.0))
    factor = wanted / total
    for _ in range(TIMES - 1):
        factor = _raised(factor, size, floor, wanted, R, CHUNK)
    before = factor  # not carried by the loop: Triton 3.6 and 3.7 take its first value for that of the last pass
    factor = _raised(factor, size, floor, wanted, R, CHUNK)
    total = tl.zeros((), tl.float64)
    for start in range(0, R, CHUNK):
        r = start + tl.arange(0, CHUNK)
        s = tl.maximum(tl.load(size + r, mask=r < R, other=0.0), floor)
        total += tl.sum(tl.where(r < R, tl.where(s * before >= 1, 1.0, s * factor), 0.0))
    last = wanted / total
    for start in range(0, R, CHUNK):
        r = start + tl.arange(0, CHUNK)
        s = tl.maximum(tl.load(size + r, mask=r < R, other=0.0), floor)
        tl.store(p + r, tl.where(s * before >= 1, 1.0, s * factor) * last + poison, mask=r < R)


@triton.jit
def _pick_kernel(
    ends, p, scales, largest, key, picked, factors, bins, count, R,
    PICKS: tl.constexpr, STEPS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The row of every pick, the factor of that row of P g_y, and partial amax of the rows times their factors."""
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    inside = k < count
    row = k
    if PICKS:
        k0, k1 = stream_words(tl.load(key), _IMPORTANCE)
        start = hash_bits((k * 0).to(tl.uint32), k0, k1).to(tl.int32, bitcast=True).to(tl.float64)
        place = k.to(tl.float64) + (start + 2147483648.5) / 4294967296.0
        row = k * 0
        beyond = row + R
        for _ in range(STEPS):
            middle = (row + beyond) // 2
            active = row < beyond
            before = tl.load(ends + middle, mask=inside & active, other=0.0) < place
            row, beyond = tl.where(active & before, middle + 1, row), tl.where(active & ~before, middle, beyond)
        row = tl.minimum(row, R - 1)
    factor = tl.load(scales + row, mask=inside, other=0.0)
    if PICKS:
        weight = tl.load(p + row, mask=inside, other=1.0)
        factor = factor * ((weight * 0.0 + 1.0) / weight).to(tl.float32)
    tl.store(picked + k, row, mask=inside)
    tl.store(factors + k, factor, mask=inside)
    top = tl.load(largest + row, mask=inside, other=0).to(tl.float32, bitcast=True)
    found = tl.max(tl.where(inside, magnitude_bits(top * factor), 0))
    tl.atomic_max(bins + tl.program_id(0) % _BINS, found, sem="relaxed")


@triton.jit
def _code_kernel(
    copied, pitch, picked, factors, bins, key, codes, scale_to, count, wide, C, CP, blocks,
    NUMBER: tl.constexpr, LIMIT: tl.constexpr, STOCHASTIC: tl.constexpr, STREAM: tl.constexpr, EVEN: tl.constexpr,
    UPCAST: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Codes of the picked rows of P g_y times their factors, transposed, and their scale."""
    pid = tl.program_id(0)
    k = pid % blocks * BK + tl.arange(0, BK)
    c0 = pid // blocks * BC
    c = (c0 + tl.arange(0, BC)).to(tl.int64)
    inside = k < count
    row = tl.load(picked + k, mask=inside, other=0)
    factor = tl.load(factors + k, mask=inside, other=0.0)
    largest = tl.max(tl.load(bins + tl.arange(0, _BINS)))
    if NUMBER == _INT:
        scale = integer_scale(largest, LIMIT)
        inverse = tl.div_rn(scale * 0.0 + 1.0, scale)
    else:
        exponent = exponent_for(largest, NUMBER)
        scale, inverse = final_scale(exponent, largest), power(254 - exponent)
    tl.store(scale_to, scale, mask=pid == 0)
    v = tl.load(copied + c[None, :] * pitch + row[:, None], mask=inside[:, None] & (c < C)[None, :], other=0.0)
    v = v * factor[:, None] * inverse
    noise = v
    if STOCHASTIC:
        k0, k1 = stream_words(tl.load(key), STREAM)
        noise = noise16(k[:, None], c0, C, k0, k1, BC, EVEN)
    found = encode(tl.where(inside[:, None], v, 0.0), noise, NUMBER, LIMIT, STOCHASTIC, UPCAST)
    tl.store(codes + c[:, None] * wide + k[None, :], tl.trans(found), mask=(c < CP)[:, None] & (k < wide)[None, :])


@triton.jit
def _unpack_kernel(
    kept, picked, scales, to, count, wide, C, CP, BYTES, blocks,
    PICKED: tl.constexpr, SCALED: tl.constexpr, FP8: tl.constexpr, FOUR: tl.constexpr,
    BK: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Rows of codes, transposed: those that are picked, or all; times their scales where SCALED. Zeros up to `wide`."""
    pid = tl.program_id(0)
    k = pid % blocks * BK + tl.arange(0, BK)
    b = pid // blocks * BB + tl.arange(0, BB)
    inside = k < count
    row = tl.load(picked + k, mask=inside, other=0).to(tl.int64) if PICKED else k.to(tl.int64)
    byte = tl.load(kept + row[:, None] * BYTES + b[None, :], mask=inside[:, None] & (b < BYTES)[None, :], other=0)
    if FOUR:
        low, high = _nibbles(byte)
        codes = tl.interleave(low, high)
        c = (pid // blocks * BB * 2 + tl.arange(0, BB * 2)).to(tl.int64)
    else:
        codes = byte.to(tl.int32)
        c = b.to(tl.int64)
    codes = tl.where(inside[:, None] & (c < C)[None, :], codes, 0)
    if SCALED:
        scale = tl.load(scales + row, mask=inside, other=0.0)
        found = (codes.to(tl.float32) * scale[:, None]).to(to.dtype.element_ty)
    elif FP8:
        found = codes.to(tl.float32).to(to.dtype.element_ty)
    else:
        found = codes.to(tl.int8)
    tl.store(to + c[:, None] * wide + k[None, :], tl.trans(found), mask=(c < CP)[:, None] & (k < wide)[None, :])


def pack_rows(copied: Tensor, columns: int, rows: int, output: Output, bits: int, key: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of the rows of a copy.

    Args:
        copied: (C', R') float32, contiguous.
        columns: C.
        rows: R.
        output: largest code, rounding and stream.
        bits: 4, two codes to a byte, or 8.
        key: of the draws, int64, ().

    Returns:
        uint8 (R, ⌈C/2⌉) or int8 (R, C), and float32 (R, 1).
    """
    width = cdiv(columns, 2) if bits == 4 else columns
    codes = torch.empty(rows, width, dtype=torch.uint8 if bits == 4 else torch.int8, device=copied.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=copied.device)
    constants = {
        "LIMIT": output.limit, "STOCHASTIC": output.stochastic, "STREAM": output.stream, "EVEN": columns % 2 == 0,
        "FOUR": bits == 4, "UPCAST": INTERPRETED, "BR": 32, "BC": 64,
    }  # fmt: skip
    args = (copied, copied.stride(0), codes, scales, key, columns, rows, width)
    case = (copied.shape, columns, rows, bits, output, aligned(copied, codes, scales), copied.device)
    launch(_pack_kernel, cdiv(rows, 32), case, args, constants, enable_fp_fusion=False)
    return codes, scales


def picked_codes(
    copied: Tensor, kept: tuple[Tensor, Tensor], share: float, output: Output, key: Tensor, size: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Both operands of g_w: the scales of rows, and the weights of the rows that are picked, are in that of P g_y.

    Args:
        copied: P g_y, (O', R') float32, contiguous.
        kept: codes and scales of `pack_rows`.
        share: of the rows that are picked.
        output: the format of P g_y.
        key: of the draws.
        size: O and I.

    Returns:
        Codes of P g_y (O', K'), their scale (), and codes of P x (I', K'), padded with zeros to multiples of 16, for
        `operands.product`: int8, or fp8 and e4m3, which has a number for each 4-bit code.
    """
    (outputs, columns), (codes, scales), device = size, kept, copied.device
    rows, width = codes.shape
    four, picks = codes.dtype == torch.uint8, share < 1
    count = math.ceil(share * rows) if picks else rows
    wide = padded(count)
    whole = (copied.shape, size, rows, share, four, output, aligned(copied, codes), device)

    largest = torch.empty(rows, dtype=torch.int32, device=device)
    sizes = torch.empty(2, rows, dtype=torch.float64, device=device) if picks else scales.new_empty(2, 1)
    ends = sizes[1]
    args: tuple[object, ...] = (
        copied, copied.stride(0), codes, scales, sizes[0], largest, outputs, rows, width,
    )  # fmt: skip
    launch(_size_kernel, cdiv(rows, 32), whole, args, {"PICKS": picks, "FOUR": four, "BR": 32, "BC": 64})
    if picks:
        chunk = min(power_of_2(rows), _CHUNK)
        constants = {"SMALLEST": FLOOR, "TIMES": PASSES, "CHUNK": chunk}
        args = (sizes[0], sizes[1], count, rows)
        launch(_draw_kernel, 1, whole, args, constants, num_warps=min(32, max(4, chunk // 512)))
        ends = running_sum(sizes[1])
    picked = torch.empty(count, dtype=torch.int32, device=device)
    factors = torch.empty(count, dtype=torch.float32, device=device)
    bins = torch.zeros(BINS, dtype=torch.int32, device=device)
    args = (ends, sizes[1], scales, largest, key, picked, factors, bins, count, rows)
    constants = {"PICKS": picks, "STEPS": rows.bit_length(), "BK": 128}
    launch(_pick_kernel, cdiv(count, 128), whole, args, constants)

    high = padded(outputs)
    of_g = torch.empty(high, wide, dtype=DTYPES[output.number], device=device)
    g_scale = torch.empty((), dtype=torch.float32, device=device)
    blocks = cdiv(wide, 64)
    constants = {
        "NUMBER": output.number, "LIMIT": output.limit, "STOCHASTIC": output.stochastic, "STREAM": output.stream,
        "EVEN": outputs % 2 == 0, "UPCAST": INTERPRETED, "BK": 64, "BC": 64,
    }  # fmt: skip
    args = (copied, copied.stride(0), picked, factors, bins, key, of_g, g_scale, count, wide, outputs, high, blocks)
    launch(_code_kernel, blocks * cdiv(high, 64), whole, args, constants, enable_fp_fusion=False)
    dtype = torch.float8_e4m3fn if output.is_fp8 else torch.int8
    return of_g, g_scale, _transposed(kept, columns, padded(columns), count, wide, picked if picks else None, dtype)


def restored(kept: tuple[Tensor, Tensor], columns: int, dtype: torch.dtype) -> Tensor:
    """The rows of `pack_rows` dequantized and transposed, (C', R'), padded with zeros to multiples of 16."""
    rows = len(kept[0])
    return _transposed(kept, columns, padded(columns), rows, padded(rows), None, dtype)


def _transposed(
    kept: tuple[Tensor, Tensor], columns: int, height: int, count: int, wide: int, picked: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Rows of codes as columns, (`height`, `wide`): the codes in a type of 8 bits, or dequantized in `dtype`."""
    (codes, scales), four = kept, kept[0].dtype == torch.uint8
    to = torch.empty(height, wide, dtype=dtype, device=codes.device)
    width, each = codes.shape[1], 32 if four else 64
    blocks = cdiv(wide, 64)
    constants = {
        "PICKED": picked is not None, "SCALED": dtype.itemsize > 1, "FP8": dtype.is_floating_point, "FOUR": four,
        "BK": 64, "BB": each,
    }  # fmt: skip
    args = (codes, codes if picked is None else picked, scales, to, count, wide, columns, height, width, blocks)
    case = (codes.shape, columns, height, count, wide, picked is None, dtype, aligned(codes, to), codes.device)
    launch(_unpack_kernel, blocks * cdiv(height, 64), case, args, constants)
    return to
