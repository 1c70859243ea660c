"""Triton kernels that pack and unpack tensors quantized in groups, and what kernels of single operators share for it.

::

    pack    x              ──►  codes and scales of its groups, int4 and int8      `saved.Grouped.keep`
    unpack  codes, scales  ──►  x                                                  `saved.Grouped.restore`
    make    codes          ──►  x, or γ x + β, or f of these, or a product of two  `compress.rematerialize.make`

    activate    x (+ bias)          ──►  f(x), and codes and scales of x
    gradient    g_y, codes, scales  ──►  g_y f'(x), and its sums by channel

Inductor, given these formulas, reads a tensor once for a group's amax and once for its codes, and loads a scale, γ and
β for every element of a matrix instead of once per row or column. Codes are packed in halves of a group
(`saved.pack_parts`), so a program loads both halves and writes a byte for each pair.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..quantize.channels import SPAN, STRIDE
from ..saved import largest_scale
from .activation import apply, slope_of
from .launch import Place, Plan, block_of, cdiv, in_groups, is_nested, is_wide, multiprocessors, power_of_2
from .quantize_kernels import magnitude_bits
from .support import FUNCTIONS, rows_in_memory

_TILE = 2048  # elements of a half of a tile
_WAVES = 8  # programs per multiprocessor of those that leave sums
# Factor from amax to scale: a scale is rounded to bfloat16 and must not become smaller by that.
LIFT4 = tl.constexpr((1 + 2.0**-8) / 7)
_LIFT8 = tl.constexpr((1 + 2.0**-8) / 127)
# The largest scales of float16 and of other dtypes.
_HALF4, _MOST4, _HALF8, _MOST8 = (
    tl.constexpr(largest_scale(top, dtype)) for top in (7, 127) for dtype in (torch.float16, torch.bfloat16)
)
_STRIDE, _SPAN, _BITS = tl.constexpr(STRIDE), tl.constexpr(SPAN), tl.constexpr((1 << SPAN) - 1)
# 1.5·2²³, to which a small number is added to be rounded, halves to even: the result is in the lowest bits then.
_MAGIC = tl.constexpr(12582912.0)
_MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def sampled_rows(rows, ROWS: tl.constexpr):
    """Which ROWS of so many rows `quantize.channels` looks at, int64."""
    return (((tl.arange(0, ROWS).to(tl.int64) * _STRIDE) & _BITS) * rows) >> _SPAN


@triton.jit
def larger(a, b):
    """The larger magnitude of two, a NaN if one is."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(bits, LIFT: tl.constexpr, MOST: tl.constexpr = None):
    """A group's bfloat16 scale from the bits of its amax, and the factor that its elements are multiplied with. MOST is
    the largest scale of a finite amax, None where no element is that large."""
    lifted = bits.to(tl.float32, bitcast=True) * LIFT
    if MOST is not None:
        lifted = tl.where(lifted < float("inf"), tl.minimum(lifted, MOST), lifted)
    # Halves to even explicitly: the interpreter's own cast truncates.
    word = lifted.to(tl.int32, bitcast=True)
    word = (word + 0x7FFF + ((word >> 16) & 1)) & -65536
    wide = tl.where(lifted == lifted, word.to(tl.float32, bitcast=True), lifted)
    return wide.to(tl.bfloat16), tl.div_rn(wide * 0.0 + 1.0, tl.where(wide == 0, 1.0, wide))


@triton.jit
def _above(v, factor):
    """Codes of v in steps of 1/factor, int32: eight more than int4's from −7, in the lowest four bits."""
    return (v * factor + (_MAGIC + 8.0)).to(tl.int32, bitcast=True) & 15


@triton.jit
def pair(low, high, factor):
    """A byte of int4 codes from 0. The code of a non-finite element is arbitrary: its scale is not finite either."""
    return ((_above(low, factor) | (_above(high, factor) << 4)) - 17).to(tl.uint8)


