"""Compiled for any batch: no operator asks a symbolic size for its number, which would fix it to the first call's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_memory_layout import Seen
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain
from hotrain.compress.operators import norm

# Of codes of 4 bits against the exact gradient: the largest of `test_compressed_models`.
NEAR = 0.26
ROWS, SEQUENCE, IMAGE = (16, 64), (16, 256), (16, 16, 16)


class Called(nn.Module):
    def __init__(self, f: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.f, self.inner = f, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x, *self.inner)


def _attention(x: Tensor) -> Tensor:
    q, k, v = x.view(x.shape[0], 16, 3, 2, 32).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v)


def _halves(x: Tensor, layer: nn.Module) -> Tensor:
    """Of a tensor of 64 columns, so not dense; a layer reads their product."""
    one, other = x.chunk(2, -1)
    return layer(one * other)  # type: ignore[no-any-return]


def _curved(x: Tensor, module: nn.Module) -> Tensor:
    """A norm whose gradient is not nearly zero, as that of its square is."""
    return module(x).sigmoid()  # type: ignore[no-any-return]


# name → (the shape behind the batch, the function, its modules)
CASES: dict[str, tuple[tuple[int, ...], Callable[..., Tensor], list[nn.Module]]] = {
    "relu": (ROWS, F.relu, []),
    "relu of a size that 8 does not divide": ((33, 63), F.relu, []),
    "relu6": (ROWS, F.relu6, []),
    "leaky relu": (ROWS, F.leaky_relu, []),
    "hardsigmoid": (ROWS, F.hardsigmoid, []),
    "mish": (ROWS, F.mish, []),
    "gelu": (ROWS, F.gelu, []),
    "gate": (ROWS, lambda x: F.silu(x) * x, []),
    "halves": (ROWS, _halves, [nn.Linear(32, 32)]),
    "softmax": (ROWS, lambda x: x.softmax(-1), []),
    "attention": ((16, 192), _attention, []),
    "layer norm": (ROWS, _curved, [nn.LayerNorm(64)]),
    "rms norm": (ROWS, _curved, [nn.RMSNorm(64)]),
    "group norm": (SEQUENCE, _curved, [nn.GroupNorm(4, 16)]),
    "exact group norm in channels_last": (IMAGE, _curved, [nn.GroupNorm(4, 16)]),
    "batch norm": (IMAGE, _curved, [nn.BatchNorm2d(16)]),
    "batch norm of a sequence": (SEQUENCE, _curved, [nn.BatchNorm1d(16)]),
    "max pooling": (IMAGE, lambda x: F.max_pool2d(x, 2), []),
    "average pooling": (IMAGE, lambda x: F.avg_pool2d(x, 2).sin(), []),
    "interpolation": (IMAGE, lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), []),
}


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", CASES)
def test_a_graph_is_for_any_batch(name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    sides, f, modules = CASES[name]
    exact, seen = nn.Sequential(nn.Identity(), Called(f, *modules)), Seen()
    model = copy.deepcopy(exact)
    report = hotrain.convert(model, "exact", memory="block")
    assert report.buffers is not None
    if "exact" in name:
        report.buffers.must_not_lose = True
        monkeypatch.setattr(norm, "supported", lambda *_: True)
        request.getfixturevalue("laid_out_on_cpu")
    run: Any = torch.compile(model, backend=seen.backend, fullgraph=True)
    for batch in (64, 72):
        x = torch.randn(batch, *sides)
        x = x.to(memory_format=torch.channels_last) if sides == IMAGE else x
        torch._dynamo.mark_dynamic(x.requires_grad_(), 0)
        (got,), (want,) = (torch.autograd.grad(each(x).square().sum(), x) for each in (run, exact))
        assert (got - want).norm() <= NEAR * want.norm()
    assert len(seen.graphs) == 2, "forward and backward, for both batches"
