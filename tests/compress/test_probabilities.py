"""Losses that take the logarithm of a probability: its derivative is large where the probability is small."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain
from hotrain.compress.formats import GROUPED
from hotrain.saved import Logarithmic

RARE = torch.rand(8, 48, 64, generator=torch.Generator().manual_seed(1)) < 0.02  # what the model gives little chance


class Head(nn.Module):
    """Logits that say "no" nearly everywhere, and the loss that a user writes of their probabilities."""

    def __init__(self, loss: Callable[[Tensor], Tensor], bias: Tensor) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.fc, self.loss = nn.Linear(64, 64), loss
        with torch.no_grad():
            self.fc.bias.copy_(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.fc(x))


def _of_classes(z: Tensor) -> Tensor:
    """The first class for all but 2 % of the rows, as a background is."""
    labels = torch.where(RARE[..., 0], RARE[..., 1:].sum(-1) % 63 + 1, 0)
    return F.nll_loss(torch.log(z.softmax(-1) + 1e-8).flatten(0, 1), labels.flatten())


def _of_channels(z: Tensor) -> Tensor:
    """The same along another axis."""
    labels = torch.where(RARE[..., 0], RARE[..., 1:].sum(-1) % 63 + 1, 0)
    return F.nll_loss(torch.log(z.movedim(-1, 1).softmax(1) + 1e-8), labels)


def _of_sigmoids(z: Tensor) -> Tensor:
    return F.binary_cross_entropy(torch.sigmoid(z), RARE.to(z.dtype))


def _of_squashed(z: Tensor) -> Tensor:
    """The entropy of a squashed Gaussian, as in soft actor-critic."""
    return torch.log(1 - torch.tanh(z) ** 2 + 1e-6).mean()


FIRST = torch.zeros(64).index_fill(0, torch.tensor([0]), 8.0)
CASES = {
    "softmax": (_of_classes, FIRST),
    "softmax of channels": (_of_channels, FIRST),
    "sigmoid": (_of_sigmoids, torch.full((64,), -6.0)),
    "tanh": (_of_squashed, torch.full((64,), 3.0)),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_a_logarithm_of_a_probability_is_near_the_exact_one(name: str, compiled: bool) -> None:
    """Saved in int8, or as a 4-bit derivative, it had errors of 0.3 to 4.

    An element of softmax has an error of at most 4.4 %, a derivative by its input in int8 of half a step of 17/127 or
    less: 6.7 %; each deviates by less over many.
    """
    loss, bias = CASES[name]
    model, x = Head(loss, bias), torch.randn(8, 48, 64, requires_grad=True)
    exact, same = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    want = torch.autograd.grad(exact(same), (same, exact.fc.bias))  # the weight's has the error of the layer's input
    hotrain.convert(model, "exact", memory="block")
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for got, g in zip(torch.autograd.grad(run(x), (x, model.fc.bias)), want, strict=True):
        assert (got - g).norm() / g.norm() < 0.067
    torch._dynamo.reset()


FLAT: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "softplus": F.softplus,
    "softplus, linear there": lambda z: F.softplus(-z),
    "elu": F.elu,
    "celu": F.celu,
    "logsigmoid": F.logsigmoid,
    "glu, its gate": lambda z: F.glu(torch.cat((z.detach().clamp(-1, 1), z), -1)),
}


@pytest.mark.parametrize("f", FLAT.values(), ids=FLAT)
@pytest.mark.parametrize("mask", [-float("inf"), -1e9])
def test_a_mask_does_not_take_the_bits_of_its_group(f: Callable[[Tensor], Tensor], mask: float) -> None:
    """Where f is flat its argument may be anything; others in the group keep their precision."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Identity()), torch.randn(8, 48, 64)
    model[1].forward = lambda z: f(z.masked_fill(RARE, mask))  # type: ignore[method-assign]
    want = torch.autograd.grad(model(x).sum(), model[0].bias)[0]
    hotrain.convert(model, "exact", memory="block")
    got = torch.autograd.grad(model(x).sum(), model[0].bias)[0]
    assert (got - want).norm() / want.norm() < 0.067


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logarithmic_codes_have_an_error_relative_to_each_element(dtype: torch.dtype) -> None:
    """Within half a code, 2^(1/16); the largest of a row exact; zero, and what is below 2^-31.75 of it, zero."""
    spec = GROUPED["log8/row"]
    assert isinstance(spec, Logarithmic)
    t = torch.rand(64, 50, dtype=torch.float64).pow(30).to(dtype)
    t[0], t[1, :3] = 0.0, torch.tensor([1.0, 2.0**-31, 2.0**-33]).to(dtype)
    back = spec.restore(spec.keep(t), t.shape, dtype)
    kept = t.double() >= t.double().amax(-1, keepdim=True) * 2.0**-31.5
    ratio = (back.double() / t.double())[kept & (t > 0)]
    half = 2 ** (1 / 16) * (1 + torch.finfo(dtype).eps)
    assert ratio.max() <= half
    assert ratio.min() >= 1 / half
    assert torch.equal(back.amax(-1), t.amax(-1).float().to(dtype))
    assert not back[0].any()
    assert back[1, 1] > 0
    assert back[1, 2] == 0
    assert sum(part.nbytes for part in spec.keep(t)) == spec.nbytes(t.shape)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_of_logarithmic_codes_shows_what_is_not_finite(bad: float) -> None:
    spec, t = GROUPED["log8/row"], torch.rand(2, 50)
    t[0, 7] = bad
    back = spec.restore(spec.keep(t), t.shape, t.dtype)
    assert not back[0].isfinite().all()
    assert back[1].isfinite().all()
