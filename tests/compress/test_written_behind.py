"""What a user writes to behind an operator: results that are operands, copies, weights that no gradient needs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F

import hotrain
from hotrain.compress import compiled

BACKENDS = [None, "aot_eager"]


def _run(net: nn.Module, backend: str | None, x: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    run = net if backend is None else torch.compile(net, backend=backend)
    y = run(x)
    y.square().mean().backward()
    return y.detach(), [p.grad for p in net.parameters()]


def _same(exact: nn.Module, backend: str | None, x: Tensor, within: float) -> None:
    """Forward to the bit, gradients within the rounding of int4 or int8."""
    net = copy.deepcopy(exact)
    hotrain.convert(net, plan="memory")
    (want, of_exact), (got, of_net) = _run(exact, backend, x.clone()), _run(net, backend, x.clone())
    assert torch.equal(got, want)
    for g, other in zip(of_exact, of_net, strict=True):
        assert (g is None) == (other is None)
        assert g is None or other is None or (g - other).norm() <= within * g.norm()


class InPlace(nn.Module):
    """Reads an operand after its in-place result was written to: they are one tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(64, 64), nn.Linear(64, 64), function

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        a = self.function(h)
        a += 1.0
        return self.last(a) * 2 + h


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "function",
    [
        lambda h: F.relu6(h, inplace=True),
        lambda h: F.silu(h, inplace=True),
        lambda h: F.mish(h, inplace=True),
        lambda h: F.hardswish(h, inplace=True),
        lambda h: F.leaky_relu(h[:, :32], 0.1, inplace=True).repeat(1, 2, 1),
    ],
    ids=["relu6", "silu", "mish", "hardswish", "a slice"],
)
def test_an_in_place_result_is_its_operand(function: Callable[[Tensor], Tensor], backend: str | None) -> None:
    """int8 of x, and 1 bit: 5 %."""
    _same(InPlace(function), backend, torch.randn(4, 64, 64), 0.05)


def test_the_users_input_is_written_to() -> None:
    """A view of the result too: the input of the compiled model has what exact training leaves in it."""

    def run(x: Tensor) -> Tensor:
        x = F.relu6(x, inplace=True)
        x.flatten(1)[:, :5] += 1
        return net(x)

    found = []
    for converted in (False, True):
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        if converted:
            hotrain.convert(net, plan="memory")
        x = torch.linspace(-2, 8, 4 * 96 * 64).view(4, 96, 64)
        torch.compile(run, backend="aot_eager")(x)
        found.append(x)
    assert torch.equal(*found)


class Copies(nn.Module):
    """Returns copies of its input, of a buffer, of a weight and of a result, made by writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("mean", torch.zeros(64, 512))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = F.silu(self.layer(x), inplace=True)
        of = x, self.mean, self.layer.weight, h
        return h * h, h, *(torch.empty_like(t).copy_(t) for t in of)


def test_copies_that_a_model_makes_stay_copies() -> None:
    """Compiled with our partitioner: what in-place results are written by is left out of the graph, copies are not."""
    found: list[int] = []

    def look(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        copies = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default)
        found.append(sum(node.meta["val"].is_floating_point() for node in copies))  # not those of counters
        return make_boxed_func(graph.forward)

    net = Copies()
    hotrain.convert(net, plan="memory")
    backend = aot_autograd(fw_compiler=look, bw_compiler=look, partition_fn=compiled.partition)
    x = torch.randn(4, 128, 64)
    results = torch.compile(net, backend=backend)(x)
    results[0].sum().backward()
    places = [t.data_ptr() for t in (*results, x, net.mean, net.layer.weight)]
    assert len(set(places)) == len(places)
    assert found == [4, 0]


class Renormed(nn.Module):
    """A siamese net whose first weight is changed in forward; the input has no gradient, so that none reads it."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, nn.Linear(64, 64)

    def once(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.mul_(0.9)
        return self.last(F.relu(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.once(x) - self.once(x + 1)


@pytest.mark.parametrize(
    ("first", "shape"),
    [
        (lambda: nn.Linear(12, 64), (4, 512, 12)),  # too small to be converted
        (lambda: nn.Linear(64, 64), (4, 128, 64)),
        (lambda: nn.RMSNorm(64), (4, 128, 64)),
    ],
    ids=["exact linear", "linear", "rms norm"],
)
def test_a_weight_that_no_gradient_needs_may_be_written_to(
    first: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """int4 of x̂: 20 %."""
    _same(Renormed(first()), None, torch.randn(shape), 0.2)