@triton.jit
def low_codes(packed):
    """The codes −7 … 7 in the low halves of bytes, given as int32, in float32."""
    return ((packed & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388615.0


@triton.jit
def high_codes(packed):
    return (((packed >> 4) & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388615.0


@triton.jit
def _byte(v, factor):
    """int8's codes from 0; those of elements above the largest scale are clipped."""
    code = (v * factor + (_MAGIC + 128.0)).to(tl.int32, bitcast=True) - (_MAGIC_BITS + 1)
    return tl.minimum(tl.maximum(code, 0), 254).to(tl.uint8)


@triton.jit
def pack_halves(
    low, high, codes, at, packed_at, inside, HALF: tl.constexpr, BITS: tl.constexpr, SMALL: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """Store the codes of rows of halves, at `at` or, of 4 bits, `packed_at`, and return their scales. SMALL is whether
    the values are those of float16, LEAST what smaller ones are packed as, or one code below 0 where that is less, None
    for themselves; a NaN stays one."""
    if LEAST is not None:
        cut = tl.minimum(tl.max(tl.maximum(low, high), axis=1) * (-1 / 7 if BITS == 4 else -1 / 127), LEAST)[:, None]
        low = tl.maximum(low, cut, propagate_nan=tl.PropagateNan.ALL)
        high = tl.maximum(high, cut, propagate_nan=tl.PropagateNan.ALL)
    largest = tl.max(magnitude_bits(larger(low, high)), axis=1)
    if BITS == 4:
        found, inverse = scale_of(largest, LIFT4, _HALF4 if SMALL else _MOST4)
        tl.store(codes + packed_at, pair(low, high, inverse[:, None]), mask=inside)
    else:
        found, inverse = scale_of(largest, _LIFT8, _HALF8 if SMALL else _MOST8)
        tl.store(codes + at, _byte(low, inverse[:, None]), mask=inside)
        tl.store(codes + at + HALF, _byte(high, inverse[:, None]), mask=inside)
    return found


def tile_of(half: int) -> tuple[int, int, int]:
    """(elements of a padded half, rows per tile, warps)."""
    block = power_of_2(half)
    return block, max(1, _TILE // block), 4 if block <= _TILE else 8


# ---- pack ----


@triton.jit
def pack_groups(
    block, x, codes, scale, segments, run, stride, many, further,
    BITS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    NESTED: tl.constexpr, middles=None, period=1, sample=1, CENTERED: tl.constexpr = False, LEAST: tl.constexpr = None,
):  # fmt: skip
    """Groups of 2 HALF neighbours. `run` groups are contiguous, the next ones are `stride` elements further; if NESTED,
    behind `many` of these the next ones are `further`. If CENTERED, `middles` are subtracted, of `period` groups from
    each so many; each `sample` groups have their own."""
    segment = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    live = segment < segments
    inside = live[:, None] & (column < HALF)[None, :]
    place = segment.to(tl.int64) if WIDE else segment
    first = (place // run) * stride + (place % run) * (2 * HALF)
    if NESTED:
        first = (place // run // many) * further + (place // run % many) * stride + (place % run) * (2 * HALF)
    low = tl.load(x + first[:, None] + column[None, :], mask=inside, other=0).to(tl.float32)
    high = tl.load(x + first[:, None] + HALF + column[None, :], mask=inside, other=0).to(tl.float32)
    if CENTERED:
        # Rows beyond the last read the first middle: that takes 56 registers (sm_90), a mask by row 76.
        of = tl.where(live, (place // sample) * period + place % period, 0)
        own, real = middles + of[:, None] * (2 * HALF) + column[None, :], (column < HALF)[None, :]
        low -= tl.load(own, mask=real, other=0)
        high -= tl.load(own + HALF, mask=real, other=0)
    packed_at, at = place[:, None] * HALF + column[None, :], place[:, None] * (2 * HALF) + column[None, :]
    found = pack_halves(low, high, codes, at, packed_at, inside, HALF, BITS, x.dtype.element_ty == tl.float16, LEAST)
    tl.store(scale + place, found, mask=live)


@triton.jit
def _pack_kernel(
    x, codes, scale, segments, run, stride, many, further,
    BITS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    NESTED: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    pack_groups(
        tl.program_id(0), x, codes, scale, segments, run, stride, many, further, BITS, HALF, BLOCK, ROWS, WIDE, NESTED,
        LEAST=LEAST,
    )  # fmt: skip


class Rows:
    """A tensor as `pack_groups` reads it, and buffers for its codes, uint8 (rows, groups, bytes), and bfloat16 scales.

    Args:
        x: (..., C) of 16 or 32 bits, C a multiple of `group`.
        group: elements per scale, even.
        bits: 4 or 8.
    """

    __slots__ = ("codes", "half", "place", "scale", "wide", "x")

    def __init__(self, x: Tensor, group: int, bits: int) -> None:
        lies = rows_in_memory(x)
        if lies is None:
            x = x.contiguous()
            lies = x.shape[:-1].numel(), x.numel(), 1, x.numel()
        device, self.x, self.half = x.device, x, group // 2
        rows, groups, self.place, reach = in_groups(x.numel(), x.shape[-1], group, *lies)
        self.wide = is_wide(reach)
        self.codes = torch.empty(rows, groups, group * bits // 8, dtype=torch.uint8, device=device)
        self.scale = torch.empty(rows, groups, 1, dtype=torch.bfloat16, device=device)


def pack(x: Tensor, group: int, bits: int = 4, least: float | None = None) -> tuple[Tensor, Tensor]:
    """`Grouped(bits).keep(x, least)`, of 4 or 8 bits; shapes as in `Rows`."""
    rows = Rows(x, group, bits)
    _packs(x.device, x.dtype, bits, rows.half, rows.place, rows.wide, least).run(rows.x, rows.codes, rows.scale)
    return rows.codes, rows.scale


@functools.lru_cache(maxsize=1024)
def _packs(
    device: torch.device, dtype: torch.dtype, bits: int, half: int, place: Place, wide: bool, least: float | None,
) -> Plan:  # fmt: skip
    block = power_of_2(half)
    each = max(1, 2048 // block)
    constants = {
        "BITS": bits,
        "HALF": half,
        "BLOCK": block,
        "ROWS": each,
        "WIDE": wide,
        "NESTED": is_nested(place),
        "LEAST": least,
    }
    return Plan(_pack_kernel, cdiv(place[0], each), constants, place, given=1)


# ---- unpack ----


@triton.jit
def unpack_groups(
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
        low, high = low_codes(packed), high_codes(packed)
    else:
        low = tl.load(codes + at, mask=inside, other=0).to(tl.float32) - 127.0
        high = tl.load(codes + at + HALF, mask=inside, other=0).to(tl.float32) - 127.0
    tl.store(out + at, (low * step).to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + HALF, (high * step).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _unpack_kernel(
    codes, scale, out, groups, BITS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    unpack_groups(tl.program_id(0), codes, scale, out, groups, BITS, HALF, BLOCK, ROWS, WIDE)


def output_of(codes: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, int, int]:
    """(the tensor to dequantize to, half of a group, number of groups)."""
    rows, groups, width = codes.shape
    group = width * 8 // bits
    return torch.empty(rows, groups * group, dtype=dtype, device=codes.device), group // 2, rows * groups


def unpack(codes: Tensor, scale: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Dequantize the codes of `Grouped(bits).keep`, in groups without padding.

    Args:
        codes: uint8 (rows, groups, bytes).
        scale: bfloat16 (rows, groups, 1).
        bits: 4 or 8.
        dtype: of the result.

    Returns:
        (rows, C).
    """
    out, half, number = output_of(codes, bits, dtype)
    _unpacks(codes.device, bits, half, number, dtype).run(codes, scale, out)
    return out


@functools.lru_cache(maxsize=1024)
def _unpacks(device: torch.device, bits: int, half: int, number: int, dtype: torch.dtype) -> Plan:
    block, each, warps = tile_of(half)
    constants = {"BITS": bits, "HALF": half, "BLOCK": block, "ROWS": each, "WIDE": is_wide(2 * half * number)}
    return Plan(_unpack_kernel, cdiv(number, each), constants, (number,), warps)


# ---- make: unpack by a recipe ----


@triton.jit
def _value(steps, scale, w, b, NORMED: tl.constexpr, F: tl.constexpr):
    """f(γ x̂ + β) or f(x), in float32 throughout."""
    v = steps * scale
    if NORMED:
        v = v * w + b
    return apply(v, F)


@triton.jit
def _make_kernel(
    codes, scale, w, b, codes2, scale2, w2, b2, out, segments, groups,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr, HAS_W: tl.constexpr,
    HAS_B: tl.constexpr, NORMED: tl.constexpr, TWO: tl.constexpr, F2: tl.constexpr,
    HAS_W2: tl.constexpr, HAS_B2: tl.constexpr, NORMED2: tl.constexpr, WIDE: tl.constexpr,
    ONE: tl.constexpr, BITS: tl.constexpr, BITS2: tl.constexpr,
):  # fmt: skip
    """Groups of 2 HALF neighbours, `groups` to a row. w, b: (C,) of the first factor, w2, b2 of the second."""
    segment = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = segment < segments
    place = segment.to(tl.int64) if WIDE else segment
    step = tl.load(scale + place, mask=live, other=0).to(tl.float32)[:, None]
    if TWO:
        step2 = tl.load(scale2 + place, mask=live, other=0).to(tl.float32)[:, None]
    channel = ((segment % groups) * (2 * HALF))[:, None]
    for start in tl.static_range(0, HALF, BLOCK):
        column = (start + tl.arange(0, BLOCK))[None, :]
        inside = live[:, None] & (column < HALF) if HALF % BLOCK != 0 else live[:, None]
        if BITS == 4:
            packed = tl.load(codes + place[:, None] * HALF + column, mask=inside, other=0).to(tl.int32)
        if TWO and BITS2 == 4:
            packed2 = tl.load(codes2 + place[:, None] * HALF + column, mask=inside, other=0).to(tl.int32)
        for half in tl.static_range(2):
            at = half * HALF + column if ONE else channel + half * HALF + column
            valid = column < HALF if ONE else inside
            wv, bv, wv2, bv2 = 1.0, 0.0, 1.0, 0.0
            if HAS_W:
                wv = tl.load(w + at, mask=valid, other=0).to(tl.float32)
            if HAS_B:
                bv = tl.load(b + at, mask=valid, other=0).to(tl.float32)
            own = place[:, None] * (2 * HALF) + half * HALF + column
            if BITS == 4:
                steps = low_codes(packed) if half == 0 else high_codes(packed)
            else:
                steps = tl.load(codes + own, mask=inside, other=0).to(tl.float32) - 127.0
            v = _value(steps, step, wv, bv, NORMED, F)
            if TWO:
                if HAS_W2:
                    wv2 = tl.load(w2 + at, mask=valid, other=0).to(tl.float32)
                if HAS_B2:
                    bv2 = tl.load(b2 + at, mask=valid, other=0).to(tl.float32)
                if BITS2 == 4:
                    steps = low_codes(packed2) if half == 0 else high_codes(packed2)
                else:
                    steps = tl.load(codes2 + own, mask=inside, other=0).to(tl.float32) - 127.0
                v = v * _value(steps, step2, wv2, bv2, NORMED2, F2)
            tl.store(out + own, v.to(out.dtype.element_ty), mask=inside)


Kind = tuple[bool, str, int, torch.dtype | None, torch.dtype | None]  # of a factor: normed, name, bits, dtypes of w, b


class Factor(NamedTuple):
    """One factor of a dequantized product: f(γ x̂ + β), f(x̂), f(x) or x.

    Args:
        codes, scale: of `pack`.
        w, b: γ and β, (C,) or None.
        normed: whether the codes are of a normalized x̂.
        name: of f, a key of `FUNCTIONS`.
        bits: of the codes, 4 or 8.
    """

    codes: Tensor
    scale: Tensor
    w: Tensor | None = None
    b: Tensor | None = None
    normed: bool = False
    name: str = ""
    bits: int = 4

    @property
    def kind(self) -> Kind:
        w, b = self.w, self.b
        return self.normed, self.name, self.bits, None if w is None else w.dtype, None if b is None else b.dtype

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        codes, scale, w, b, *_ = self
        return codes, scale, codes if w is None else w, codes if b is None else b


def make(factors: Sequence[tuple[Any, ...]], dtype: torch.dtype) -> Tensor:
    """One `Factor`, or the product of two with groups of one size: (rows, C) in `dtype`, contiguous."""
    first = Factor(*factors[0])
    second = first if len(factors) == 1 else Factor(*factors[1])
    device, (rows, groups, width) = first.codes.device, first.codes.shape
    half = width * 4 // first.bits
    out = torch.empty(rows, 2 * half * groups, dtype=dtype, device=device)
    plan = _makes(device, rows, groups, half, dtype, first.kind, second.kind if len(factors) == 2 else None)
    plan.run(*first.tensors, *second.tensors, out)
    return out


@functools.lru_cache(maxsize=1024)
def _makes(
    device: torch.device, rows: int, groups: int, half: int, dtype: torch.dtype, first: Kind, second: Kind | None
) -> Plan:
    block = block_of(half)
    # γ and β are read once per thread: more rows are better, as long as f leaves registers.
    each = max(1, (8192 if first[0] and not first[1] else 2048) // block)
    constants = {
        "HALF": half, "BLOCK": block, "ROWS": each, "TWO": second is not None, "ONE": groups == 1,
        "WIDE": is_wide(2 * half * rows * groups),
    }  # fmt: skip
    for place, (normed, name, bits, w, b) in (("", first), ("2", second or first)):
        constants |= {f"F{place}": FUNCTIONS[name], f"NORMED{place}": normed, f"BITS{place}": bits}
        constants |= {f"HAS_W{place}": w is not None, f"HAS_B{place}": b is not None}
    given = 4 if second is None else 8  # the first one twice, or both
    return Plan(_make_kernel, cdiv(rows * groups, each), constants, (rows * groups, groups), given=given)


# ---- functions that save their input ----


@triton.jit
def _activate_kernel(
    x, bias, y, codes, scale, segments, groups, BITS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, F: tl.constexpr, HAS_BIAS: tl.constexpr, WIDE: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Groups of 2 HALF neighbours, `groups` to a row."""
    segment = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    live = segment < segments
    inside = live[:, None] & (column < HALF)
    place = (segment.to(tl.int64) if WIDE else segment)[:, None]
    at = place * (2 * HALF) + column
    low = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    high = tl.load(x + at + HALF, mask=inside, other=0).to(tl.float32)
    if HAS_BIAS:
        channel = (segment % groups)[:, None] * (2 * HALF) + column
        low += tl.load(bias + channel, mask=inside, other=0).to(tl.float32)
        high += tl.load(bias + channel + HALF, mask=inside, other=0).to(tl.float32)
    tl.store(y + at, apply(low, F).to(y.dtype.element_ty), mask=inside)
    tl.store(y + at + HALF, apply(high, F).to(y.dtype.element_ty), mask=inside)
    packed_at = place * HALF + column
    found = pack_halves(low, high, codes, at, packed_at, inside, HALF, BITS, x.dtype.element_ty == tl.float16, LEAST)
    tl.store(scale + segment, found, mask=live)


def activate(
    x: Tensor, name: str, group: int, bits: int, bias: Tensor | None = None, least: float | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """An activation function, of x or of x + bias, and the codes of its argument.

    Args:
        x: (rows, C), contiguous.
        name: of the function, a key of `FUNCTIONS`.
        group: elements per scale, even; they divide C.
        bits: 4 or 8.
        bias: (C,), contiguous, added in float32; None for 0.
        least: of `pack`.
        in_place: whether the first result is written over x.

    Returns:
        f(x + bias), (rows, C) in x's dtype, and codes and scales of x + bias, as of `pack`.
    """
    rows, columns = x.shape
    y, groups = x if in_place else torch.empty_like(x), columns // group
    codes = torch.empty(rows, groups, group * bits // 8, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, groups, 1, dtype=torch.bfloat16, device=x.device)
    dtypes = x.dtype, None if bias is None else bias.dtype
    _activates(x.device, rows * groups, groups, group // 2, bits, name, dtypes, least).run(
        x, x if bias is None else bias, y, codes, scale
    )
    return y, codes, scale


@functools.lru_cache(maxsize=1024)
def _activates(
    device: torch.device, segments: int, groups: int, half: int, bits: int, name: str,
    dtypes: tuple[torch.dtype, torch.dtype | None], least: float | None,
) -> Plan:  # fmt: skip
    block = power_of_2(half)
    each = max(1, 1024 // block)
    constants = {
        "BITS": bits, "HALF": half, "BLOCK": block, "ROWS": each, "F": FUNCTIONS[name],
        "HAS_BIAS": dtypes[1] is not None, "WIDE": is_wide(2 * half * segments), "LEAST": least,
    }  # fmt: skip
    return Plan(_activate_kernel, cdiv(segments, each), constants, (segments, groups), given=2)


@triton.jit
def _gradient_kernel(
    g, codes, scale, g_x, parts, rows, blocks, lanes, BITS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, F: tl.constexpr, SUMS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A group of 2 HALF channels of every row; `lanes` programs share one."""
    lane, group = tl.program_id(0) // GROUPS, tl.program_id(0) % GROUPS
    column = tl.arange(0, BLOCK)
    there = column < HALF
    sum_l = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_h = tl.zeros((ROWS, BLOCK), tl.float32)
    for number in tl.range(lane, blocks, lanes, num_stages=2):
        row = number * ROWS + tl.arange(0, ROWS)
        live = row < rows
        inside = live[:, None] & there[None, :]
        segment = (row.to(tl.int64) if WIDE else row) * GROUPS + group
        step = tl.load(scale + segment, mask=live, other=0).to(tl.float32)[:, None]
        at = segment[:, None] * (2 * HALF) + column[None, :]
        if BITS == 4:
            packed = tl.load(codes + segment[:, None] * HALF + column[None, :], mask=inside, other=0).to(tl.int32)
            low, high = low_codes(packed), high_codes(packed)
        else:
            low = tl.load(codes + at, mask=inside, other=0).to(tl.float32) - 127.0
            high = tl.load(codes + at + HALF, mask=inside, other=0).to(tl.float32) - 127.0
        low = tl.load(g + at, mask=inside, other=0).to(tl.float32) * slope_of(low * step, F)
        high = tl.load(g + at + HALF, mask=inside, other=0).to(tl.float32) * slope_of(high * step, F)
        tl.store(g_x + at, low.to(g_x.dtype.element_ty), mask=inside)
        tl.store(g_x + at + HALF, high.to(g_x.dtype.element_ty), mask=inside)
        if SUMS:
            sum_l += low
            sum_h += high
    if SUMS:
        left = parts + (lane.to(tl.int64) * GROUPS + group) * (2 * HALF) + column
        tl.store(left, tl.sum(sum_l, axis=0), mask=there)
        tl.store(left + HALF, tl.sum(sum_h, axis=0), mask=there)


def gradient(
    g: Tensor, codes: Tensor, scale: Tensor, name: str, bits: int, sums: bool = False, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """g f'(x) of the codes of x, and its sums per channel, the bias gradient of the layer before.

    Args:
        g: (rows, C), contiguous.
        codes, scale: that `activate` returned.
        name: of f, a key of `FUNCTIONS` with a derivative of more than two values.
        bits: 4 or 8.
        sums: whether the sums are wanted.
        in_place: whether g_x is written over g.

    Returns:
        g_x as g, and the sums, float32 (C,), empty if not wanted.
    """
    (rows, columns), groups = g.shape, codes.shape[1]
    plan = _gradients(g.device, rows, groups, columns // groups // 2, bits, name, g.dtype, sums)
    g_x = g if in_place else torch.empty_like(g)
    parts = torch.empty(plan.numbers[-1] if sums else 0, columns, dtype=torch.float32, device=g.device)
    plan.run(g, codes, scale, g_x, parts)
    return g_x, parts.sum(0) if sums else parts.view(-1)


@functools.lru_cache(maxsize=1024)
def _gradients(
    device: torch.device, rows: int, groups: int, half: int, bits: int, name: str, dtype: torch.dtype, sums: bool
) -> Plan:
    block = power_of_2(half)
    each = max(1, 1024 // block)
    blocks = cdiv(rows, each)
    lanes = min(blocks, cdiv(_WAVES * multiprocessors(device), groups)) if sums else blocks
    constants = {
        "BITS": bits, "HALF": half, "BLOCK": block, "ROWS": each, "GROUPS": groups, "F": FUNCTIONS[name], "SUMS": sums,
        "WIDE": is_wide(2 * half * groups * rows),
    }  # fmt: skip
    return Plan(_gradient_kernel, lanes * groups, constants, (rows, blocks, lanes), given=3)
