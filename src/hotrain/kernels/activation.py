"""Triton kernels of activation functions, and f and f' as device functions for other kernels.

::

    activate        x (+ bias)  ──►  f(x), and codes of f'(x) in 4 bits        `saved.Levels.keep`
    slope_gradient  g_y, codes  ──►  g_y f'(x)
    bits            x           ──►  f(x), and a bit where f passes a gradient  `saved.Bits.keep`
    bits_gradient   g_y, bits   ──►  g_y there (by a factor), 0 elsewhere
    flags           mask        ──►  its bits
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import INTERPRETED, Plan, aligned, block_of, cdiv, is_wide, launch, multiprocessors, power_of_2
from .support import FUNCTIONS

_TILE = 2048  # elements of a half of a tile
_SUMMED_TILE = 1024  # where the sums of channels stay in registers
_WAVES = 8  # programs per multiprocessor of those that leave sums
_FLAT = 1024  # bytes of bits that a program makes or reads

# ---- functions, by their numbers in `FUNCTIONS` ----

_RELU, RELU6, _SILU, _HARDSWISH, _GELU, _GELU_TANH = (tl.constexpr(i) for i in range(1, 7))


# `tl.exp2` and a division take four and seven instructions more for numbers that are not normal or beyond 2¹²⁶. None
# comes here but as an exponential that is zero to what it is added to. The interpreter has no instructions.
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _exp2(v):
    if _INTERPRETED:
        return tl.exp2(v)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [v], tl.float32, is_pure=True, pack=1)


@triton.jit
def _reciprocal(v):
    """1/v for v from 1 on."""
    if _INTERPRETED:
        return 1.0 / v
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [v], tl.float32, is_pure=True, pack=1)


@triton.jit
def _sigmoid(v):
    return _reciprocal(1.0 + _exp2(v * -1.4426950408889634))


@triton.jit
def _tanh(v):
    return 2.0 * _sigmoid(2.0 * v) - 1.0


@triton.jit
def _gauss(v):
    """Φ(v) and exp(−v²/2): Φ to 1e-7 (Abramowitz and Stegun, 7.1.26), with one exponential and few registers."""
    t = _reciprocal(1.0 + 0.23164189 * tl.abs(v))
    p = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    e = _exp2(v * v * -0.7213475204444817)
    return tl.where(v < 0, p * e, 1.0 - p * e), e


@triton.jit
def apply(v, F: tl.constexpr):
    """f(v) in float32. A NaN stays one."""
    if F == _RELU:
        v = tl.where(v <= 0, 0.0, v)
    elif F == RELU6:
        v = tl.where(v <= 0, 0.0, tl.where(v >= 6.0, 6.0, v))
    elif F == _SILU:
        v = v * _sigmoid(v)
    elif F == _HARDSWISH:
        v = tl.where(v <= -3.0, v * 0.0, tl.where(v >= 3.0, v, v * (v + 3.0) * (1.0 / 6.0)))
    elif F == _GELU:
        phi, _ = _gauss(v)
        v = v * phi
    elif F == _GELU_TANH:
        v = 0.5 * v * (1.0 + _tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)))
    return v


@triton.jit
def with_slope(v, F: tl.constexpr):
    """f(v) and f'(v) in float32, with shared subexpressions."""
    if F == _SILU:
        s = _sigmoid(v)
        y = v * s
        slope = s * (1.0 + v * (1.0 - s))
    elif F == _HARDSWISH:
        y = apply(v, F)
        slope = tl.where(v <= -3.0, 0.0, tl.where(v >= 3.0, 1.0, v * (1.0 / 3.0) + 0.5))
    elif F == _GELU:
        phi, e = _gauss(v)
        y = v * phi
        slope = phi + v * e * 0.3989422804014327
    else:
        s = _sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
        y = v * s
        slope = s + y * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * v * v)
    return y, slope


@triton.jit
def is_closed(v, F: tl.constexpr):
    """Whether ReLU or ReLU6 passes no gradient at v. At a NaN it does, as in PyTorch."""
    closed = v <= 0
    if F == RELU6:
        closed = closed | (v >= 6.0)
    return closed


@triton.jit
def slope_code(slope, row, at, FIRST: tl.constexpr, PER_ONE: tl.constexpr):
    """`saved.Levels` of a derivative, in 4 bits."""
    # `saved.dither` plus one, built in the mantissa.
    word = (((row * -0x3EC05657 + at * -0x6E1EF25B) >> 9) & 0x7FFFF8) | 0x3F800000
    steps = slope * PER_ONE + (word.to(tl.float32, bitcast=True) - (1.0 + FIRST))
    steps = tl.where(steps == steps, tl.minimum(tl.maximum(steps, 0.0), 15.0), PER_ONE - FIRST)
    return steps.to(tl.int32)


# ---- derivatives of 4 bits ----


