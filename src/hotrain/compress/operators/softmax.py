"""Softmax: g_x = y (g_y − Σ g_y y). Backward needs y, which is quantized along the axis of the sum."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...autograd import differentiated_once
from ...quantize.integer import wide
from .. import rematerialize
from ..codes import unpack
from ..formats import FORMATS, GROUPED
from ..rematerialize import in_place_of, keep, source
from .base import Handlers, Scope, custom_op, direct, float32, is_large, uncompressed, without_autocast


@differentiated_once("softmax")
class Softmax(torch.autograd.Function):
    """Returns y, and its codes and scales."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, form: str) -> tuple[Tensor, ...]:
        y = torch.softmax(x, dim)
        marked, ctx.source = source(y) if y.dtype == torch.float32 else (y, None)
        ordered = marked.movedim(dim, -1)
        codes, scale = keep(GROUPED[form], ordered)
        ctx.save_for_backward(codes, scale)
        ctx.dim, ctx.form, ctx.shape = dim, form, ordered.shape
        ctx.mark_non_differentiable(codes, scale)
        return y, codes, scale

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        g = wide(g_y)
        y = unpack(ctx.form, ctx.saved_tensors, ctx.shape, g.dtype)
        if ctx.source is not None:
            y = y.contiguous()  # of rows that were padded it is a slice, which could not be marked
        y = in_place_of(ctx.source, y.movedim(-1, ctx.dim))
        g_x = (y * (g - (g * y).sum(ctx.dim, keepdim=True))).to(g_y.dtype)
        return g_x, None, None


softmax = custom_op(
    "kept_softmax(Tensor x, int dim, str form) -> (Tensor, Tensor, Tensor)",
    without_autocast(Softmax.apply, partial(float32, "softmax.int")),
    direct(Softmax),
)


def _softmax(
    scope: Scope, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Tensor | None:
    if not (is_large(input) and input.requires_grad) or dim is None:
        return None
    form = FORMATS["softmax"]
    scope.record("softmax", form)
    y, *codes = softmax(input if dtype is None else input.to(dtype), dim, form)
    if dim in (-1, input.dim() - 1):
        scope.origins.note(y, rematerialize.values(form, y.shape), *codes)
    return y


def _tensor_softmax(scope: Scope, input: Tensor, dim: int, dtype: Any = None) -> Tensor | None:
    return _softmax(scope, input, dim, dtype=dtype)


HANDLERS: Handlers = {
    F.softmax: _softmax,
    torch.softmax: _tensor_softmax,
    Tensor.softmax: _tensor_softmax,
    **dict.fromkeys(
        (F.log_softmax, torch.log_softmax, Tensor.log_softmax),
        uncompressed("log_softmax", "it saves its result; no compressed operator for it"),
    ),
}
