"""A converted ReLU has PyTorch's gradient to the bit: every dtype, memory order, and non-finite numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import hotrain
from hotrain.nn.activation import BitReLU

SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e-45])


def gradient(relu: nn.Module, x: Tensor, g_y: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = relu(leaf * 1)  # an in-place ReLU may not write to a leaf
    (g_x,) = torch.autograd.grad(y, leaf, g_y)
    return y.detach(), g_x


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 16, 5, 5), (0, 4), (1,)], ids=str)
def test_output_and_gradient_are_pytorchs(shape: tuple[int, ...], dtype: torch.dtype, inplace: bool) -> None:
    x, g_y = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    for got, want in zip(gradient(BitReLU(inplace), x, g_y), gradient(nn.ReLU(inplace), x, g_y), strict=True):
        assert torch.equal(got, want)
        assert got.dtype == want.dtype


def test_channels_last() -> None:
    """The bits are in logical order, whatever the memory order of x and of g_y."""
    x, g_y = torch.randn(2, 2, 16, 5, 5).unbind()
    for order in (torch.contiguous_format, torch.channels_last):
        laid_out = x.to(memory_format=torch.channels_last), g_y.to(memory_format=order)
        for got, want in zip(gradient(BitReLU(), *laid_out), gradient(nn.ReLU(), *laid_out), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_goes_where_pytorch_lets_it_go(value: float) -> None:
    """An overflow behind a closed entry must not become a NaN: 0 · inf is not what a closed gate hands on."""
    g_y = torch.full_like(SPECIAL, value)
    for got, want in zip(gradient(BitReLU(), SPECIAL, g_y), gradient(nn.ReLU(), SPECIAL, g_y), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_conversion_takes_relus_along_and_revert_gives_them_back() -> None:
    model = nn.Sequential(nn.Conv2d(32, 32, 3), nn.ReLU(inplace=True), nn.Conv2d(32, 32, 3), nn.ReLU())
    exact = copy.deepcopy(model)
    report = hotrain.convert(model, "hot")
    assert [type(m) for m in model][1::2] == [BitReLU, BitReLU]
    assert "2 ReLUs saved in 1 bit per element" in str(report)
    x = torch.randn(2, 32, 9, 9, requires_grad=True)
    assert torch.equal(model(x), exact(x))
    model.eval()
    assert model(x).grad_fn.name() == "ReluBackward0"
    hotrain.revert(model)
    assert [type(m) for m in model] == [type(m) for m in exact]
