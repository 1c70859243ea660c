"""A result that nothing needed: PyTorch's functions pass no gradient on, and a parameter's stays None."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hotrain


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


class Net(nn.Module):
    """The function's result goes where no gradient comes from; the rest of the net trains."""

    def __init__(self, function: Callable[[Tensor], Tensor] | nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(64, 64), nn.Linear(64, 64)
        self.function, self.reentrant = function, reentrant

    def block(self, x: Tensor, unused: Tensor) -> Tensor:
        return x + self.after(x)

    def forward(self, x: Tensor) -> Tensor:
        unused = self.function(self.before(x))
        if self.reentrant:
            return checkpoint(self.block, self.after(x), unused, use_reentrant=True)
        return _NoGradient.apply(self.after(x), unused)


def _heads(x: Tensor) -> Tensor:
    q = x.view(4, -1, 4, 16).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q)


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "linear": lambda: nn.Linear(64, 32),
    "linear, exact": lambda: nn.Linear(64, 32),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (8, 16)), nn.Flatten(0, 1), nn.Conv1d(16, 16, 3)),
    "image": lambda: nn.Sequential(nn.Unflatten(1, (8, 16)), nn.Conv2d(8, 16, 3)),
    "layer norm": lambda: nn.LayerNorm(64),
    "rms norm": lambda: nn.RMSNorm(64),
    "composed norm": RMSNorm,
    "group norm": lambda: nn.Sequential(nn.Unflatten(1, (8, 16)), nn.GroupNorm(2, 8)),
    "batch norm": lambda: nn.Sequential(nn.Unflatten(1, (8, 16)), nn.BatchNorm2d(8), nn.ReLU()),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "relu in place": lambda: nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)),
    "mish": nn.Mish,
    "softmax": lambda: nn.Softmax(-1),
    "dropout": lambda: nn.Dropout(0.5),
    "attention": lambda: _heads,
    "product": lambda: lambda x: x * x.sigmoid(),
    "swiglu": lambda: lambda x: F.silu(x[..., :32]) * x[..., 32:],
    "matmul": lambda: lambda x: x @ x.mT,
    "max pool": lambda: nn.Sequential(nn.Unflatten(1, (8, 16)), nn.MaxPool2d(2)),
    "average pool": lambda: nn.Sequential(nn.Unflatten(1, (8, 16)), nn.AvgPool2d(2)),
    "bilinear": lambda: nn.Sequential(nn.Unflatten(1, (8, 16)), nn.Upsample(scale_factor=2, mode="bilinear")),
}  # fmt: skip


@pytest.mark.parametrize("memory", ["block", "linear"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["checkpoint", "function"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_gradient_gives_none(name: str, reentrant: bool, memory: str) -> None:
    exact = Net(FUNCTIONS[name](), reentrant)
    net = copy.deepcopy(exact)
    hotrain.convert(
        net, plan="memory", memory=memory, filter_fn=lambda _, where: name != "linear, exact" or where != "function"
    )
    x = torch.randn(4, 128, 64)
    for model in (exact, net):
        model(x).square().mean().backward()
    want = {k for k, p in exact.named_parameters() if p.grad is None}
    assert "before.weight" in want
    assert {k for k, p in net.named_parameters() if p.grad is None} == want


@pytest.mark.parametrize("name", ["layer norm", "gelu", "softmax", "linear"])
def test_compiled(name: str) -> None:
    exact = Net(FUNCTIONS[name](), False)
    net = copy.deepcopy(exact)
    hotrain.convert(net, plan="memory")
    for model in (exact, net):
        torch.compile(model, backend="aot_eager")(torch.randn(4, 128, 64)).square().mean().backward()
    want = {k for k, p in exact.named_parameters() if p.grad is None}
    assert {k for k, p in net.named_parameters() if p.grad is None} == want
