"""Bilinear interpolation of (N, C, H, W) in compiled graphs: PyTorch's kernel, and backward as two matrix products.

    Y = A_h X A_wᵀ per channel:  g_X = A_hᵀ G A_w

A_h (H', H) and A_w (W', W) have two weights in a row. Inductor computes backward by atomic additions of every element
of G to four of g_X, which takes longer than all else in the head of a segmentation network, and it writes two tensors
of Y's size in float32 in forward. PyTorch's kernel has a thread for each pixel where memory is contiguous; for few of
them forward stays the compiler's. Nothing is saved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...autograd import differentiated_once
from ...casting import outside_autocast
from ..launcher import opaque
from .base import Handlers, Scope, custom_op, is_channels_last, is_large, pair, uncompressed, wants_gradient


def _weights(before: int, after: int, scale: float | None, corners: bool | None, like: Tensor) -> Tensor:
    """Aᵀ of one axis, (before, after): what PyTorch's interpolation makes of the unit vectors."""
    units = torch.eye(before, device=like.device)[None]
    if scale is None:
        found = F.interpolate(units, size=after, mode="linear", align_corners=corners)
    else:
        found = F.interpolate(units, scale_factor=scale, mode="linear", align_corners=corners)
    return found[0].to(like.dtype)


def plain(x: Tensor, size: Sequence[int], scales: Sequence[float], corners: bool | None) -> Tensor:
    """Y, by PyTorch's function; arguments as of `Interpolated`."""
    if size:
        return F.interpolate(x, list(size), mode="bilinear", align_corners=corners)
    return F.interpolate(x, scale_factor=list(scales), mode="bilinear", align_corners=corners)  # type: ignore[arg-type]


def gradient(g_y: Tensor, height: int, width: int, scales: Sequence[float], corners: bool | None) -> Tensor:
    """g_X of (N, C, height, width), in g_y's memory layout."""
    along = scales or (None, None)
    along_h = _weights(height, g_y.shape[2], along[0], corners, g_y)
    along_w = _weights(width, g_y.shape[3], along[1], corners, g_y)
    if not is_channels_last(g_y):
        return along_h @ (g_y @ along_w.mT)
    images, channels = g_y.shape[:2]
    rows = along_w @ g_y.permute(0, 2, 3, 1)  # (N, H', W, C)
    g = along_h @ rows.reshape(images, g_y.shape[2], -1)
    return g.view(images, height, width, channels).permute(0, 3, 1, 2)


def _bilinear(x: Tensor, size: list[int], scales: list[float], corners: bool | None) -> Tensor:
    """Y, in x's memory layout."""
    order = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    return plain(x.contiguous(memory_format=order), size, scales, corners).contiguous(memory_format=order)


opaque("bilinear(Tensor x, int[] size, float[] scales, bool? corners) -> Tensor", _bilinear)(_bilinear)
_SMALLEST = 1 << 14  # pixels of Y, a thread each, where memory is contiguous: PyTorch's kernel leaves a GPU idle below
_LARGEST = 1 << 28  # elements of Y whose gradient is written to memory, which a compiler may fuse with a loss


@differentiated_once("interpolate")
class Interpolated(torch.autograd.Function):
    """``size`` is H' and W', or ``scales`` the two factors; the other is empty."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: list[int], scales: list[float], corners: bool | None) -> Tensor:
        ctx.shape, ctx.scales, ctx.corners = x.shape, scales, corners
        ctx.channels_last = is_channels_last(x)
        pixels = math.prod(size) if size else math.prod(scales) * math.prod(x.shape[2:])
        forward = torch.ops.hotrain.bilinear if ctx.channels_last or pixels >= _SMALLEST else plain
        return forward(x, size, scales, corners)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        order = torch.channels_last if ctx.channels_last else torch.contiguous_format
        height, width = ctx.shape[2:]
        with outside_autocast(g_y):
            g_x = gradient(g_y.contiguous(memory_format=order), height, width, ctx.scales, ctx.corners)
        return g_x, None, None, None


def _interpolated(x: Tensor, size: list[int], scales: list[float], corners: bool | None) -> Tensor:
    factor = math.prod(scales) if scales else math.prod(size) / math.prod(x.shape[2:])
    apply = Interpolated.apply if x.numel() * factor <= _LARGEST else plain
    return apply(x, size, scales, corners)  # type: ignore[no-any-return]


interpolate = custom_op("interpolate(Tensor x, int[] size, float[] scales, bool? corners) -> Tensor", _interpolated)
_area = uncompressed("interpolate", 'mode="area" saves its input; other modes save nothing')


def _interpolate(
    scope: Scope, input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    align_corners: bool | None = None, recompute_scale_factor: bool | None = None, antialias: bool = False,
) -> Tensor | None:  # fmt: skip
    if mode == "area":
        _area(scope, input)
    plainly = (
        mode == "bilinear" and not antialias and not recompute_scale_factor and (size is None) != (scale_factor is None)
    )
    if not (plainly and torch.compiler.is_compiling() and input.dim() == 4 and wants_gradient(input)):
        return None
    sizes = [] if size is None else pair(size)
    scales = [] if scale_factor is None else [float(factor) for factor in pair(scale_factor)]
    if not is_large(input) or not all(isinstance(n, int) for n in sizes):
        return None
    return interpolate(input, sizes, scales, align_corners)  # type: ignore[no-any-return]


HANDLERS: Handlers = {F.interpolate: _interpolate}
