"""A channel of a norm's result far above the others: it takes the range of every row, and must not take the others'."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrain
from hotrain.compress.rules import SMALL
from hotrain.quantize.channels import STRIDE, factors, sampled

CHANNELS, OUT = 64, 7


class Head(nn.Module):
    """A norm and a layer behind it, which shares its codes."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.out = norm, nn.Linear(CHANNELS, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.mT).mT if isinstance(self.norm, nn.GroupNorm) else self.norm(x)
        return self.out(y)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(CHANNELS),
    "layer, plain": lambda: nn.LayerNorm(CHANNELS, elementwise_affine=False),
    "rms": lambda: nn.RMSNorm(CHANNELS),
    "group": lambda: nn.GroupNorm(2, CHANNELS),
}


@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in NORMS), ("rms", True)])
def test_the_other_channels_keep_their_gradients(name: str, compiled: bool) -> None:
    """Of a layer behind a norm, one of whose channels is 30 times the others.

    A row's scale alone would have steps of 4 of their deviations: cosine and norm of these gradients would be near 0.
    Int4 of numbers alike gives .99; `hq8` in integers also rounds to 8 bits with one scale, 1/4 of a deviation here.
    """
    torch.manual_seed(0)
    exact = Head(NORMS[name]())
    assert 4 * 96 * CHANNELS >= SMALL
    x, weights = torch.randn(4, 96, CHANNELS), torch.randn(4, 96, 64)
    x[..., OUT] += 30
    others = torch.arange(CHANNELS) != OUT
    for method in ("hq8", "exact"):
        model = copy.deepcopy(exact)
        hotrain.convert(model, method, plan="memory", memory="block")
        grads = []
        for each in (exact, torch.compile(model) if compiled else model):
            each.zero_grad()
            leaf = x.clone().requires_grad_()
            (each(leaf) * weights).sum().backward()
            assert leaf.grad is not None
            grads.append((leaf.grad, exact.out.weight.grad if each is exact else model.out.weight.grad))
        (g_x, g_w), (ours_x, ours_w) = grads
        assert g_w is not None
        assert ours_w is not None
        for want, got in ((g_w[:, others], ours_w[:, others]), (g_w[:, OUT], ours_w[:, OUT]), (g_x, ours_x)):
            assert F.cosine_similarity(want.flatten(), got.flatten(), 0) > (0.94 if method == "hq8" else 0.95)
            assert 0.92 < got.norm() / want.norm() < 1.08


def test_factors_are_powers_of_two_of_channels_that_stand_out() -> None:
    torch.manual_seed(0)
    rows = torch.randn(1000, 256)
    assert (factors(rows) <= 2).all(), "a channel's size is known to a third, from 16 rows"
    assert (factors(rows) == 1).float().mean() > 0.95
    for high in (10.0, 50.0, 1000.0):
        rows[:, 3] = high
        found = factors(rows)
        assert torch.frexp(found).mantissa.eq(0.5).all()
        assert 0.5 <= high / found[3] <= 2, "as large as the others, whose mean of roots squared is .68"
        assert torch.equal(factors(rows * 2**-10), found), "it is no question of size"
    assert factors(rows.double()).dtype == torch.float64


@pytest.mark.parametrize("columns", [1024, 4096])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 32), (2, 64), (16, 32), (32, 197)])
def test_a_token_in_which_a_channel_stands_out_is_no_channel_that_does(batch: int, tokens: int, columns: int) -> None:
    """The first token of each sample, of 1000 times the others: the channel is as the others in all other tokens.

    And the other way round: of a channel that stands out in all tokens but the first, that one is looked at too seldom.
    """
    torch.manual_seed(0)
    rows = torch.randn(batch, tokens, columns)
    rows[:, 0, 5] = 1000
    normal = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True))
    assert factors(normal)[5] <= 2
    rows = torch.randn(batch, tokens, columns)
    rows[:, 1:, 5] = 30
    assert factors(rows)[5] >= 16


def test_edges_of_factors() -> None:
    """Fewer rows than are looked at, constant and zero rows, and numbers that are not finite."""
    assert sampled(1) * STRIDE < 2**31, "Inductor computes it as an index, in int32"
    assert [sampled(n) for n in (1, 16, 768, 2048, 4096, 8192, 1 << 16)] == [16, 16, 16, 16, 8, 8, 8]
    for rows in (torch.zeros(5, 32), torch.ones(1, 32), torch.full((40, 32), float("nan"))):
        assert torch.equal(factors(rows), torch.ones(32))
    rows = torch.randn(64, 32)
    rows[0, 0] = float("nan")  # the first row is always one of them
    assert torch.equal(factors(rows), torch.ones(32))
    assert factors(torch.randn(2, 3, 5, 32)).shape == (32,)
    assert factors(torch.randn(32)).shape == (32,)
    image = torch.randn(2, 32, 3, 5)
    assert torch.equal(factors(image.movedim(1, -1)), factors(image.movedim(1, -1).contiguous()))
