"""Dropout, whose backward needs the mask alone: 1 bit per element.

Compiled, the mask's bits are drawn by a kernel of their own, which forward reads as backward does, and the kernel of a
norm too; PyTorch's generator gives its key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...autograd import skips_undefined
from ...draws import DeviceKey, hash_bits
from ...private import fakes
from ...saved import as_it_was, memory_order
from ..formats import BITS
from ..launcher import is_eager, launch, opaque, supported_in_eager
from ..rematerialize import restore
from .base import Handlers, Scope, custom_op, direct, is_large, written

_STREAM = 0


@opaque(
    "drawn_mask(Tensor key, SymInt run, float p) -> Tensor", lambda key, run, p: key.new_empty(run, dtype=torch.uint8)
)
def _drawn_mask(key: Tensor, run: int, p: float) -> Tensor:
    """Bits of 8 ``run`` draws as `saved.Bits` packs them, each 0 with probability p; key: int64, ()."""
    limit = min(round(p * 2**32), 2**32 - 1)

    def reference() -> Tensor:
        unsigned = hash_bits(8 * run, DeviceKey(key), _STREAM, key.device).long() & 0xFFFFFFFF
        return BITS.keep(unsigned >= limit)[0]

    return launch(key.device, "dropout.mask", reference, key, run, _STREAM, limit)  # type: ignore[no-any-return]


@skips_undefined
class Dropout(torch.autograd.Function):
    """Dropout with probability p, 0 < p < 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.factor, ctx.order = 1 / (1 - p), memory_order(x)
        ctx.shape = x.permute(ctx.order).shape
        if is_eager(x):
            y, mask = _drawn(x, p)
            ctx.save_for_backward(_packed(mask.permute(ctx.order), x))
            return y
        key = torch.randint(1 << 62, (), device=x.device)
        bits = torch.ops.hotrain.drawn_mask(key, (x.numel() + 7) // 8, p)
        ctx.save_for_backward(bits)
        return _masked(x, BITS.restore((bits,), ctx.shape), ctx)

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        (bits,), g = ctx.saved_tensors, g_y.permute(ctx.order)

        def reference() -> Tensor:
            return _masked(g_y, restore(BITS, (bits,), ctx.shape), ctx).permute(ctx.order)

        if torch.is_grad_enabled() or not _is_packed_by_kernel(g, g_y):  # the kernel is not differentiable
            return as_it_was(reference(), ctx.order), None
        g_x = launch(g.device, "activation.bits_gradient", reference, g, bits, ctx.factor)
        return as_it_was(g_x, ctx.order), None


def _drawn(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """PyTorch's y and its mask. On a CPU PyTorch divides the mask by 1 − p, which rounds otherwise than a product."""
    if x.device.type != "cpu":
        return torch.native_dropout(x, p, True)
    mask = torch.empty_like(x).bernoulli_(1 - p)
    return x * (mask / (1 - p)), mask != 0


def _masked(t: Tensor, mask: Tensor, ctx: Any) -> Tensor:
    """t / (1 − p) where the mask is set, 0 elsewhere."""
    return torch.where(as_it_was(mask, ctx.order), t * ctx.factor, 0.0)


def _is_packed_by_kernel(t: Tensor, x: Tensor) -> bool:
    """Whether kernels run on t, in its memory layout, and on x, in which the mask is."""
    return supported_in_eager(x) and t.numel() % 8 == 0 and t.is_contiguous()


def _packed(mask: Tensor, x: Tensor) -> Tensor:
    """The bits of x's mask, in its memory layout."""
    if not _is_packed_by_kernel(mask, x):
        return BITS.keep(mask)[0]
    return launch(x.device, "activation.flags", lambda: BITS.keep(mask)[0], mask)  # type: ignore[no-any-return]


dropout = custom_op("kept_dropout(Tensor x, float p) -> Tensor", Dropout.apply, direct(Dropout))


def _dropout(
    scope: Scope, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    if p == 0 and isinstance(input, Tensor):
        return input  # as PyTorch does; the next layer must find its origin
    # Where p is 1, PyTorch draws and keeps nothing.
    if not (training and 0 < p < 1 and is_large(input) and input.requires_grad):
        return None
    if not (is_eager(input) or torch.compiler.is_compiling() or fakes.include(input)):
        scope.buffers.record_full("dropout", f"of {type(input).__name__}, whose mask is PyTorch's own")
        return None
    scope.record("dropout", "1 bit per element")
    y = dropout(input, p)
    return written(input, y) if inplace else y  # type: ignore[no-any-return]


HANDLERS: Handlers = {F.dropout: _dropout}
