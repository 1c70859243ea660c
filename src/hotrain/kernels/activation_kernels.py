"""Triton kernels of saved activations: group-wise quantize and dequantize, activation functions, fused BatchNorm.

::

    keep       x               ──►  codes and scales of its groups            `saved.Grouped.keep`, int4 and int8
    activate   x               ──►  f(x), and codes of f's derivative         `saved.Levels.keep`
    restore    codes, scales   ──►  x, or γ x + β, or f of these, or a product of two   `compress.rematerialize.make`
    normalize  x, its μ and r  ──►  y = f(γ x̂ + β + shortcut), codes of x̂, bits or derivatives of f   BatchNorm forward
    sums       g_y             ──►  Σ g and Σ g x̂ per channel, g = g_y f'     the first half of its backward
    gradient   g               ──►  g_x                                       the second half

Inductor, given these formulas, reads a tensor once for a group's amax and once for its codes, and loads a scale, γ and
β for every element of a matrix instead of once per row or column. Codes are packed in halves of a group
(`packing.pack_parts`), so a program loads both halves and writes a byte for each pair.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import FUNCTIONS
from .launch import aligned, cdiv, launch, multiprocessors, power_of_2
from .quantize_kernels import magnitude_bits

# ---- functions, by their numbers in `FUNCTIONS` ----

_RELU, _RELU6, _SILU, _HARDSWISH, _GELU, _GELU_TANH = (tl.constexpr(i) for i in range(1, 7))
# Factor from amax to scale: a scale is rounded to bfloat16 and must not become smaller by that.
_LIFT4 = tl.constexpr((1 + 2.0**-8) / 7)
_LIFT8 = tl.constexpr((1 + 2.0**-8) / 127)
# 1.5·2²³, to which a small number is added to be rounded, halves to even: the result is in the lowest bits then.
_MAGIC = tl.constexpr(12582912.0)


@triton.jit
def _tanh(v):
    return 2.0 * tl.sigmoid(2.0 * v) - 1.0


@triton.jit
def _gauss(v):
    """Φ(v) and exp(−v²/2): Φ to 1e-7 (Abramowitz and Stegun, 7.1.26), with one exponential and few registers."""
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(v))
    p = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    e = tl.exp2(v * v * -0.7213475204444817)
    return tl.where(v < 0, p * e, 1.0 - p * e), e


@triton.jit
def _apply(v, F: tl.constexpr):
    """f(v) in float32. A NaN stays one."""
    if F == _RELU:
        v = tl.where(v <= 0, 0.0, v)
    elif F == _RELU6:
        v = tl.where(v <= 0, 0.0, tl.where(v >= 6.0, 6.0, v))
    elif F == _SILU:
        v = v * tl.sigmoid(v)
    elif F == _HARDSWISH:
        v = tl.where(v <= -3.0, v * 0.0, tl.where(v >= 3.0, v, v * (v + 3.0) * (1.0 / 6.0)))
    elif F == _GELU:
        phi, _ = _gauss(v)
        v = v * phi
    elif F == _GELU_TANH:
        v = 0.5 * v * (1.0 + _tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)))
    return v


@triton.jit
def _with_slope(v, F: tl.constexpr):
    """f(v) and f'(v) in float32, with shared subexpressions."""
    if F == _SILU:
        s = tl.sigmoid(v)
        y = v * s
        slope = s * (1.0 + v * (1.0 - s))
    elif F == _HARDSWISH:
        y = _apply(v, F)
        slope = tl.where(v <= -3.0, 0.0, tl.where(v >= 3.0, 1.0, v * (1.0 / 3.0) + 0.5))
    elif F == _GELU:
        phi, e = _gauss(v)
        y = v * phi
        slope = phi + v * e * 0.3989422804014327
    else:
        s = tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
        y = v * s
        slope = s + y * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * v * v)
    return y, slope


@triton.jit
def _larger(a, b):
    """The larger magnitude of two, a NaN if one is."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _scale_of(bits, LIFT: tl.constexpr):
    """A group's bfloat16 scale from the bits of its amax, and the factor that its elements are multiplied with."""
    lifted = bits.to(tl.float32, bitcast=True) * LIFT
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
def _pair(low, high, factor):
    """A byte of int4 codes from 0. The code of a non-finite element is arbitrary: its scale is not finite either."""
    return ((_above(low, factor) | (_above(high, factor) << 4)) - 17).to(tl.uint8)


