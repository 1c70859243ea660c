"""Bilinear interpolation in compiled graphs: gradients of the two products against autograd in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
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
    if layout == torch.channels_last:  # else these are so few pixels that the compiler's formula is run
        assert torch.equal(y, F.interpolate(x, mode="bilinear", **CALLS[name])), "forward is PyTorch's, bit for bit"
    torch.testing.assert_close(y.double(), want_y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert got.stride() == x.stride()


@pytest.mark.parametrize(
    ("layout", "size", "ours"),
    [
        (torch.contiguous_format, (7, 7), False),  # 49 threads for all images and channels: mobilevit_s
        (torch.contiguous_format, (128, 128), True),
        (torch.channels_last, (7, 7), True),  # a thread for each entry
    ],
    ids=str,
)
def test_pytorchs_kernel_is_run_where_it_fills_a_gpu(
    layout: torch.memory_format, size: tuple[int, int], ours: bool
) -> None:
    """Elsewhere forward is the compiler's formula, as in exact training; backward is two products everywhere."""
    torch._dynamo.reset()
    x = torch.randn(2, 48, 12, 15).to(memory_format=layout).requires_grad_()
    model = Head({"size": size}).train()
    hotrain.convert(model, "exact", memory="block")
    graphs: dict[str, list[str]] = {}

    def seen(name: str) -> Any:
        def compiler(gm: torch.fx.GraphModule, _: Any) -> Any:
            graphs[name] = [str(node.target) for node in gm.graph.nodes]
            return make_boxed_func(gm.forward)

        return compiler

    backend = aot_autograd(fw_compiler=seen("forward"), bw_compiler=seen("backward"))
    y = torch.compile(model, backend=backend, fullgraph=True)(x)
    y.sum().backward()
    assert ("hotrain.bilinear.default" in graphs["forward"]) is ours
    assert {"aten.bmm.default"} <= set(graphs["backward"]), "products"
    assert not any("upsample" in target or "index_put" in target for target in graphs["backward"])
