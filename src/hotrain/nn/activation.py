"""`torch.nn.ReLU` that saves 1 bit per element, which is all that its exact gradient needs.

ReLU's output is the next layer's input, and PyTorch saves it for both. When that layer saves codes instead, the
output saved for ReLU would stay in memory and nothing would be gained: so the two are converted together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..saved import Bits, as_it_was, memory_order


class Relu(torch.autograd.Function):
    """max(x, 0); saved: whether each element passes the gradient on (a NaN does, as in PyTorch)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
        y = x.relu_() if inplace else x.relu()
        ctx.order = memory_order(y)
        dense = y.permute(ctx.order)
        ctx.shape = dense.shape
        ctx.save_for_backward(*Bits().keep(dense.le(0).logical_not_()))
        return y

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor, None]:
        # Not a product: where x ≤ 0 an infinite gradient must become 0, as in PyTorch, not 0 · inf.
        passed = as_it_was(Bits().restore(ctx.saved_tensors, ctx.shape), ctx.order)
        # `masked_fill` would change the memory layout of the gradient, which slows the next convolution.
        return torch.where(passed, g_y, torch.zeros((), dtype=g_y.dtype, device=g_y.device)), None


PLANNED = "_hotrain_planned"  # of a module: a plan for speed is in force


class BitReLU(nn.ReLU):
    """A ReLU whose training forward saves 1 bit per element; its gradient is PyTorch's. Made by `hotrain.convert`.

    For images on a GPU under a plan for speed it is PyTorch's ReLU: their convolutions stay exact there and save its
    output anyway, so the bits would come on top.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled() and input.requires_grad):
            return super().forward(input)
        if PLANNED in self.__dict__ and input.dim() == 4 and _plans(input.device):
            return super().forward(input)
        if torch.compiler.is_dynamo_compiling():
            y = torch.ops.hotrain.relu(input)
            if self.inplace:
                input.copy_(y)
            return y  # and not the copy, through which a gradient would pass as a sum with zeros
        return Relu.apply(input, self.inplace)


def _plans(device: torch.device) -> bool:
    """Whether layers may stay exact there for speed (`hotrain.planning`)."""
    return device.type == "cuda"


# One node for Dynamo; AOTAutograd differentiates `Relu`, and Inductor fuses its operations, the bits included.
_lib = torch.library.Library("hotrain", "FRAGMENT")
_lib.define("relu(Tensor x) -> Tensor")
_lib.impl("relu", lambda x: Relu.apply(x, False), "CompositeImplicitAutograd")
