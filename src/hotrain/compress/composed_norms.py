"""RMS norms written out by hand (transformers' Llama, Qwen, T5 and others), replaced by one operator.

A module is recognized by its class name and its result: it has a weight along the last axis and an epsilon, and its
output is bitwise that of the formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import autograd
from .formats import FORMATS, SMALL
from .mode import ATTRIBUTE, Buffers


class ComposedRMSNorm:
    """Mixin for such a module: forward in training saves the normalized input quantized."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(self, ComposedRMSNorm):
            return type(self).forward(self, hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        x, w = hidden_states, self.weight  # type: ignore[attr-defined]
        buffers: Buffers | None = self.__dict__.get(ATTRIBUTE)
        wanted = buffers is not None and autograd.differentiates() and (x.requires_grad or w.requires_grad)
        if args or kwargs or not (self.training and wanted) or x.numel() < SMALL:  # type: ignore[attr-defined]
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc,no-any-return]
        assert buffers is not None
        buffers.serve("composed RMS norms", FORMATS["norm"])
        return torch.ops.hotrain.norm(x, w, None, "rms_cast", 1, epsilon(self), FORMATS["norm"])[0]  # type: ignore[no-any-return]


def epsilon(module: Any) -> float:
    """The number that the module adds to the mean of squares; NaN if it has no attribute for it."""
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", float("nan"))))


def is_composed(module: nn.Module) -> bool:
    """Whether the module is an RMS norm written out by hand, tested by a forward of a few random numbers."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if "rmsnorm" not in type(module).__name__.lower() or isinstance(module, nn.RMSNorm) or weight is None:
        return False
    if weight.dim() != 1 or weight.device.type == "meta" or "forward" in module.__dict__:
        return False
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(3, weight.shape[0], generator=generator).to(weight)
        try:
            got = module(x)
        except Exception:  # it takes other arguments
            return False
        normal = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon(module))
        return isinstance(got, Tensor) and torch.equal(got, weight * normal.to(x.dtype))
