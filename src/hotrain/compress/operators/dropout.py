"""Dropout, whose backward needs the mask alone: 1 bit per element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...saved import as_it_was, memory_order
from ..formats import BITS
from ..rematerialize import restore
from .base import Handlers, Scope, custom_op, is_large, written


class Dropout(torch.autograd.Function):
    """Dropout with probability p."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        y, mask = torch.native_dropout(x, p, True)
        ctx.order = memory_order(mask)
        ordered = mask.permute(ctx.order)
        ctx.save_for_backward(*BITS.keep(ordered))
        ctx.p, ctx.shape = p, ordered.shape
        return y

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        mask = as_it_was(restore(BITS, ctx.saved_tensors, ctx.shape), ctx.order)
        scale = 0.0 if ctx.p == 1 else 1 / (1 - ctx.p)
        return torch.where(mask, g_y * scale, 0.0), None


dropout = custom_op("kept_dropout(Tensor x, float p) -> Tensor", Dropout.apply)


def _dropout(
    scope: Scope, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    if p == 0 and isinstance(input, Tensor):
        return input  # as PyTorch does; the next layer must find its origin
    if not (training and 0 < p <= 1 and is_large(input) and input.requires_grad):
        return None
    scope.record("dropout", "1 bit per element")
    y = dropout(input, p)
    return written(input, y) if inplace else y  # type: ignore[no-any-return]


HANDLERS: Handlers = {F.dropout: _dropout}
