"""Triton kernels of activation functions, and f and f' as device functions for other kernels.

::

    bits            x          ──►  f(x), and a bit where f passes a gradient  `saved.Bits.keep`
    bits_gradient   g_y, bits  ──►  g_y there (by a factor), 0 elsewhere
    flags           mask       ──►  its bits

Functions that save their input are in `codes`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import INTERPRETED, Plan, cdiv, is_wide
from .support import FUNCTIONS

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
def _rough_tanh(v):
    """To 2⁻¹¹, by one instruction."""
    if _INTERPRETED:
        return _tanh(v)
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [v], tl.float32, is_pure=True, pack=1)


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
def roughly(v, F: tl.constexpr):
    """f(v) to 2⁻¹⁰ max(1, |v|), of a v in 8 bits or fewer for a result in as many: GELU in its tanh form, one tanh."""
    if F == _GELU or F == _GELU_TANH:
        half = 0.5 * v
        return tl.fma(half, _rough_tanh(v * tl.fma(v * v, 0.035677408136300125, 0.7978845608028654)), half)
    if F == _SILU:
        half = 0.5 * v
        return tl.fma(half, _rough_tanh(half), half)
    return apply(v, F)


@triton.jit
def slope_of(v, F: tl.constexpr):
    """f'(v) in float32; of GELU that of its tanh form, as `compress.slopes` has it, 0.0009 away."""
    if F == _GELU or F == _GELU_TANH:
        square = v * v
        s = _reciprocal(1.0 + _exp2(v * tl.fma(square, -0.10294324, -2.3022082)))
        return tl.fma(tl.fma(-s, s, s), v * tl.fma(square, 0.21406444, 1.5957691), s)
    _, slope = with_slope(v, F)
    return slope


@triton.jit
def rough_slope(v, F: tl.constexpr):
    """f'(v) to 2⁻¹⁰, for a product that is written in 8 bits or fewer: of GELU and SiLU by one tanh."""
    if F == _GELU or F == _GELU_TANH:
        square = v * v
        t = _rough_tanh(v * tl.fma(square, 0.035677408136300125, 0.7978845608028654))
        return tl.fma(
            tl.fma(-t, t, 1.0), v * tl.fma(square, 0.05351611220445019, 0.3989422804014327), tl.fma(t, 0.5, 0.5)
        )
    if F == _SILU:
        half = 0.5 * v
        t = _rough_tanh(half)
        return tl.fma(tl.fma(-t, t, 1.0), 0.5 * half, tl.fma(t, 0.5, 0.5))
    return slope_of(v, F)


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
    _plan("bits", x.device, x.dtype, eighth, 1, "F", FUNCTIONS[name]).run(x, y, packed)
    return y, packed


@functools.lru_cache(maxsize=1024)
def _plan(
    name: str, device: torch.device, dtype: torch.dtype, eighth: int, given: int, constant: str = "", value: float = 0
) -> Plan:
    """Of one of the three kernels, by name since Triton's take long to hash; with its own constant if it has one."""
    kernel = {"bits": _bits_kernel, "gradient": _bits_gradient_kernel, "flags": _flags_kernel}[name]
    constants: dict[str, Any] = {constant: value} if constant else {}
    constants |= {"BLOCK": _FLAT, "WIDE": is_wide(8 * eighth)}
    return Plan(kernel, cdiv(eighth, _FLAT), constants, (eighth,), given=given)


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
    _plan("gradient", g.device, g.dtype, eighth, 2, "FACTOR", factor).run(g, bits, g_x)
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
    _plan("flags", t.device, torch.uint8, eighth, 1).run(t.view(torch.uint8), packed)
    return packed
