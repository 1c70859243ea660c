"""Bilinear interpolation in compiled graphs: gradients of the two products against autograd in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain

CALLS: dict[str, dict[str, Any]] = {
    "a factor": {"scale_factor": 2},
    "factors of no integer, with which PyTorch computes": {"scale_factor": (1.7, 2.3)},
    "a size": {"size": (23, 40)},
    "a smaller one": {"size": (9, 7)},
    "corners aligned": {"size": (31, 33), "align_corners": True},
}


class Head(nn.Module):
    def __init__(self, call: dict[str, Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, mode="bilinear", **self.call)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_gradients(name: str, layout: torch.memory_format) -> None:
    """Of random outputs: sums of at most a few dozen products in float32."""
    torch._dynamo.reset()
    x = torch.randn(2, 48, 12, 15).to(memory_format=layout).requires_grad_()
    model = Head(CALLS[name]).train()
    hotrain.convert(model, "exact", memory="block")
    targets: list[str] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in gm.graph.nodes)
        return torch._dynamo.lookup_backend("aot_eager")(gm, _)

    y = torch.compile(model, backend=backend, fullgraph=True)(x)
    g = torch.randn_like(y)
    (got,) = torch.autograd.grad(y, x, g)
    wide = x.detach().double().requires_grad_()
    want_y = F.interpolate(wide, mode="bilinear", **CALLS[name])
    (want,) = torch.autograd.grad(want_y, wide, g.double())
    assert any("hotrain.interpolate" in target for target in targets), "or PyTorch's ran"
    assert torch.equal(y, F.interpolate(x, mode="bilinear", **CALLS[name])), "forward is PyTorch's, bit for bit"
    torch.testing.assert_close(y.double(), want_y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert got.stride() == x.stride()
