"""Triton kernels of max pooling in channels-last memory, for eager mode.

::

    max_pool            x           ──►  y, and the place of each maximum in its window, 1 byte
    max_pool_gradient   g_y, bytes  ──►  g_x: of each element of x, the sum over the windows that it is in

PyTorch's own kernels write and read an index of 8 bytes, and add g_x up element by element of g_y.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Plan, cdiv, is_wide

_BLOCK = 1024  # elements of y, or of x, of one program


@triton.jit
def _place(BLOCK: tl.constexpr, C: tl.constexpr, W: tl.constexpr, H: tl.constexpr, WIDE: tl.constexpr):
    """Of a program's elements: where they are in memory, and their channel, column, row and image."""
    first = tl.program_id(0)
    at = (first.to(tl.int64) if WIDE else first) * BLOCK + tl.arange(0, BLOCK)
    pixel = at // C
    row = pixel // W
    return at, at % C, pixel % W, row % H, row // H


@triton.jit
def _max_pool_kernel(
    x, y, places, entries, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OUT_H: tl.constexpr, OUT_W: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    at, c, j, i, n = _place(BLOCK, C, OUT_W, OUT_H, WIDE)
    top, left = i * SH - PH, j * SW - PW
    found = tl.full((BLOCK,), float("-inf"), tl.float32)
    # Where no number is larger, the first of the window that is in the image.
    place = tl.maximum(-top, 0) * KW + tl.maximum(-left, 0)
    for k in tl.static_range(KH * KW):
        row, column = top + k // KW, left + k % KW
        inside = (row >= 0) & (row < H) & (column >= 0) & (column < W) & (at < entries)
        v = tl.load(x + ((n * H + row) * W + column) * C + c, mask=inside, other=float("-inf")).to(tl.float32)
        larger = (v > found) | (v != v)
        found = tl.where(larger, v, found)
        place = tl.where(larger, k, place)
    tl.store(y + at, found.to(y.dtype.element_ty), mask=at < entries)
    tl.store(places + at, place.to(tl.uint8), mask=at < entries)


@triton.jit
def _max_pool_gradient_kernel(
    g, places, g_x, entries, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, OUT_H: tl.constexpr,
    OUT_W: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    at, c, column, row, n = _place(BLOCK, C, W, H, WIDE)
    last_i, last_j = (row + PH) // SH, (column + PW) // SW  # the last window in each direction
    total = tl.zeros((BLOCK,), tl.float32)
    for back_i in tl.static_range((KH + SH - 1) // SH):
        for back_j in tl.static_range((KW + SW - 1) // SW):
            i, j = last_i - back_i, last_j - back_j
            down, right = row + PH - i * SH, column + PW - j * SW
            inside = (i >= 0) & (i < OUT_H) & (j >= 0) & (j < OUT_W) & (down < KH) & (right < KW) & (at < entries)
            source = ((n * OUT_H + i) * OUT_W + j) * C + c
            place = tl.load(places + source, mask=inside, other=255).to(tl.int32)
            v = tl.load(g + source, mask=inside, other=0).to(tl.float32)
            total += tl.where(inside & (place == down * KW + right), v, 0.0)
    tl.store(g_x + at, total.to(g_x.dtype.element_ty), mask=at < entries)


def pooled(size: int, kernel: int, stride: int, padding: int, ceil: bool) -> int:
    """The number of windows along an axis of x."""
    count = (size + 2 * padding - kernel + (stride - 1 if ceil else 0)) // stride + 1
    return count - 1 if ceil and (count - 1) * stride >= size + padding else count  # none begins behind the image


def max_pool(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil: bool
) -> tuple[Tensor, Tensor]:
    """Max pooling as PyTorch's: of equal numbers the first, and NaN before any number.

    Args:
        x: (N, C, H, W), channels-last.
        kernel, stride, padding, ceil: of `torch.nn.functional.max_pool2d`; windows of at most 256 elements.

    Returns:
        y, and where in its window each maximum is, row by row, as uint8: both (N, C, H', W'), channels-last.
    """
    out = [pooled(x.shape[2 + axis], kernel[axis], stride[axis], padding[axis], ceil) for axis in range(2)]
    y = torch.empty((*x.shape[:2], *out), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    places = torch.empty_like(y, dtype=torch.uint8)
    geometry = map(tuple, (x.shape, out, kernel, stride, padding))
    _plan(_max_pool_kernel, x.device, x.dtype, *geometry).run(x, y, places)
    return y, places


def max_pool_gradient(
    g: Tensor, places: Tensor, shape: Sequence[int], kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:  # fmt: skip
    """The gradient of `max_pool`, summed in float32.

    Args:
        g: (N, C, H', W'), channels-last.
        places: that `max_pool` returned.
        shape: of x.
        kernel, stride, padding: that were given to it.

    Returns:
        g_x (N, C, H, W), channels-last, of g's dtype.
    """
    g_x = torch.empty(tuple(shape), dtype=g.dtype, device=g.device, memory_format=torch.channels_last)
    geometry = map(tuple, (shape, g.shape[2:], kernel, stride, padding))
    _plan(_max_pool_gradient_kernel, g.device, g.dtype, *geometry).run(g, places, g_x)
    return g_x


@functools.cache
def _plan(
    kernel: object, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], out: tuple[int, ...],
    window: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
) -> Plan:  # fmt: skip
    images, channels, height, width = shape
    entries = images * channels * (out[0] * out[1] if kernel is _max_pool_kernel else height * width)
    constants = {
        "C": channels, "H": height, "W": width, "OUT_H": out[0], "OUT_W": out[1], "KH": window[0], "KW": window[1],
        "SH": stride[0], "SW": stride[1], "PH": padding[0], "PW": padding[1], "BLOCK": _BLOCK,
        "WIDE": is_wide(images * channels * max(out[0] * out[1], height * width)),
    }  # fmt: skip
    return Plan(kernel, cdiv(entries, _BLOCK), constants, (entries,))
