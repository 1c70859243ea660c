"""Gradient filters for the optimizer step: Grokfast, a low-pass over *time* (ours is over tokens).

Grokfast (Lee et al. 2024) adds to every gradient a multiple of its running mean, which amplifies the slow part:

    mu <- alpha mu + (1 - alpha) g        g <- g + lamb mu

It is the motivation EVMT-HLA names for filtering gradients at all; it composes with every method of this library,
because it only touches ``.grad`` between the backward pass and the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class GrokfastEMA:
    """Exponential-mean gradient filter: call `step` after backward (and unscale), before ``optimizer.step()``.

    Args:
        parameters: ``(name, parameter)`` pairs, as of ``model.named_parameters()``; frozen ones are left out.
        alpha: weight of the past in the running mean, in [0, 1). The paper's default is 0.98.
        lamb: multiple of the running mean that is added, at least 0. The paper's default is 2.0.

    Raises:
        ValueError: ``alpha`` or ``lamb`` out of range.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], alpha: float = 0.98, lamb: float = 2.0) -> None:
        if not 0.0 <= alpha < 1.0:
            raise ValueError(f"alpha: got {alpha}, accepted are numbers in [0, 1)")
        if lamb < 0.0:
            raise ValueError(f"lamb: got {lamb}, accepted are numbers of at least 0")
        self.alpha, self.lamb = alpha, lamb
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.means: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Filter every ``.grad`` in place. A parameter's first gradient is its first mean, as in the paper's code."""
        for name, p in self.parameters.items():
            if p.grad is None:
                continue
            mean = self.means.get(name)
            if mean is None:
                mean = self.means[name] = p.grad.detach().clone()
            else:
                mean.lerp_(p.grad, 1.0 - self.alpha)
            p.grad.add_(mean, alpha=self.lamb)

    def state_dict(self) -> dict[str, Any]:
        """The running means by parameter name; load with `load_state_dict`."""
        return {"means": dict(self.means)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the running means of `state_dict`.

        Raises:
            ValueError: a mean of a parameter that this filter does not have.
        """
        unknown = sorted(set(state["means"]) - set(self.parameters))
        if unknown:
            raise ValueError(f"gradient filter: no parameter {unknown[0]!r} here; the state is of another model")
        self.means = {name: mean.to(self.parameters[name], copy=True) for name, mean in state["means"].items()}