@triton.jit
def _activate_kernel(
    x, bias, y, marks, rows, blocks, F: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    FIRST: tl.constexpr, PER_ONE: tl.constexpr, HAS_BIAS: tl.constexpr, WIDE: tl.constexpr,
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
    if HAS_BIAS:
        # A row's bias for each row: read as a vector, Triton would compute f in the layout of that, too.
        own = tl.broadcast_to(column, (ROWS, BLOCK))
        low += tl.load(bias + own, mask=inside, other=0).to(tl.float32)
        high += tl.load(bias + HALF + own, mask=inside, other=0).to(tl.float32)
    low, slope_l = with_slope(low, F)
    high, slope_h = with_slope(high, F)
    packed = slope_code(slope_l, row, column, FIRST, PER_ONE)
    packed = packed | (slope_code(slope_h, row, column + HALF, FIRST, PER_ONE) << 4)
    tl.store(marks + place * HALF + column, packed.to(tl.uint8), mask=inside)
    tl.store(y + place * C + column, low.to(y.dtype.element_ty), mask=inside)
    tl.store(y + place * C + HALF + column, high.to(y.dtype.element_ty), mask=inside)


def activate(x: Tensor, name: str, levels: tuple[int, int], bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """An activation function, of x or of x + bias, and its derivative in 4 bits.

    Args:
        x: (rows, C), contiguous, C even.
        name: of the function, a key of `FUNCTIONS`.
        levels: the lowest level, and the steps from 0 to 1 (`saved.Levels`).
        bias: (C,), contiguous, added in float32; None for 0.

    Returns:
        f(x + bias), (rows, C) in x's dtype, and the codes of `saved.Levels`, uint8 (rows, C/2).
    """
    rows, columns = x.shape
    y, marks = torch.empty_like(x), torch.empty(rows, columns // 2, dtype=torch.uint8, device=x.device)
    dtypes = x.dtype, None if bias is None else bias.dtype
    _activates(x.device, rows, columns, dtypes, name, levels).run(x, x if bias is None else bias, y, marks)
    return y, marks


@functools.cache
def _activates(
    device: torch.device, rows: int, columns: int, dtypes: tuple[torch.dtype, torch.dtype | None], name: str,
    levels: tuple[int, int],
) -> Plan:  # fmt: skip
    block = block_of(columns // 2)
    each, blocks = max(1, 1024 // block), cdiv(columns // 2, block)
    constants = {
        "F": FUNCTIONS[name], "C": columns, "BLOCK": block, "ROWS": each, "FIRST": float(levels[0]),
        "PER_ONE": float(levels[1]), "HAS_BIAS": dtypes[1] is not None, "WIDE": is_wide(rows * columns),
    }  # fmt: skip
    return Plan(_activate_kernel, cdiv(rows, each) * blocks, constants, (rows, blocks))


@triton.jit
def _slope_gradient_kernel(
    g, marks, g_x, parts, rows, blocks, lanes, FIRST: tl.constexpr, STEP: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr, SUMS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Derivatives are (code + FIRST) STEP. ACROSS is the number of blocks of columns; `lanes` programs share one."""
    lane = tl.program_id(0) // ACROSS
    column = (tl.program_id(0) % ACROSS) * BLOCK + tl.arange(0, BLOCK)
    there = column < HALF
    sum_l = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_h = tl.zeros((ROWS, BLOCK), tl.float32)
    for number in tl.range(lane, blocks, lanes, num_stages=2):
        row = number * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & there[None, :]
        place = (row.to(tl.int64) if WIDE else row)[:, None]
        packed = tl.load(marks + place * HALF + column[None, :], mask=inside, other=0).to(tl.int32)
        at = place * (2 * HALF) + column[None, :]
        low = tl.load(g + at, mask=inside, other=0).to(tl.float32) * (((packed & 15).to(tl.float32) + FIRST) * STEP)
        high = tl.load(g + at + HALF, mask=inside, other=0).to(tl.float32) * (
            (((packed >> 4) & 15).to(tl.float32) + FIRST) * STEP
        )
        tl.store(g_x + at, low.to(g_x.dtype.element_ty), mask=inside)
        tl.store(g_x + at + HALF, high.to(g_x.dtype.element_ty), mask=inside)
        if SUMS:
            sum_l += low
            sum_h += high
    if SUMS:
        left = parts + lane.to(tl.int64) * (2 * HALF) + column
        tl.store(left, tl.sum(sum_l, axis=0), mask=there)
        tl.store(left + HALF, tl.sum(sum_h, axis=0), mask=there)


def slope_gradient(
    g: Tensor, marks: Tensor, levels: tuple[int, int], factor: float, sums: bool = False
) -> tuple[Tensor, Tensor]:
    """g_x = g f'(x) factor, with f'(x) in 4 bits, and Σ g_x per channel, the bias gradient of the layer before.

    Args:
        g: (rows, C), contiguous, C even.
        marks: codes of the derivative, uint8 (rows, C/2).
        levels: the lowest level, and the steps from 0 to 1 (`saved.Levels`).
        factor: a number.
        sums: whether the sums are wanted.

    Returns:
        g_x as g, and the sums, float32 (C,), empty if not wanted.
    """
    device, (rows, columns) = g.device, g.shape
    plan = _slope_gradients(device, rows, columns, g.dtype, levels, factor, sums)
    g_x = torch.empty_like(g)
    parts = torch.empty(plan.numbers[-1] if sums else 0, columns, dtype=torch.float32, device=device)
    plan.run(g, marks, g_x, parts)
    return g_x, parts.sum(0) if sums else parts.view(-1)


@functools.cache
def _slope_gradients(
    device: torch.device, rows: int, columns: int, dtype: torch.dtype, levels: tuple[int, int], factor: float,
    sums: bool,
) -> Plan:  # fmt: skip
    half = columns // 2
    block = min(power_of_2(half), 128 if sums else _TILE)
    each = max(1, (_SUMMED_TILE if sums else _TILE) // block)
    across, blocks = cdiv(half, block), cdiv(rows, each)
    lanes = min(blocks, cdiv(_WAVES * multiprocessors(device), across)) if sums else blocks
    constants = {
        "FIRST": float(levels[0]), "STEP": factor / levels[1], "HALF": half, "BLOCK": block, "ROWS": each,
        "ACROSS": across, "SUMS": sums, "WIDE": is_wide(rows * columns),
    }  # fmt: skip
    return Plan(_slope_gradient_kernel, lanes * across, constants, (rows, blocks, lanes))


# ---- derivatives of 1 bit ----


@triton.jit
def _bits_kernel(x, y, bits, eighth, F: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """A byte has the bits of eight elements that are an eighth of the tensor apart."""
    at = (tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    inside = at < eighth
    packed = tl.zeros((BLOCK,), tl.int32)
    for k in tl.static_range(8):
        v = tl.load(x + k * eighth + at, mask=inside, other=0).to(tl.float32)
        packed = packed | (tl.where(is_closed(v, F), 0, 1) << k)
        tl.store(y + k * eighth + at, apply(v, F).to(y.dtype.element_ty), mask=inside)
    tl.store(bits + at, packed.to(tl.uint8), mask=inside)


def bits(x: Tensor, name: str, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """f(x), and where f passes a gradient, as `saved.Bits`: uint8 (elements/8,).

    Args:
        x: contiguous, of a multiple of 8 elements.
        name: ``"relu"`` or ``"relu6"``.
        in_place: whether f(x) is written to x.
    """
    eighth = x.numel() // 8
    y, packed = x if in_place else torch.empty_like(x), torch.empty(eighth, dtype=torch.uint8, device=x.device)
    constants = {"F": FUNCTIONS[name], "BLOCK": _FLAT, "WIDE": is_wide(x.numel())}
    case = (x.device, x.dtype, eighth, name, aligned(x, y, packed))
    launch(_bits_kernel, cdiv(eighth, _FLAT), case, (x, y, packed, eighth), constants, num_warps=4)
    return y, packed


@triton.jit
def _bits_gradient_kernel(g, bits, g_x, eighth, FACTOR: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    at = (tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    inside = at < eighth
    packed = tl.load(bits + at, mask=inside, other=0).to(tl.int32)
    for k in tl.static_range(8):
        found = tl.load(g + k * eighth + at, mask=inside, other=0)
        if FACTOR != 1.0:
            found = (found.to(tl.float32) * FACTOR).to(g_x.dtype.element_ty)
        # Not a product: where f' is 0 an infinite gradient must become 0.
        tl.store(g_x + k * eighth + at, tl.where(((packed >> k) & 1) != 0, found, 0.0), mask=inside)


def bits_gradient(g: Tensor, bits: Tensor, factor: float = 1.0) -> Tensor:
    """g factor where the bits of `bits` are set, 0 elsewhere; g is contiguous."""
    eighth, g_x = bits.numel(), torch.empty_like(g)
    case = (g.device, g.dtype, eighth, factor, aligned(g, bits, g_x))
    constants = {"FACTOR": factor, "BLOCK": _FLAT, "WIDE": is_wide(g.numel())}
    launch(_bits_gradient_kernel, cdiv(eighth, _FLAT), case, (g, bits, g_x, eighth), constants, num_warps=4)
    return g_x


@triton.jit
def _flags_kernel(flags, bits, eighth, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    at = (tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
    inside = at < eighth
    packed = tl.zeros((BLOCK,), tl.int32)
    for k in tl.static_range(8):
        packed = packed | (tl.load(flags + k * eighth + at, mask=inside, other=0).to(tl.int32) << k)
    tl.store(bits + at, packed.to(tl.uint8), mask=inside)


def flags(t: Tensor) -> Tensor:
    """The bits of a bool tensor, as `saved.Bits`: uint8 (elements/8,); t is contiguous, of a multiple of 8 elements."""
    eighth = t.numel() // 8
    packed = torch.empty(eighth, dtype=torch.uint8, device=t.device)
    case, t = (t.device, eighth, aligned(t, packed)), t.view(torch.uint8)
    constants = {"BLOCK": _FLAT, "WIDE": is_wide(t.numel())}
    launch(_flags_kernel, cdiv(eighth, _FLAT), case, (t, packed, eighth), constants, num_warps=4)
    return packed
