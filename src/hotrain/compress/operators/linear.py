"""Linear and Conv2d that stay exact: their products are exact, the saved x is quantized, w is saved as it is.

    y = x wᵀ + b:  g_x = g w,  g_w = gᵀ x,  g_b = Σ g

Groups are along x's channels. The forms and the tensors given for them are those of `factor`. Converted layers, which
are hotrain's own operators, share the codes of the operator before in the same way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...autograd import differentiated_once, not_a_view
from ...casting import autocast_dtype
from ...geometry import (
    FEW,
    LAID_OUT,
    is_multiplied,
    keeps_channels_last,
    laid_as,
    laid_out,
    product_of_patches,
    rows_of_patches,
)
from ...private import memory_format_of
from .. import rematerialize
from ..eager import PLAIN
from ..formats import FORMATS
from ..launcher import is_eager
from ..rematerialize import in_place_of
from .base import (
    Handlers,
    Scope,
    custom_op,
    direct,
    is_channels_last,
    is_large,
    lower,
    numbers,
    pair,
    wants_gradient,
    without_autocast,
)
from .factor import Given, input_of, keep_input, listed, materialize, own, shared


@differentiated_once("linear")
class Linear(torch.autograd.Function):
    """Returns y, and codes and scales packed here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, form: str, given: Given) -> tuple[Tensor, ...]:
        x, kept = keep_input(ctx, x, form, given)
        ctx.save_for_backward(w if ctx.needs_input_grad[0] else None, *kept)
        return not_a_view(F.linear(x, w, b)), *own(ctx, (kept, ctx.form))

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        w, *kept = ctx.saved_tensors
        needs_x, needs_w, needs_b, _, _ = ctx.needs_input_grad
        g = g_y.reshape(-1, g_y.shape[-1])
        g_x = (g @ w).view(*ctx.shape) if needs_x else None
        g_w = g.T @ input_of(ctx, kept) if needs_w else None
        g_b = g.sum(0) if needs_b else None
        return g_x, g_w, g_b, None, None


@differentiated_once("conv2d")
class Conv2d(torch.autograd.Function):
    """Returns y, and codes and scales packed here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
        stride, padding, dilation, groups, form, given = args
        strides = w.stride()
        if not is_eager(x) and memory_format_of(x) == torch.channels_last:
            # Some channels of an image: PyTorch's convolution would copy them, and w, in forward and again in backward.
            x, w = x.contiguous(memory_format=torch.channels_last), laid_out(w)
        x, kept = keep_input(ctx, x, form, given, image=True)
        ctx.save_for_backward(w if ctx.needs_input_grad[0] else None, *kept)
        ctx.of_w, ctx.lays_out = (w.shape, w.dtype), w.stride() != strides
        ctx.channels_last = is_channels_last(x)
        ctx.geometry = list(stride), list(padding), list(dilation), groups
        y = torch.ops.aten.convolution.default(x, w, b, stride, padding, dilation, False, [0, 0], groups)
        return y, *own(ctx, (kept, ctx.form))

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        w, *kept = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        if ctx.needs_input_grad[1]:
            x = materialize(tuple(kept), ctx.form, ctx.shape, ctx.dtype, image=True)
            x = x.contiguous(memory_format=torch.channels_last if ctx.channels_last else torch.contiguous_format)
            x = in_place_of(ctx.source, x)
        else:
            x = g_y.new_empty(1).expand(ctx.shape)  # only its shape is read
        shape, dtype = ctx.of_w
        given = g_y.new_empty(1, dtype=dtype).expand(shape) if w is None else w
        g_x, g_w, g_b = torch.ops.aten.convolution_backward.default(
            g_y, x, given, [shape[0]], stride, padding, dilation, False, [0, 0], groups, list(ctx.needs_input_grad[:3])
        )
        if g_w is not None and ctx.lays_out:
            g_w = g_w.contiguous()  # the parameter's own layout
        return g_x, g_w, g_b, *[None] * 6


@differentiated_once("conv2d")
class Patches(torch.autograd.Function):
    """`product_of_patches`, of an image without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        rows = rows_of_patches(x, w.shape[2:])
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None)
        ctx.of_w = w.shape, w.stride()
        return not_a_view(product_of_patches(rows, w, b, keeps_channels_last(x, w)))

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), (shape, strides) = ctx.saved_tensors, ctx.of_w
        _, needs_w, needs_b = ctx.needs_input_grad
        g = g_y.movedim(1, -1).reshape(-1, shape[0])
        g_w = laid_as((g.T @ rows.flatten(0, -2)).view(shape), strides) if needs_w else None
        return None, g_w, g.sum(0) if needs_b else None


