"""`torch.compile` of a converted model: breaks at its layers in training, one graph in evaluation, the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hotrain

# the compiler's own look at a tensor between two graphs
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 4, 4)
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        t = self.conv(x).flatten(2).mT
        return t + self.fc2(nn.functional.gelu(self.fc1(t)))


def steps(run: nn.Module, model: nn.Module) -> list[Tensor]:
    """The gradients summed over ten steps: more than the compiler's limit of recompilations, 8."""
    hotrain.manual_seed(1)
    model.zero_grad()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    for _ in range(10):
        run(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("method", ["hot-unbiased", "hla"])
def test_training_follows_the_method_step_by_step(backend: str, method: str) -> None:
    """Draws advance (they are no constants of the graph), nothing is compiled anew at each step, and gradients are
    those of the uncompiled model up to the compiler's own fusion of the parts between layers."""
    model = Net()
    hotrain.convert(model, method)
    want = steps(model, model)
    compiled = torch.compile(model, backend=backend)
    got = steps(compiled, model)
    for a, b in zip(got, want, strict=True):
        # a last-bit difference may move a rounding by a step of int4 here and there
        assert nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0) > 0.99
    assert {state.draws.step for _, _, state in hotrain.converted_layers(model)} == {9}
    compilations = dict(torch._dynamo.utils.counters["frames"])
    again = steps(compiled, model)
    assert all(torch.equal(a, b) for a, b in zip(again, got, strict=True))
    assert dict(torch._dynamo.utils.counters["frames"]) == compilations  # ten steps more, nothing compiled anew


@pytest.mark.slow
def test_evaluation_is_one_graph() -> None:
    """A converted model deploys as it did before."""
    model = Net()
    hotrain.convert(model)
    model.eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x))


def test_a_compiled_model_converts_as_the_model_inside() -> None:
    """The wrapper's `_orig_mod` does not hide which layer is the head."""
    inner = nn.Sequential()
    inner.add_module("body", nn.Linear(64, 64))
    inner.add_module("head", nn.Linear(64, 64))
    report = hotrain.convert(torch.compile(inner))
    assert [row.name for row in report.converted] == ["_orig_mod.body"]
    assert [(row.name, row.reason) for row in report.kept] == [("_orig_mod.head", "head")]


def test_tracing_for_export_meets_no_checks_of_ours() -> None:
    """torch.export in evaluation mode: the exact program, no operator of hotrain's in it."""
    model = Net()
    hotrain.convert(model)
    model.eval()
    x = torch.randn(2, 3, 32, 32)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))
