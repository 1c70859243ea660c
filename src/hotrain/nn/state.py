"""What a converted module carries besides its parameters: its method, its draws, and what became of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..autograd import Step
from ..draws import Draws
from ..method import Method
from ..transform.tokens import Grid

ATTRIBUTE = "_hotrain"

Forward = Callable[[Any, Tensor], Tensor]


def outside_trace(forward: Forward) -> Forward:
    """A layer's training forward, one graph break under `torch.compile`.

    Its draws are Python integers that change with every step, and its products are no operators of the compiler's.
    """
    untraced = torch._disable_dynamo(forward)  # imports the compiler when first called: only where it runs already

    @functools.wraps(forward)
    def call(module: Any, x: Tensor) -> Tensor:
        return untraced(module, x) if torch.compiler.is_compiling() else forward(module, x)

    return call


@dataclass
class LayerState:
    """One converted layer.

    name: in its model.  method: assignable; the next forward follows it.  grid: of its tokens.  chosen: asked for by
    a `filter_fn`, so rows that are samples are served as tokens too.  fallback: why the layer ran exact, if it did.
    calls: training forwards that followed the method.
    """

    name: str
    method: Method
    grid: Grid | None = None
    chosen: bool = False
    fallback: str | None = None
    calls: int = 0
    draws: Draws = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.draws is None:
            self.draws = Draws.of(self.name)

    @property
    def reached(self) -> bool:
        """Whether a training forward has come through the layer."""
        return self.draws.step >= 0

    def step(self, module: nn.Module, x: Tensor, samples_only: bool, transposed: bool = False) -> Step | None:
        """The step of this forward, or None where the exact path runs.

        samples_only: whether the rows of x are samples rather than tokens (a 2-D input, one token a sample, a 1×1
        image). A low-rank step would mix them, so the layer runs exact unless it was chosen by name.
        """
        if not module.training:
            return None
        key = self.draws.next()
        weight = module.weight
        assert isinstance(weight, Tensor)
        if not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad):
            return None
        if samples_only and self.method.grad_weight.is_low_rank and weight.requires_grad and not self.chosen:
            self.fallback = "2-D input (or one token a sample): its rows are samples, not tokens"
            return None
        self.fallback = None
        self.calls += 1
        return Step(self.method, key, self.grid, transposed, self.name)


def layer_state(module: nn.Module) -> LayerState | None:
    """The state of a converted module, None for another."""
    return module.__dict__.get(ATTRIBUTE)


def layer_states(model: nn.Module) -> Iterator[tuple[str, LayerState]]:
    """(fully qualified name, state) of every converted layer of a model, once each."""
    for name, module in model.named_modules():
        state = layer_state(module)
        if state is not None:
            yield name, state