def _cut_or_convolved(x: Tensor, w: Tensor, b: Tensor | None, stride: list[int]) -> Tensor:
    if is_multiplied(x, w, b) and not x.requires_grad:
        return Patches.apply(x, w, b)  # type: ignore[no-any-return]
    return (F.conv2d if len(stride) == 2 else F.conv3d)(x, w, b, stride)


linear = custom_op(
    "kept_linear(Tensor x, Tensor w, Tensor? b, str form, Tensor?[] given) -> (Tensor, Tensor[])",
    without_autocast(listed(Linear.apply), lower),
    listed(direct(Linear)),
)
conv2d = custom_op(
    "kept_conv2d(Tensor x, Tensor w, Tensor? b, int[] stride, int[] padding, int[] dilation, int groups, str form, "
    "Tensor?[] given) -> (Tensor, Tensor[])",
    without_autocast(listed(Conv2d.apply), lower),
    listed(direct(Conv2d)),
)


patches = custom_op(
    "patches(Tensor x, Tensor w, Tensor? b, int[] stride) -> Tensor", without_autocast(_cut_or_convolved, lower)
)


def replace_linear(scope: Scope, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """The handler of `linear`."""
    if not (is_large(input) and input.dim() > 2 and weight.dim() == 2 and weight.requires_grad):
        return None
    if type(weight) not in PLAIN:  # a quantized weight's own products, and their gradients
        return None
    scope.record("linear (exact product)", FORMATS["linear"])
    form, given = shared(scope, input, FORMATS["linear"])
    y, made = linear(input, weight, bias, form, given)
    if made:
        scope.origins.note(input, rematerialize.values(form, input.shape), *made)
    return y  # type: ignore[no-any-return]


def _conv2d(
    scope: Scope, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor | None:  # fmt: skip
    if not (is_large(input) and input.dim() == 4 and wants_gradient(input, weight) and type(weight) in PLAIN):
        return None
    if input.shape[1] < FEW and weight.requires_grad:
        return _patches(input, weight, bias, stride, padding, dilation, groups)
    if isinstance(padding, str):
        scope.buffers.record_full("conv2d", f"padding={padding!r}; only numbers are supported")
        return None
    scope.record("conv2d (exact product)", FORMATS["conv"])
    form, given = shared(scope, input, FORMATS["conv"])
    y, made = conv2d(input, weight, bias, pair(stride), pair(padding), pair(dilation), groups, form, given)
    if made:
        scope.origins.note(input, rematerialize.values(form, input.shape, image=True), *made)
    return y  # type: ignore[no-any-return]


def _conv3d(
    scope: Scope, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor | None:  # fmt: skip
    plain = is_large(input) and input.dim() == 5 and type(weight) in PLAIN and weight.requires_grad
    return _patches(input, weight, bias, stride, padding, dilation, groups) if plain else None


def _patches(
    x: Tensor, w: Tensor, b: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor | None:
    """A convolution of an image or a video of few channels, in compiled code, as a product of its patches; None for
    another."""
    kernel = list(w.shape[2:])
    axes = len(kernel)
    strides, apart = (numbers(value, axes) for value in (stride, dilation))
    cuts = strides == kernel and max(kernel) > 1 and max(apart) == 1 and groups == 1
    padded = padding != "valid" if isinstance(padding, str) else any(numbers(padding, axes))
    if not cuts or padded or is_eager(x) or x.device.type not in LAID_OUT or autocast_dtype(x).itemsize != 2:
        return None
    return patches(x, w, b, kernel)  # type: ignore[no-any-return]


HANDLERS: Handlers = {F.linear: replace_linear, F.conv2d: _conv2d, F.conv3d: _conv3d}
