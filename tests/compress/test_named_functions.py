"""Hardswish and Hardsigmoid, whose functions a tracer shows to no mode: as modules they are compressed there too."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import hotrain

KINDS = [nn.Hardswish, nn.Hardsigmoid]


def network(kind: type[nn.Module], inplace: bool, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), kind(inplace=inplace))  # type: ignore[call-arg]
    return nn.Sequential(*layers, nn.Conv2d(32, 32, 1)).train()


def gradients(model: nn.Module, x: torch.Tensor, compiled: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    y = run(x)
    return y.detach(), list(torch.autograd.grad(y.square().mean(), list(model.parameters())))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_as_in_eager(kind: type[nn.Module], inplace: bool) -> None:
    """The same result and gradients, near exact's, and about as few bytes: bits are padded to bytes apart."""
    x = torch.randn(4, 32, 16, 16)
    model = network(kind, inplace)
    hotrain.convert(model, "exact", memory="block")
    exact = gradients(network(kind, inplace), x, compiled=False)
    eager, compiled = (gradients(model, x, compiled=on) for on in (False, True))
    assert torch.equal(eager[0], exact[0])
    torch.testing.assert_close(compiled[0], exact[0], rtol=1e-5, atol=1e-6)
    for a, b, c in zip(compiled[1], eager[1], exact[1], strict=True):
        assert (a - b).norm() <= 1e-5 * c.norm()
        # int4 codes of activations: a step is a seventh of the largest entry, so some hundredths of their size
        assert (a - c).norm() <= 0.2 * c.norm()
    kept = [hotrain.saved_bytes(run, x).total for run in (model, torch.compile(model, backend="aot_eager"))]
    assert kept[1] <= 1.01 * kept[0]
    assert kept[0] < 0.4 * hotrain.saved_bytes(network(kind, inplace), x).total


@pytest.mark.parametrize("kind", KINDS)
def test_the_module_is_what_it_was(kind: type[nn.Module]) -> None:
    model = network(kind, True)
    hotrain.convert(model, "exact", memory="block")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other[2], kind)
    hotrain.convert(model, "exact", memory="block")  # once more changes nothing
    hotrain.revert(model)
    assert type(model[2]) is kind
    assert not [name for name in model[2].__dict__ if "hotrain" in name]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("evaluated", [False, True], ids=["too small to keep codes of", "in evaluation"])
def test_in_place_where_nothing_is_compressed(kind: type[nn.Module], evaluated: bool) -> None:
    """What is written to is written to, compiled as well."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = kind(inplace=True)  # type: ignore[call-arg]
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.scale
            z = self.f(y)
            return y + z  # twice the function: y is what it was written to

    model = Holder().train(not evaluated)
    hotrain.convert(model, "exact", memory="block")
    x = torch.randn(3, 5)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(x), 2 * kind()(x))
