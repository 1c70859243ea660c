"""`torch.utils.checkpoint`: the recomputed forward draws what the first one drew, so gradients are the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import hotrain


class Blocks(nn.Module):
    """Three residual blocks; `mode` None runs them plainly, else under checkpoint's reentrant (True) or other mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 64))
            for _ in range(3)
        )

    def forward(self, x: Tensor, mode: bool | None) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + (block(x) if mode is None else checkpoint(block, x, use_reentrant=mode))
        return x


def two_steps(model: Blocks, mode: bool | None) -> list[Tensor]:
    """The gradients of two steps, concatenated: draws that the recomputation moved on would show in the second."""
    hotrain.manual_seed(4)
    torch.manual_seed(4)
    seen = []
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(2, 40, 32), mode).square().mean().backward()
        seen += [parameter.grad.clone() for parameter in model.parameters()]
    return seen


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("method", ["hot-unbiased", "hot", "hq4", "luq", "dropout"])
def test_gradients_are_those_without_checkpointing(method: str, reentrant: bool) -> None:
    model = Blocks()
    hotrain.convert(model, method)
    plain, checkpointed = two_steps(model, None), two_steps(model, reentrant)
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_convolutions_too(reentrant: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())
    hotrain.convert(model, "hot-unbiased", filter_fn=lambda module, name: True)
    x = torch.randn(2, 3, 12, 12, requires_grad=True)
    grads = []
    for segments in (0, 2):
        hotrain.manual_seed(4)
        y = checkpoint_sequential(model, segments, x, use_reentrant=reentrant) if segments else model(x)
        model.zero_grad()
        y.square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_called_twice_inside_stays_consistent(reentrant: bool) -> None:
    """A shared layer's recomputed calls may share a draw, but each backward uses the codes and the rows of one draw.

    At full rank without bits on g_w the draws cannot be seen, so the weight's gradient must be the exact one; a key
    that did not belong to the kept rows would spoil it.
    """
    method = hotrain.preset("hot-unbiased", grad_input_bits=None, grad_weight_bits=None, saved_bits=None, rank=16)
    layer = nn.Linear(64, 64)
    x = torch.randn(2, 48, 64, requires_grad=True)
    want = torch.autograd.grad(layer(layer(x)).square().sum(), [x, layer.weight])
    hotrain.convert(layer, method)
    y = checkpoint(lambda t: layer(layer(t)), x, use_reentrant=reentrant)
    y.square().sum().backward()
    for got, exact in zip((x.grad, layer.weight.grad), want, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-3)


def test_checkpointing_keeps_no_codes_between() -> None:
    """Nothing of a checkpointed block waits for backward but its input."""
    model = Blocks()
    hotrain.convert(model, "hot-unbiased")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        model(torch.randn(2, 40, 32), False)
    assert sum(t.dtype == torch.int8 for t in kept) == 1  # the stem's, which is not checkpointed
