"""Grokfast's filter against its two-line definition."""

import pytest
import torch
from torch import nn

from hotrain.optim import GrokfastEMA


def filtered(alpha: float, lamb: float, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The definition: mu_1 = g_1, mu_t = a mu_{t-1} + (1-a) g_t; what is used is g_t + lamb mu_t."""
    mean, out = gradients[0], []
    for i, g in enumerate(gradients):
        mean = g if i == 0 else alpha * mean + (1 - alpha) * g
        out.append(g + lamb * mean)
    return out


@pytest.mark.parametrize(("alpha", "lamb"), [(0.98, 2.0), (0.0, 1.0), (0.5, 0.0)])
def test_it_adds_a_multiple_of_the_running_mean(alpha: float, lamb: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(3, 4, dtype=torch.float64, generator=generator) for _ in range(5)]
    p, frozen, unused = (
        nn.Parameter(torch.zeros(3, 4, dtype=torch.float64)),
        nn.Parameter(torch.zeros(1)),
        nn.Parameter(torch.zeros(2)),
    )
    frozen.requires_grad_(False)
    grokfast = GrokfastEMA([("p", p), ("frozen", frozen), ("unused", unused)], alpha, lamb)
    for g, want in zip(gradients, filtered(alpha, lamb, gradients), strict=True):
        p.grad = g.clone()
        grokfast.step()
        torch.testing.assert_close(p.grad, want, rtol=1e-12, atol=1e-14)  # float64: a few roundings
    assert set(grokfast.state_dict()["means"]) == {"p"}  # neither frozen parameters nor those without a gradient


def test_its_state_continues() -> None:
    p, q = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    one, other = GrokfastEMA([("p", p)]), GrokfastEMA([("p", q)])
    p.grad = torch.ones(4)
    one.step()
    other.load_state_dict(one.state_dict())
    p.grad, q.grad = torch.arange(4.0), torch.arange(4.0)
    one.step()
    other.step()
    assert torch.equal(p.grad, q.grad)


def test_bad_settings_and_states() -> None:
    p = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"alpha: got 1.0, accepted are numbers in \[0, 1\)"):
        GrokfastEMA([("p", p)], alpha=1.0)
    with pytest.raises(ValueError, match="lamb: got -1"):
        GrokfastEMA([("p", p)], lamb=-1)
    with pytest.raises(ValueError, match="no parameter 'q' here"):
        GrokfastEMA([("p", p)]).load_state_dict({"means": {"q": torch.zeros(1)}})
