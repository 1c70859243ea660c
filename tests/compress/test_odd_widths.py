"""Rows that groups of codes do not divide, compiled by Inductor for a CPU: gradients are those of eager mode.

Its loop over a row of 201 elements, split into groups of 64, ended at 192 (PyTorch 2.13, `try_loop_split`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "input of GELU": F.gelu,
    "input of tanh": torch.tanh,
    "catch-all": F.softplus,
    "square": torch.square,
    "product": lambda t: t * t.sigmoid() * 2,
    "a norm before": lambda t: F.gelu(F.layer_norm(t, t.shape[-1:])),
}


class Net(nn.Module):
    """A branch for each function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(32, width) for _ in FUNCTIONS)
        self.out = nn.ModuleList(nn.Linear(width, 32) for _ in FUNCTIONS)

    def forward(self, x: Tensor) -> Tensor:
        branches = zip(self.into, FUNCTIONS.values(), self.out, strict=True)
        return torch.stack([out(f(into(x))) for into, f, out in branches])


# 201 ends in a group of 9, 517 of 5; 67 has one whole group.
@pytest.mark.slow
@pytest.mark.parametrize(("method", "width"), [("exact", 201), ("exact", 67), ("hq8", 517)])
def test_gradients_of_a_compiled_model_are_as_good_as_in_eager_mode(method: str, width: int) -> None:
    model, x = Net(width), torch.randn(16, 32, 32)
    names = dict(model.named_parameters())

    def gradients(run: nn.Module) -> list[Tensor]:
        return list(torch.autograd.grad(run(x).square().mean(), list(names.values())))

    exact = gradients(model)
    hotrain.convert(model, method, memory="block", plan="memory")
    eager = gradients(model)
    torch._dynamo.reset()
    compiled = gradients(torch.compile(model))  # type: ignore[arg-type]
    for name, truth, want, got in zip(names, exact, eager, compiled, strict=True):
        error, expected = (got - truth).norm() / truth.norm(), (want - truth).norm() / truth.norm()
        assert error <= 1.3 * expected + 0.01, name
