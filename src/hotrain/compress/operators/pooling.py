"""Max and average pooling of (N, C, H, W).

Backward of max pooling needs the position of each maximum within its window: 1 byte per output, not an 8-byte index.
Average pooling needs the shape and memory layout of x alone, and saves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...autograd import skips_undefined
from ..launcher import launch, supported_in_eager
from .base import Handlers, Scope, custom_op, is_channels_last, is_large, pair

_aten = torch.ops.aten
_LARGEST_WINDOW = 49  # that a kernel reads at once


def _layout(x: Tensor) -> torch.memory_format:
    return torch.channels_last if is_channels_last(x) else torch.contiguous_format


def _stand_in(ctx: Any, g_y: Tensor) -> Tensor:
    """A tensor like the input, of which backward reads the shape and memory layout alone."""
    return torch.empty(ctx.shape, dtype=ctx.dtype, device=g_y.device, memory_format=ctx.layout)


def _corners(y: Tensor, stride: Sequence[int], padding: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The first row (H', 1) and column (W',) of every window, negative in the padding."""
    rows = torch.arange(y.shape[-2], device=y.device) * stride[0] - padding[0]
    columns = torch.arange(y.shape[-1], device=y.device) * stride[1] - padding[1]
    return rows[:, None], columns


def _has_kernel(ctx: Any, t: Tensor) -> bool:
    """Whether the kernels of eager mode run on t: for images in channels-last, and windows that they read at once."""
    height, width = ctx.args[0]
    return ctx.layout == torch.channels_last and height * width <= _LARGEST_WINDOW and supported_in_eager(t)


def _is_valid(x: Tensor, *args: Sequence[int]) -> bool:
    """Whether PyTorch accepts kernel, stride and padding; its own function raises where it does not."""
    sizes = zip(x.shape[2:], *args, strict=True)
    return all(s > 0 and 0 <= 2 * p <= k <= size + 2 * p and k > 0 for size, k, s, p in sizes)


@skips_undefined
class MaxPool2d(torch.autograd.Function):
    """Max pooling, with windows of at most 256 elements."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil: bool
    ) -> Tensor:
        ctx.args = list(kernel), list(stride), list(padding), ceil
        ctx.shape, ctx.dtype, ctx.layout = x.shape, x.dtype, _layout(x)

        def reference() -> tuple[Tensor, Tensor]:
            y, index = _aten.max_pool2d_with_indices.default(x, kernel, stride, padding, [1, 1], ceil)
            top, left = _corners(y, stride, padding)
            places = (index // x.shape[-1] - top) * kernel[1] + (index % x.shape[-1] - left)
            return y, places.to(torch.uint8)

        if _has_kernel(ctx, x) and _is_valid(x, kernel, stride, padding):
            dense = x.contiguous(memory_format=ctx.layout)
            y, places = launch(x.device, "pooling.max_pool", reference, dense, *ctx.args)
        else:
            y, places = reference()
        ctx.save_for_backward(places)
        return y

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        kernel, stride, padding, ceil = ctx.args

        def reference() -> Tensor:
            top, left = _corners(places, stride, padding)
            wide = places.to(torch.int64)
            index = (wide // kernel[1] + top) * ctx.shape[-1] + wide % kernel[1] + left
            index = index.contiguous(memory_format=ctx.layout)
            like = _stand_in(ctx, g_y)
            args = (g_y, like, kernel, stride, padding, [1, 1], ceil, index)
            return _aten.max_pool2d_with_indices_backward.default(*args)  # type: ignore[no-any-return]

        differentiable = torch.is_grad_enabled()  # the kernel is not
        if differentiable or not _has_kernel(ctx, g_y):
            return reference(), *[None] * 4
        args = g_y.contiguous(memory_format=ctx.layout), places, ctx.shape, kernel, stride, padding
        return launch(g_y.device, "pooling.max_pool_gradient", reference, *args), *[None] * 4


@skips_undefined
class AvgPool2d(torch.autograd.Function):
    """Average pooling; ``args`` are those of PyTorch's operator, without defaults."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
        ctx.args = [list(arg) if isinstance(arg, Sequence) else arg for arg in args]
        ctx.shape, ctx.dtype, ctx.layout = x.shape, x.dtype, _layout(x)
        return _aten.avg_pool2d.default(x, *ctx.args)

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        return _aten.avg_pool2d_backward.default(g_y, _stand_in(ctx, g_y), *ctx.args), *[None] * 6


max_pool2d = custom_op(
    "kept_max_pool2d(Tensor x, int[] kernel, int[] stride, int[] padding, bool ceil) -> Tensor", MaxPool2d.apply
)
avg_pool2d = custom_op(
    "kept_avg_pool2d(Tensor x, int[] kernel, int[] stride, int[] padding, bool ceil, bool counts_padding, "
    "int? divisor) -> Tensor",
    AvgPool2d.apply,
)


def _stride(stride: Any, kernel: list[int]) -> list[int]:
    return kernel if stride is None or stride in ([], ()) else pair(stride)


def _max_pool2d(
    scope: Scope, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Tensor | None:  # fmt: skip
    if not (is_large(input) and input.dim() == 4 and input.requires_grad) or return_indices:
        return None
    kernel = pair(kernel_size)
    if pair(dilation) != [1, 1] or kernel[0] * kernel[1] > 256:
        scope.buffers.record_full("max_pool2d", "dilated, or a window of more than 256 elements")
        return None
    scope.record("max_pool2d", "1 byte per output")
    return max_pool2d(input, kernel, _stride(stride, kernel), pair(padding), ceil_mode)  # type: ignore[no-any-return]


def _avg_pool2d(
    scope: Scope, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor | None:  # fmt: skip
    if not (is_large(input) and input.dim() == 4 and input.requires_grad):
        return None
    scope.record("avg_pool2d", "nothing saved")
    kernel = pair(kernel_size)
    return avg_pool2d(  # type: ignore[no-any-return]
        input, kernel, _stride(stride, kernel), pair(padding), ceil_mode, count_include_pad, divisor_override
    )


HANDLERS: Handlers = {F.max_pool2d: _max_pool2d, torch.max_pool2d: _max_pool2d, F.avg_pool2d: _avg_pool2d}
