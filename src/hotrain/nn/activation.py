"""`torch.nn.ReLU` that saves 1 bit per element, which is all that its exact gradient needs.

ReLU's output is the next layer's input, and PyTorch saves it for both. When that layer saves codes instead, the
output saved for ReLU would stay in memory and nothing would be gained: so the two are converted together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..compress.eager import sees_functions
from ..compress.operators.activation import by_slope
from ..private import differentiates

PLANNED = "_hotrain_planned"  # of a module: a plan for speed is in force


class BitReLU(nn.ReLU):
    """A ReLU whose training forward saves 1 bit per element; its gradient is PyTorch's. Made by `hotrain.convert`.

    For images on a GPU under a plan for speed it is PyTorch's ReLU: their convolutions stay exact there and save its
    output anyway, so the bits would come on top.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and differentiates() and input.requires_grad):
            return super().forward(input)
        if PLANNED in self.__dict__ and input.dim() == 4 and _plans(input.device):
            return super().forward(input)
        if not torch.compiler.is_compiling() and sees_functions(type(input)):
            return super().forward(input)
        return by_slope(input, "relu", self.inplace)


def _plans(device: torch.device) -> bool:
    """Whether layers may stay exact there for speed (`hotrain.planning`)."""
    return device.type == "cuda"
