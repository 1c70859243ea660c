"""RMS norms that a model composes by hand (transformers' Llama, Qwen, T5 and others): one operator instead of four.

Recognised by what they are, not by name alone: a module with a weight along the last axis and an epsilon whose output
is, to the bit, that of the formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import autograd
from .format_policy import FORMATS, SMALL
from .mode import ATTRIBUTE, Buffers


class ComposedRMSNorm:
    """Mixed into the class of such a module: training forwards keep codes of what is normalised."""

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
    """What the module adds to the mean of squares, NaN where it does not say."""
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", float("nan"))))


def is_composed(module: nn.Module) -> bool:
    """Whether the module is a composed RMS norm; found by a forward of a few random numbers."""
    weight = module._parameters.get("weight")
    if "rmsnorm" not in type(module).__name__.lower() or isinstance(module, nn.RMSNorm) or weight is None:
        return False
    if weight.dim() != 1 or weight.device.type == "meta" or "forward" in module.__dict__:
        return False
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(3, weight.shape[0], generator=generator).to(weight)
        try:
            got = module(x)
        except Exception:  # a norm that asks for something else
            return False
        normal = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon(module))
        return isinstance(got, Tensor) and torch.equal(got, weight * normal.to(x.dtype))
