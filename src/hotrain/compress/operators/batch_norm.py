"""Batch norm: y = γ x̂ + β with x̂ = (x − μ) r, r = 1/σ, per channel of x (N, C, ...).

    g_x = r γ (g − Σg/n − x̂ Σ(g x̂)/n),  g_γ = Σ g x̂,  g_β = Σ g

with sums over the n elements of a channel. Backward needs γ, r, and x̂, which is quantized along the channels; the next
layer's input is rematerialized from the same codes. Compiled, where the kernels run, it is an `image_norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...autograd import differentiated_once
from ...private import memory_format_of
from ...quantize.integer import wide
from .. import rematerialize
from ..codes import channels_last_shape, unpack
from ..launcher import is_eager, operator_for, supported, supported_in_eager
from ..sharing import Exact, Unfinished
from .base import Handlers, Scope, custom_op, direct, is_channels_last, is_large, wants_gradient, without_autocast
from .group_norm import Grads, along_channels
from .image_norm import MOST_CHANNELS, is_fused, unfinished
from .norm import KERNEL_FORMAT, pack_normalized, saved_format

_NO_KERNEL = (
    "compiled formulas are slower than exact, and its kernels take rows, and images in channels_last, of a multiple of "
    f"8 channels up to {MOST_CHANNELS}; plan='memory' compresses it"
)
_SLOW = (
    "its kernels take images in channels_last: model.to(memory_format=torch.channels_last), and the images, is faster "
    "for convolutions, too; plan='memory' compresses it as it is, more slowly"
)


# ---- reference ----


def _gradients(
    g: Tensor, kept: Sequence[Tensor], w: Tensor | None, r: Tensor, form: str, dtype: torch.dtype, needs_x: bool
) -> Grads:
    """Gradients of x, and of β and γ. Both means of g_x are g_β and g_γ over n, since γ is constant within a channel.

    Tensors stay in g's dtype and sums are in float32 at least: this halves what a compiler writes between the two.
    """
    shape, full = g.shape, torch.promote_types(g.dtype, torch.float32)
    leading, count = [0, *range(2, len(shape))], g.numel() // shape[1]
    normal = unpack(form, kept, channels_last_shape(shape), g.dtype).movedim(-1, 1)
    g_b, g_w = g.sum(leading, dtype=full), (g * normal).sum(leading, dtype=full)
    if not needs_x:
        return None, (g_b, g_w)
    mean, slope = (along_channels(t / count, len(shape)) for t in (g_b, g_w))
    factor = r if w is None else r * along_channels(w, len(shape))
    return ((g - mean - normal * slope) * factor).to(dtype), (g_b, g_w)


# ---- autograd functions ----


@differentiated_once("batch norm")
class BatchNorm(torch.autograd.Function):
    """Returns y, and codes and scales of x̂; ``statistics`` are the running mean and variance (C,), and momentum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, form: str, *statistics: Any
    ) -> tuple[Tensor, ...]:
        # Of an x in another layout PyTorch promises a tracer a result in that layout, and returns one that is not.
        dense = x if is_eager(x) else x.contiguous(memory_format=memory_format_of(x))
        running_mean, running_var, momentum = statistics
        y, mean, r = torch.native_batch_norm(dense, w, b, running_mean, running_var, True, momentum, eps)
        mean, r = along_channels(mean, x.dim()), along_channels(r, x.dim())

        def normalized() -> Tensor:
            return ((wide(x) - mean) * r).movedim(1, -1)

        codes, scale = pack_normalized(x.movedim(1, -1), mean, r, form, normalized)
        ctx.save_for_backward(w, r, codes, scale)
        ctx.form, ctx.dtype, ctx.b_dtype = form, x.dtype, None if b is None else b.dtype
        ctx.mark_non_differentiable(codes, scale)
        return y, codes, scale

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        w, r, *kept = ctx.saved_tensors
        needs = ctx.needs_input_grad
        in_eager = ctx.form == KERNEL_FORMAT and supported_in_eager(g_y)
        if needs[0] and in_eager and g_y.dim() == 4 and is_fused(g_y):
            no_marks = g_y.new_empty(0, dtype=torch.uint8)
            g_x, (g_b, g_w), _ = operator_for(g_y, "norm_gradient")(
                g_y, None, *kept, no_marks, r.reshape(-1), w, "", False
            )
            g_x = g_x.to(ctx.dtype)
        else:
            g_x, (g_b, g_w) = _gradients(g_y, kept, w, r, ctx.form, ctx.dtype, needs[0])
        grads = g_x, g_w.to(w.dtype) if needs[1] else None, g_b.to(ctx.b_dtype) if needs[2] else None
        return *grads, *[None] * 5


# ---- registration ----

batch_norm = custom_op(
    "batch_norm(Tensor x, Tensor? w, Tensor? b, float eps, str form, Tensor(a!)? running_mean, "
    "Tensor(b!)? running_var, float momentum) -> (Tensor, Tensor, Tensor)",
    without_autocast(BatchNorm.apply),
    direct(BatchNorm),
)


@without_autocast
def _batch_statistics(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Mean and 1/σ of each channel, (C,) in float32; the running statistics are updated in place."""
    with torch.no_grad():
        mean, var = torch.ops.hotrain.channel_statistics(x)
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            count = x.numel() // x.shape[1]
            running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
        return mean, torch.rsqrt(var + eps)


batch_statistics = custom_op(
    "batch_statistics(Tensor x, Tensor(a!)? running_mean, Tensor(b!)? running_var, float momentum, float eps) "
    "-> (Tensor, Tensor)",
    _batch_statistics,
)


def _batch_norm(
    scope: Scope, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor | None:  # fmt: skip
    if not (is_large(input) and wants_gradient(input, weight, bias)):
        return None
    if not training:
        scope.buffers.record_full(
            "batch_norm", "normalized with running statistics; only batch statistics are supported"
        )
        return None
    if input.dim() < 2 or input.numel() == input.shape[1]:  # one value per channel, which PyTorch refuses
        return None
    compiling = torch.compiler.is_dynamo_compiling()
    pace = None if compiling else scope.buffers.pace
    in_default_layout = input.dim() == 4 and not is_channels_last(input)
    if pace is not None and pace.keeps_exact and in_default_layout and supported_in_eager(input):
        scope.buffers.record_full("batch_norm", _SLOW)
        return None
    rows = compiling and input.dim() == 2 and input.is_contiguous()
    image = input.view(*input.shape, 1, 1) if rows else input
    fused = compiling and is_fused(image)
    if compiling and not fused and scope.buffers.must_not_lose and supported(input.device, input.dtype):
        scope.buffers.record_full("batch_norm", _NO_KERNEL)
        y = F.batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps)
        scope.origins.note_unfinished(y, Exact(input))
        return y
    form = saved_format()
    scope.record("batch_norm", form)
    if fused:
        mean, r = batch_statistics(image, running_mean, running_var, momentum, eps)
        return unfinished(scope, Unfinished(image, mean, r, weight, bias), input)
    y, *codes = batch_norm(input, weight, bias, eps, form, running_mean, running_var, momentum)
    recipe = rematerialize.normed(form, y.shape, image=input.dim() > 2)
    scope.origins.note(y, recipe, *codes, weight, bias)
    return y  # type: ignore[no-any-return]


HANDLERS: Handlers = {F.batch_norm: _batch_norm}