@triton.jit
def _low(packed):
    """The codes −7 … 7 in the low halves of bytes, given as int32, in float32."""
    return ((packed & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388615.0


@triton.jit
def _high(packed):
    return (((packed >> 4) & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388615.0


# ---- keep: codes of groups ----


@triton.jit
def keep_groups(
    block, x, codes, scale, segments, run, stride,
    BITS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Groups of 2 HALF neighbours. `run` groups are contiguous, the next ones are `stride` elements further."""
    segment = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    live = segment < segments
    inside = live[:, None] & (column < HALF)[None, :]
    place = segment.to(tl.int64) if WIDE else segment
    first = (place // run) * stride + (place % run) * (2 * HALF)
    low = tl.load(x + first[:, None] + column[None, :], mask=inside, other=0).to(tl.float32)
    high = tl.load(x + first[:, None] + HALF + column[None, :], mask=inside, other=0).to(tl.float32)
    largest = tl.max(magnitude_bits(_larger(low, high)), axis=1)
    if BITS == 4:
        found, inverse = _scale_of(largest, _LIFT4)
        packed = _pair(low, high, inverse[:, None])
        tl.store(codes + place[:, None] * HALF + column[None, :], packed, mask=inside)
    else:
        found, inverse = _scale_of(largest, _LIFT8)
        at = codes + place[:, None] * (2 * HALF) + column[None, :]
        tl.store(at, _byte(low, inverse[:, None]), mask=inside)
        tl.store(at + HALF, _byte(high, inverse[:, None]), mask=inside)
    tl.store(scale + place, found, mask=live)


@triton.jit
def _keep_kernel(
    x, codes, scale, segments, run, stride,
    BITS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    keep_groups(tl.program_id(0), x, codes, scale, segments, run, stride, BITS, HALF, BLOCK, ROWS, WIDE)


@triton.jit
def _byte(v, factor):
    """int8's codes from 0."""
    return ((v * factor + (_MAGIC + 128.0)).to(tl.int32, bitcast=True) - 1).to(tl.uint8)


def side_by_side(t: Tensor) -> tuple[int, int] | None:
    """(contiguous rows, stride to the next ones) of t's last axis, None for another memory layout."""
    try:
        return _side_by_side(t.shape, t.stride())
    except TypeError:  # under Dynamo sizes may be symbolic, which are not hashable
        return _side_by_side.__wrapped__(t.shape, t.stride())


@functools.lru_cache(maxsize=1024)
def _side_by_side(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int] | None:
    if strides[-1] != 1:
        return None
    run, axis = 1, len(shape) - 2
    while axis >= 0 and (shape[axis] == 1 or strides[axis] == run * shape[-1]):
        run *= shape[axis]
        axis -= 1
    stride = strides[axis] if axis >= 0 else run * shape[-1]
    reach = stride
    while axis >= 0:
        if shape[axis] != 1 and strides[axis] != reach:
            return None
        reach = strides[axis] * shape[axis] if shape[axis] != 1 else reach
        axis -= 1
    return run, stride


class Rows:
    """A tensor as `keep_groups` reads it, and buffers for its codes, uint8 (rows, groups, bytes), and bfloat16 scales.

    Args:
        x: (..., C) of 16 or 32 bits, C a multiple of `group`.
        group: elements per scale, even.
        bits: 4 or 8.
    """

    __slots__ = ("codes", "half", "place", "scale", "wide", "x")

    def __init__(self, x: Tensor, group: int, bits: int) -> None:
        lies = side_by_side(x)
        if lies is None:
            x = x.contiguous()
            lies = x.shape[:-1].numel(), x.numel()
        columns = x.shape[-1]
        rows, groups = x.numel() // columns, columns // group
        self.x, self.half = x, group // 2
        self.codes = torch.empty(rows, groups, group * bits // 8, dtype=torch.uint8, device=x.device)
        self.scale = torch.empty(rows, groups, 1, dtype=torch.bfloat16, device=x.device)
        self.place = rows * groups, lies[0] * groups, lies[1]  # segments, run, stride
        self.wide = _is_wide(x.numel() if lies[0] * columns >= x.numel() else rows // lies[0] * lies[1])


def keep(x: Tensor, group: int, bits: int = 4) -> tuple[Tensor, Tensor]:
    """`Grouped(bits).keep(x)`, of 4 or 8 bits; shapes as in `Rows`."""
    rows = Rows(x, group, bits)
    x, half = rows.x, rows.half
    block = power_of_2(half)
    each = max(1, 2048 // block)
    case = (x.device, x.dtype, bits, rows.place, half, aligned(x))
    launch(
        _keep_kernel, cdiv(rows.place[0], each), case, (x, rows.codes, rows.scale, *rows.place),
        {"BITS": bits, "HALF": half, "BLOCK": block, "ROWS": each, "WIDE": rows.wide}, num_warps=4,
    )  # fmt: skip
    return rows.codes, rows.scale


def _is_wide(entries: int) -> bool:
    """Whether offsets exceed 31 bits."""
    return entries >= 1 << 30


# ---- restore: dequantize ----


@triton.jit
def _value(steps, scale, w, b, NORMED: tl.constexpr, F: tl.constexpr):
    """f(γ x̂ + β) or f(x), in float32 throughout."""
    v = steps * scale
    if NORMED:
        v = v * w + b
    return _apply(v, F)


@triton.jit
def _restore_kernel(
    codes, scale, w, b, codes2, scale2, w2, b2, out, segments, groups,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr, HAS_W: tl.constexpr,
    HAS_B: tl.constexpr, NORMED: tl.constexpr, TWO: tl.constexpr, F2: tl.constexpr,
    HAS_W2: tl.constexpr, HAS_B2: tl.constexpr, NORMED2: tl.constexpr, WIDE: tl.constexpr,
    ONE: tl.constexpr,
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
        packed = tl.load(codes + place[:, None] * HALF + column, mask=inside, other=0).to(tl.int32)
        if TWO:
            packed2 = tl.load(codes2 + place[:, None] * HALF + column, mask=inside, other=0).to(tl.int32)
        for half in tl.static_range(2):
            at = half * HALF + column if ONE else channel + half * HALF + column
            valid = column < HALF if ONE else inside
            wv, bv, wv2, bv2 = 1.0, 0.0, 1.0, 0.0
            if HAS_W:
                wv = tl.load(w + at, mask=valid, other=0).to(tl.float32)
            if HAS_B:
                bv = tl.load(b + at, mask=valid, other=0).to(tl.float32)
            v = _value(_low(packed) if half == 0 else _high(packed), step, wv, bv, NORMED, F)
            if TWO:
                if HAS_W2:
                    wv2 = tl.load(w2 + at, mask=valid, other=0).to(tl.float32)
                if HAS_B2:
                    bv2 = tl.load(b2 + at, mask=valid, other=0).to(tl.float32)
                v = v * _value(_low(packed2) if half == 0 else _high(packed2), step2, wv2, bv2, NORMED2, F2)
            tl.store(out + place[:, None] * (2 * HALF) + half * HALF + column, v.to(out.dtype.element_ty), mask=inside)


class Factor:
    """One factor of a dequantized product: f(γ x̂ + β), f(x̂), f(x) or x.

    Args:
        codes, scale: of `keep`.
        w, b: γ and β, (C,) or None.
        normed: whether the codes are of a normalized x̂.
        name: of f, a key of `FUNCTIONS`.
    """

    def __init__(
        self, codes: Tensor, scale: Tensor, w: Tensor | None = None, b: Tensor | None = None, normed: bool = False,
        name: str = "",
    ) -> None:  # fmt: skip
        self.codes, self.scale, self.w, self.b = codes, scale, w, b
        self.normed, self.name = normed, name

    @property
    def constants(self) -> tuple[Any, ...]:
        return FUNCTIONS[self.name], self.w is not None, self.b is not None, self.normed


def restore(factors: Sequence[Factor], dtype: torch.dtype) -> Tensor:
    """The product of one factor or two of equal layout, (rows, C) in `dtype`, contiguous."""
    first, second = factors[0], factors[-1]
    rows, groups, half = first.codes.shape
    out = torch.empty(rows, 2 * half * groups, dtype=dtype, device=first.codes.device)
    block = _block(half)
    # γ and β are read once per thread: more rows are better, as long as f leaves registers.
    each = max(1, (8192 if first.normed and not first.name else 2048) // block)
    segments, two = rows * groups, len(factors) == 2

    def arguments(factor: Factor) -> tuple[Tensor, ...]:
        return factor.codes, factor.scale, *(factor.codes if t is None else t for t in (factor.w, factor.b))

    made = first.constants, second.constants, half, block, each, two, _is_wide(out.numel()), groups == 1
    tensors = (*arguments(first), *arguments(second))
    case = out.device, segments, groups, dtype, made, tuple([t.dtype for t in tensors]), aligned(*tensors)
    launch(
        _restore_kernel, cdiv(segments, each), case, (*tensors, out, segments, groups), _restore_constants(*made),
        num_warps=4,
    )  # fmt: skip
    return out


@functools.lru_cache(maxsize=1024)
def _restore_constants(first: Any, second: Any, *rest: Any) -> dict[str, Any]:
    names = ("F", "HAS_W", "HAS_B", "NORMED")
    return {
        **dict(zip(names, first, strict=True)),
        **dict(zip((f"{name}2" for name in names), second, strict=True)),
        **dict(zip(("HALF", "BLOCK", "ROWS", "TWO", "WIDE", "ONE"), rest, strict=True)),
    }


def _block(half: int) -> int:
    """Columns at a time: the largest power of two that divides them, from 32 to 512, else all of them."""
    block = min(half & -half, 512)
    return block if block >= 32 else power_of_2(half)


# ---- an activation function, and its derivative ----


@triton.jit
def _activate_kernel(
    x, y, marks, rows, blocks, F: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    FIRST: tl.constexpr, PER_ONE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Halves of rows, BLOCK columns of each, `blocks` to a row."""
    HALF: tl.constexpr = C // 2
    program = tl.program_id(0)
    row = (program // blocks) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < HALF) if HALF % BLOCK != 0 else (row < rows) & (column >= 0)
    place = row.to(tl.int64) if WIDE else row
    low = tl.load(x + place * C + column, mask=inside, other=0).to(tl.float32)
    high = tl.load(x + place * C + HALF + column, mask=inside, other=0).to(tl.float32)
    low, slope_l = _with_slope(low, F)
    high, slope_h = _with_slope(high, F)
    packed = _slope_code(slope_l, row, column, FIRST, PER_ONE)
    packed = packed | (_slope_code(slope_h, row, column + HALF, FIRST, PER_ONE) << 4)
    tl.store(marks + place * HALF + column, packed.to(tl.uint8), mask=inside)
    tl.store(y + place * C + column, low.to(y.dtype.element_ty), mask=inside)
    tl.store(y + place * C + HALF + column, high.to(y.dtype.element_ty), mask=inside)


def activate(x: Tensor, name: str, levels: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """An activation function, and its derivative in 4 bits.

    Args:
        x: (rows, C), contiguous, C even.
        name: of the function, a key of `FUNCTIONS`.
        levels: the lowest level, and the steps from 0 to 1 (`saved.Levels`).

    Returns:
        f(x), (rows, C), and the codes of `saved.Levels`, uint8 (rows, C/2).
    """
    rows, columns = x.shape
    y, marks = torch.empty_like(x), torch.empty(rows, columns // 2, dtype=torch.uint8, device=x.device)
    block = _block(columns // 2)
    each, blocks = max(1, 1024 // block), cdiv(columns // 2, block)
    case = (x.device, name, rows, columns, levels, x.dtype, aligned(x, y, marks))
    launch(
        _activate_kernel, cdiv(rows, each) * blocks, case, (x, y, marks, rows, blocks),
        {"F": FUNCTIONS[name], "C": columns, "BLOCK": block, "ROWS": each, "FIRST": float(levels[0]),
         "PER_ONE": float(levels[1]), "WIDE": _is_wide(x.numel())}, num_warps=4,
    )  # fmt: skip
    return y, marks


# ---- batch norm: rows are pixels, columns channels ----
#
# A tile is (ROWS, EIGHTS, 8) elements of each half of the channels; bits are packed by eight neighbours.


@triton.jit
def _columns(HALF: tl.constexpr, EIGHTS: tl.constexpr):
    """Of a half of the channels: offsets in eights, the eights, the channels, and masks of eights and channels."""
    k = tl.arange(0, 8)[None, None, :]
    eighth = tl.arange(0, EIGHTS)
    whole = (eighth < HALF // 8)[None, :]
    return k, eighth, (eighth * 8)[None, :, None] + k, whole, whole[:, :, None] & (k >= 0)


@triton.jit
def _lines(block, rows, live, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Of a tile: its rows, their offsets in memory, and masks of rows and elements."""
    row = block * ROWS + tl.arange(0, ROWS)
    place = (row.to(tl.int64) if WIDE else row)[:, None, None]
    return row, place, (row < rows)[:, None], (row < rows)[:, None, None] & live


@triton.jit
def _channels(t, at, live, HAS: tl.constexpr, ELSE: tl.constexpr):
    """A vector over channels in float32, (1, EIGHTS, 8), or the number ELSE."""
    if HAS:  # noqa: SIM108
        found = tl.load(t + at, mask=live, other=0).to(tl.float32)
    else:
        found = tl.zeros_like(at).to(tl.float32) + ELSE
    return found


@triton.jit
def _slope_code(slope, row, at, FIRST: tl.constexpr, PER_ONE: tl.constexpr):
    """`saved.Levels` of a derivative, in 4 bits."""
    # `rounding.dither` plus one, built in the mantissa.
    word = (((row * -0x3EC05657 + at * -0x6E1EF25B) >> 9) & 0x7FFFF8) | 0x3F800000
    steps = slope * PER_ONE + (word.to(tl.float32, bitcast=True) - (1.0 + FIRST))
    steps = tl.where(steps == steps, tl.minimum(tl.maximum(steps, 0.0), 15.0), PER_ONE - FIRST)
    return steps.to(tl.int32)


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
    """Whether f passes a gradient at v, eight neighbours per byte: a NaN does, as in PyTorch."""
    shut = v <= 0
    if F == _RELU6:
        shut = shut | (v >= 6.0)
    return tl.sum(tl.where(shut, 0, 1) << k, axis=2)


@triton.jit
def _normalize_kernel(
    x, mean, r, w, b, shortcut, y, codes, scale, marks, rows, blocks, programs,
    C: tl.constexpr, EIGHTS: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr, SHORTCUT: tl.constexpr,
    HAS_W: tl.constexpr, HAS_B: tl.constexpr, MARKS: tl.constexpr, FIRST: tl.constexpr, PER_ONE: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """MARKS is 0 for none, 1 for bits, 4 for derivatives."""
    HALF: tl.constexpr = C // 2
    k, eighth, at, whole, live = _columns(HALF, EIGHTS)
    r_l, r_h = tl.load(r + at, mask=live, other=0), tl.load(r + HALF + at, mask=live, other=0)
    mean_l, mean_h = tl.load(mean + at, mask=live, other=0), tl.load(mean + HALF + at, mask=live, other=0)
    w_l, w_h = _channels(w, at, live, HAS_W, 1.0), _channels(w, at + HALF, live, HAS_W, 1.0)
    b_l, b_h = _channels(b, at, live, HAS_B, 0.0), _channels(b, at + HALF, live, HAS_B, 0.0)
    for block in tl.range(tl.program_id(0), blocks, programs, num_stages=STAGES):
        row, place, there, inside = _lines(block, rows, live, ROWS, WIDE)
        normal_l, v_l = _normal_half(x, mean_l, r_l, w_l, b_l, shortcut, place * C, at, inside, SHORTCUT)
        normal_h, v_h = _normal_half(x, mean_h, r_h, w_h, b_h, shortcut, place * C, at + HALF, inside, SHORTCUT)
        largest = magnitude_bits(_larger(normal_l, normal_h))
        found, inverse = _scale_of(tl.max(tl.max(largest, axis=2), axis=1), _LIFT4)
        tl.store(scale + row, found, mask=row < rows)
        packed = _pair(normal_l, normal_h, inverse[:, None, None])
        tl.store(codes + place * HALF + at, packed, mask=inside)
        if MARKS == 1:
            byte = (row.to(tl.int64) if WIDE else row)[:, None] * (C // 8) + eighth[None, :]
            tl.store(marks + byte, _open_bits(v_l, k, F).to(tl.uint8), mask=there & whole)
            tl.store(marks + byte + HALF // 8, _open_bits(v_h, k, F).to(tl.uint8), mask=there & whole)
        if MARKS == 4:
            line = row[:, None, None]
            v_l, slope_l = _with_slope(v_l, F)
            v_h, slope_h = _with_slope(v_h, F)
            slopes = _slope_code(slope_l, line, at, FIRST, PER_ONE)
            slopes = slopes | (_slope_code(slope_h, line, at + HALF, FIRST, PER_ONE) << 4)
            tl.store(marks + place * HALF + at, slopes.to(tl.uint8), mask=inside)
        else:
            v_l, v_h = _apply(v_l, F), _apply(v_h, F)
        tl.store(y + place * C + at, v_l.to(y.dtype.element_ty), mask=inside)
        tl.store(y + place * C + HALF + at, v_h.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _behind(
    g, marks, row, place, at, eighth, there, whole, inside, half: tl.constexpr, C: tl.constexpr, MARKS: tl.constexpr,
    FIRST: tl.constexpr, PER_ONE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradient of the argument of f, of one half of the channels."""
    HALF: tl.constexpr = C // 2
    found = tl.load(g + place * C + half * HALF + at, mask=inside, other=0)
    if MARKS == 1:
        byte = (row.to(tl.int64) if WIDE else row)[:, None] * (C // 8) + half * (HALF // 8) + eighth[None, :]
        passed = tl.load(marks + byte, mask=there & whole, other=0).to(tl.int32)[:, :, None] >> (at % 8)
        # Not a product: where f' is 0 an infinite gradient must become 0.
        found = tl.where((passed & 1) != 0, found, 0.0)
    if MARKS == 4:
        code = (tl.load(marks + place * HALF + at, mask=inside, other=0).to(tl.int32) >> (4 * half)) & 15
        slope = (code.to(tl.float32) + FIRST) * (1.0 / PER_ONE)
        found = (found.to(tl.float32) * slope).to(g.dtype.element_ty)
    return found


@triton.jit
def _sums_kernel(
    g, codes, scale, marks, passed_on, sums, rows, blocks, programs,
    C: tl.constexpr, EIGHTS: tl.constexpr, ROWS: tl.constexpr, MARKS: tl.constexpr, PASS_ON: tl.constexpr,
    FIRST: tl.constexpr, PER_ONE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Σ g and Σ g x̂ of each program, (programs, 2, C) float32; `passed_on` gets g f', for the shortcut."""
    HALF: tl.constexpr = C // 2
    _, eighth, at, whole, live = _columns(HALF, EIGHTS)
    g_l = tl.zeros((ROWS, EIGHTS, 8), tl.float32)
    g_h = tl.zeros((ROWS, EIGHTS, 8), tl.float32)
    gx_l = tl.zeros((ROWS, EIGHTS, 8), tl.float32)
    gx_h = tl.zeros((ROWS, EIGHTS, 8), tl.float32)
    for block in tl.range(tl.program_id(0), blocks, programs, num_stages=STAGES):
        row, place, there, inside = _lines(block, rows, live, ROWS, WIDE)
        step = tl.load(scale + row, mask=row < rows, other=0).to(tl.float32)[:, None, None]
        packed = tl.load(codes + place * HALF + at, mask=inside, other=0).to(tl.int32)
        low = _behind(g, marks, row, place, at, eighth, there, whole, inside, 0, C, MARKS, FIRST, PER_ONE, WIDE)
        high = _behind(g, marks, row, place, at, eighth, there, whole, inside, 1, C, MARKS, FIRST, PER_ONE, WIDE)
        if PASS_ON:
            tl.store(passed_on + place * C + at, low.to(g.dtype.element_ty), mask=inside)
            tl.store(passed_on + place * C + HALF + at, high.to(g.dtype.element_ty), mask=inside)
        low, high = low.to(tl.float32), high.to(tl.float32)
        g_l += low
        g_h += high
        gx_l += low * (_low(packed) * step)
        gx_h += high * (_high(packed) * step)
    own = sums + tl.program_id(0) * (2 * C) + (eighth * 8)[:, None] + tl.arange(0, 8)[None, :]
    valid = (eighth < HALF // 8)[:, None] & (tl.arange(0, 8) >= 0)[None, :]
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
def _gradient_kernel(
    g, codes, scale, marks, sums, r, w, g_x, rows, blocks, programs, share,
    C: tl.constexpr, EIGHTS: tl.constexpr, ROWS: tl.constexpr, MARKS: tl.constexpr, HAS_W: tl.constexpr,
    FIRST: tl.constexpr, PER_ONE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """g_x = r γ (g − Σ g share − x̂ Σ g x̂ share).  sums: (2, C)."""
    HALF: tl.constexpr = C // 2
    _, eighth, at, whole, live = _columns(HALF, EIGHTS)
    f_l = tl.load(r + at, mask=live, other=0) * _channels(w, at, live, HAS_W, 1.0)
    f_h = tl.load(r + HALF + at, mask=live, other=0) * _channels(w, at + HALF, live, HAS_W, 1.0)
    m_l = tl.load(sums + at, mask=live, other=0) * share * f_l
    m_h = tl.load(sums + HALF + at, mask=live, other=0) * share * f_h
    s_l = tl.load(sums + C + at, mask=live, other=0) * share * f_l
    s_h = tl.load(sums + C + HALF + at, mask=live, other=0) * share * f_h
    for block in tl.range(tl.program_id(0), blocks, programs, num_stages=STAGES):
        row, place, there, inside = _lines(block, rows, live, ROWS, WIDE)
        step = tl.load(scale + row, mask=row < rows, other=0).to(tl.float32)[:, None, None]
        packed = tl.load(codes + place * HALF + at, mask=inside, other=0).to(tl.int32)
        low = _behind(g, marks, row, place, at, eighth, there, whole, inside, 0, C, MARKS, FIRST, PER_ONE, WIDE)
        high = _behind(g, marks, row, place, at, eighth, there, whole, inside, 1, C, MARKS, FIRST, PER_ONE, WIDE)
        low = low.to(tl.float32) * f_l - m_l - _low(packed) * step * s_l
        high = high.to(tl.float32) * f_h - m_h - _high(packed) * step * s_h
        tl.store(g_x + place * C + at, low.to(g_x.dtype.element_ty), mask=inside)
        tl.store(g_x + place * C + HALF + at, high.to(g_x.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Tiling:
    """Block sizes: least elements of half a tile, programs per multiprocessor, stages of loads in flight, warps."""

    entries: int
    waves: int
    stages: int
    warps: int = 4

    def cut(self, channels: int, rows: int, device: torch.device) -> tuple[int, int, int, int]:
        """(eighths of a half, rows per tile, tiles, programs)."""
        eighths = power_of_2(channels // 16)
        each = max(1, self.entries // (8 * eighths))
        blocks = cdiv(rows, each)
        return eighths, each, blocks, min(blocks, self.waves * multiprocessors(device))


# Measured on an H200 (docs/memory.md). Each program of the sums writes two numbers per channel: few programs where
# there are many channels.


def _normalize_tiling(channels: int) -> Tiling:
    return Tiling(512 if channels <= 64 else 1024, 16, 1)


def _sums_tiling(channels: int) -> Tiling:
    return Tiling(512, 16, 1) if channels < 1024 else Tiling(2048, 4, 1)


_GRADIENT = Tiling(512, 16, 1)


def _marks(name: str, levels: tuple[int, int] | None) -> dict[str, Any]:
    """Bits per element that f's gradient needs, 0, 1 or 4, and the levels of 4."""
    first, per_one = levels or (0, 1)
    return {"MARKS": 0 if not name else 4 if levels else 1, "FIRST": float(first), "PER_ONE": float(per_one)}


def normalize(
    x: Tensor, mean: Tensor, r: Tensor, w: Tensor | None, b: Tensor | None, shortcut: Tensor | None, name: str,
    levels: tuple[int, int] | None, tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """BatchNorm, residual and activation in one kernel: y = f(γ x̂ + β + shortcut), and all that backward needs.

    Args:
        x: (rows, C), contiguous, C a multiple of 16.
        mean, r: mean and 1/standard deviation, (C,) float32.
        w, b: γ and β, (C,) or None.
        shortcut: as x, or None.
        name: of f, "" for none.
        levels: of f's derivative (`saved.Levels`): the lowest, and the steps from 0 to 1; None for bits.
        tiling: block sizes.

    Returns:
        y, as x; codes and scales of x̂ with per-row scales; marks of f, uint8, (rows, C/2) or (rows, C/8).
    """
    rows, channels = x.shape
    tiling = tiling or _normalize_tiling(channels)
    kept = _marks(name, levels)
    y = torch.empty_like(x)
    codes = torch.empty(rows, 1, channels // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, 1, 1, dtype=torch.bfloat16, device=x.device)
    marks = torch.empty(rows, channels * kept["MARKS"] // 8, dtype=torch.uint8, device=x.device)
    eighths, each, blocks, programs = tiling.cut(channels, rows, x.device)
    constants = kept | {
        "C": channels, "EIGHTS": eighths, "ROWS": each, "F": FUNCTIONS[name], "SHORTCUT": shortcut is not None,
        "HAS_W": w is not None, "HAS_B": b is not None, "WIDE": _is_wide(x.numel()), "STAGES": tiling.stages,
    }  # fmt: skip
    tensors = (x, mean, r, *(x if t is None else t for t in (w, b, shortcut)), y, codes, scale, marks)
    case = (x.device, rows, programs, tuple(t.dtype for t in tensors), aligned(*tensors), tuple(constants.items()))
    launch(_normalize_kernel, programs, case, (*tensors, rows, blocks, programs), constants, num_warps=tiling.warps)
    return y, codes, scale, marks


def norm_gradient(
    g: Tensor, codes: Tensor, scale: Tensor, marks: Tensor, r: Tensor, w: Tensor | None, name: str,
    levels: tuple[int, int] | None, passes_on: bool, sums_tiling: Tiling | None = None, tiling: Tiling = _GRADIENT,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of `normalize`.

    Args:
        g: (rows, C), contiguous.
        codes, scale, marks: of `normalize`.
        r, w, name, levels: as given to `normalize`.
        passes_on: whether the shortcut needs a gradient.
        sums_tiling, tiling: block sizes.

    Returns:
        g_x, [Σ g, Σ g x̂] as (2, C) in float32, and the shortcut's gradient, empty if not needed.
    """
    rows, channels = g.shape
    sums_tiling = sums_tiling or _sums_tiling(channels)
    passed_on = torch.empty_like(g) if passes_on else g.new_empty(0)
    eighths, each, blocks, programs = sums_tiling.cut(channels, rows, g.device)
    parts = torch.empty(programs, 2, channels, dtype=torch.float32, device=g.device)
    constants = _marks(name, levels) | {
        "C": channels, "EIGHTS": eighths, "ROWS": each, "WIDE": _is_wide(g.numel()), "STAGES": sums_tiling.stages,
    }  # fmt: skip
    tensors = (g, codes, scale, marks, passed_on, parts)
    case = (
        g.device, rows, programs, passes_on, tuple(t.dtype for t in tensors), aligned(*tensors),
        tuple(constants.items()),
    )  # fmt: skip
    launch(
        _sums_kernel, programs, case, (*tensors, rows, blocks, programs), {**constants, "PASS_ON": passes_on},
        num_warps=sums_tiling.warps,
    )  # fmt: skip
    sums = torch.empty(2, channels, dtype=torch.float32, device=g.device)
    launch(
        _total_kernel, cdiv(2 * channels, 16), (g.device, programs, channels), (parts, sums, programs),
        {"N": 2 * channels, "COLUMNS": 16, "ROWS": 128}, num_warps=4,
    )  # fmt: skip
    # Behind f already, where it is there.
    source, marked = (passed_on, 0) if passes_on else (g, constants["MARKS"])
    eighths, each, blocks, programs = tiling.cut(channels, rows, g.device)
    constants |= {"EIGHTS": eighths, "ROWS": each, "MARKS": marked, "HAS_W": w is not None, "STAGES": tiling.stages}
    g_x = torch.empty_like(g)
    read = (source, codes, scale, marks, sums, r, r if w is None else w, g_x)
    found = (g.device, rows, programs, tuple(t.dtype for t in read), aligned(*read), tuple(constants.items()))
    launch(
        _gradient_kernel, programs, found, (*read, rows, blocks, programs, 1.0 / rows), constants,
        num_warps=tiling.warps,
    )  # fmt: skip
    return g_x, sums, passed_on
