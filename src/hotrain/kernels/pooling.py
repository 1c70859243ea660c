"""Triton kernels of max pooling in channels-last memory, for eager mode.

::

    max_pool            x           ──►  y, and the place of each maximum in its window, 1 byte
    max_pool_gradient   g_y, bytes  ──►  g_x: of each element of x, the sum over the windows that it is in

PyTorch's own kernels write and read an index of 8 bytes, and add g_x up element by element of g_y.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Plan, cdiv, is_wide

_BLOCK = 1024  # elements of a row of y, or of x, of one program


@triton.jit
def _max_pool_kernel(
    x, y, places, height, width, out_height, out_width, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A part of a row of y, of which each column has C neighbours."""
    line = tl.program_id(0)
    n, i = line // out_height, line % out_height
    to = (line.to(tl.int64) if WIDE else line) * (out_width * C)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live, c = at < out_width * C, at % C
    top, left = i * SH - PH, (at // C) * SW - PW
    # Where no number is larger, the first of the window that is in the image.
    place = tl.maximum(-top, 0) * KW + tl.maximum(-left, 0)
    for k in tl.static_range(KH * KW):
        row, column = top + k // KW, left + k % KW
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width) & live
        source = n * height + row
        source = (source.to(tl.int64) if WIDE else source) * (width * C)
        # Kept in its dtype: a cast would change a NaN.
        v = tl.load(x + source + column * C + c, mask=inside, other=float("-inf"))
        if k == 0:
            found = v
        else:
            wide = v.to(tl.float32)
            larger = (wide > found.to(tl.float32)) | (wide != wide)
            found = tl.where(larger, v, found)
            place = tl.where(larger, k, place)
    tl.store(y + to + at, found, mask=live)
    tl.store(places + to + at, place.to(tl.uint8), mask=live)


@triton.jit
def _max_pool_gradient_kernel(
    g, places, g_x, height, width, out_height, out_width, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A part of a row of g_x."""
    line = tl.program_id(0)
    n, row = line // height, line % height
    to = (line.to(tl.int64) if WIDE else line) * (width * C)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live, c, column = at < width * C, at % C, at // C
    last_i, last_j = (row + PH) // SH, (column + PW) // SW  # the last window in each direction
    total = tl.zeros((BLOCK,), tl.float32)
    for back_i in tl.static_range((KH + SH - 1) // SH):
        i = last_i - back_i
        down = row + PH - i * SH
        source = n * out_height + i
        source = (source.to(tl.int64) if WIDE else source) * (out_width * C)
        for back_j in tl.static_range((KW + SW - 1) // SW):
            j = last_j - back_j
            right = column + PW - j * SW
            inside = (i >= 0) & (i < out_height) & (down < KH) & (j >= 0) & (j < out_width) & (right < KW) & live
            place = tl.load(places + source + j * C + c, mask=inside, other=255).to(tl.int32)
            v = tl.load(g + source + j * C + c, mask=inside, other=0).to(tl.float32)
            total += tl.where(inside & (place == down * KW + right), v, 0.0)
    tl.store(g_x + to + at, total.to(g_x.dtype.element_ty), mask=live)


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


@functools.lru_cache(maxsize=1024)
def _plan(
    kernel: object, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], out: tuple[int, ...],
    window: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...],
) -> Plan:  # fmt: skip
    images, channels, *size = shape
    rows, columns = out if kernel is _max_pool_kernel else size
    constants = {
        "C": channels, "KH": window[0], "KW": window[1], "SH": stride[0], "SW": stride[1], "PH": padding[0],
        "PW": padding[1], "BLOCK": _BLOCK, "WIDE": is_wide(images * channels * max(math.prod(out), math.prod(size))),
    }  # fmt: skip
    return Plan(kernel, (images * rows, cdiv(columns * channels, _BLOCK)), constants, (*size, *out))
