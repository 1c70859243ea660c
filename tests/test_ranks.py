"""Variance of drawn rows in closed form against the library's own draws, and ranks by layer within a budget."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import hotrain
from hotrain.backward import grad_weight
from hotrain.convolution import picked_lines, product_for_weight
from hotrain.geometry import Geometry
from hotrain.nn.state import layer_states
from hotrain.ranks import RANKS, _by_importance, calibrate_ranks, covariance, image_variance, row_products
from hotrain.transform.tokens import layout, project

F64 = torch.float64


def rough(tokens: int, channels: int, seed: int) -> torch.Tensor:
    """Samples of 64 tokens whose rows have different energies."""
    t = torch.randn(tokens, channels, dtype=F64, generator=torch.Generator().manual_seed(seed))
    return (t + 0.5 * t.cumsum(0)).view(-1, 64, channels)


@pytest.mark.parametrize(("rank", "sampled"), [(8, 4), (8, 8), (6, 2), (15, 1), (16, 1)])
def test_the_closed_form_is_the_variance_of_the_draws(rank: int, sampled: int) -> None:
    """300 draws. Only the first tile of every group that shares a permutation is filled: draws are independent. A
    variance of 300 draws is known within 5·√(κ/300) of itself, κ ≤ 4 for a sum over tiles."""
    cycle = (16 - rank + sampled) // math.gcd(16 - rank + sampled, sampled)
    x, g = rough(64 * 6, 5, 0).view(-1, 16, 5), rough(64 * 6, 4, 1).view(-1, 16, 4)
    empty = (torch.arange(len(x)) % cycle != 0)[:, None, None]
    x, g = (t.masked_fill(empty, 0).view(1, -1, t.shape[-1]) for t in (x, g))
    lay = layout((1, x.shape[1]), 16, rank, sampled, "auto", None, True)
    full = layout((1, x.shape[1]), 16, 16, 0, "auto", None, True)
    k = row_products(*(project(t, full, 0).view(-1, 16, t.shape[-1]) for t in (g, x)))
    want = float((covariance(16, rank - sampled, sampled) * k).sum())
    exact = g[0].T @ x[0]
    got = sum(float((project(g, lay, i).T @ project(x, lay, i) - exact).square().sum()) for i in range(300)) / 300
    assert got == pytest.approx(want, rel=5 * math.sqrt(4 / 300), abs=1e-9)


def test_the_variance_of_the_samples() -> None:
    """Unbiased: the mean over all pairs of samples is the variance of a pair that is drawn from many."""
    g, x = rough(64 * 8, 3, 0), rough(64 * 8, 2, 1)
    own = torch.stack([a.T @ b for a, b in zip(g, x, strict=True)])
    single = float((own - own.mean(0)).square().sum()) / 7
    assert image_variance(g, x) == pytest.approx(8 * single, rel=1e-9)


@pytest.mark.parametrize("share", [4 / 16, 8 / 16, 14 / 16])
def test_the_variance_of_drawing_by_importance(share: float) -> None:
    """As if rows were drawn one by one: systematic sampling of 192 rows in a random order differs by the correlation of
    a few neighbours, and 400 draws know a variance within 5·√(2/400) of itself."""
    draw = torch.Generator().manual_seed(0)
    g, x = (torch.randn(192, n, dtype=F64, generator=draw) for n in (4, 5))
    g = g * torch.randn(192, 1, dtype=F64, generator=draw).exp()
    method = hotrain.preset("hla", rank=16, share=share)
    lay = layout((1, 192), 16, 16, 0, "auto", None, True)
    exact = g.T @ x
    kept = project(x, lay, 0)
    got = sum(float((grad_weight(g, kept, lay, method, i) - exact).square().sum()) for i in range(400)) / 400
    p_g = project(g, lay, 0)
    want = float(_by_importance(p_g[:, None], kept[:, None])[RANKS.index(round(16 * share))])
    assert got == pytest.approx(want, rel=5 * math.sqrt(2 / 400))


def model(method: str = "hot-unbiased") -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 2, 2), nn.Flatten(2), Transposed(), nn.Linear(32, 64), nn.GELU(), Mean())
    if method == "hot-importance":
        net.insert(0, nn.Conv2d(3, 3, 3, padding=1))  # lines of it are drawn
    hotrain.convert(net, method, number="int", filter_fn=lambda *_: True, plan="memory")
    return net


class Transposed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x).mean(1)


def images(*shape: int) -> torch.Tensor:
    return torch.randn(shape[0], shape[1], shape[2], shape[2], generator=torch.Generator().manual_seed(2))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return images(8, 3, 16), torch.arange(8)


@pytest.mark.parametrize("method", ["hot-unbiased", "hot-importance"])
@pytest.mark.parametrize("budget", [2.0, 5.0, 8.0])
def test_ranks_use_their_budget_and_no_more(budget: float, method: str) -> None:
    net = model(method)
    found = calibrate_ranks(net, [batch()], budget=budget)
    assert found.mean_rank <= budget + 1e-9
    steepest = max(layer.arithmetic for layer in found.layers.values())
    whole = sum(layer.arithmetic for layer in found.layers.values())
    assert found.mean_rank >= budget - 2 * steepest / whole  # not one more step fits
    for layer in found.layers.values():
        assert all(more <= less + 1e-12 for less, more in itertools.pairwise(layer.ratios))
        assert layer.ratios[-1] == 0.0 or method == "hot-importance"  # of which 15 of 16 rows are drawn at most
    found.apply(net)
    for name, state in layer_states(net):
        rows, chosen = state.method.grad_weight, found.layers[name]
        if method == "hot-unbiased":
            assert (rows.rank, rows.sampled) == (chosen.rank, chosen.sampled)
        else:
            assert (rows.rank, rows.share) == (16, min(chosen.rank, 15) / 16)
    again = calibrate_ranks(net, [batch()], budget=budget)  # ranks in force do not change what is measured
    assert {n: c.rank for n, c in again.layers.items()} == {n: c.rank for n, c in found.layers.items()}
    nn.functional.cross_entropy(net(batch()[0]), batch()[1]).backward()


def test_ranks_by_layer_are_better_than_one_rank() -> None:
    found = calibrate_ranks(model(), [batch()])
    same = {name: layer.ratios[RANKS.index(8)] * layer.parameters for name, layer in found.layers.items()}
    assert found.ratio <= sum(same.values()) / sum(layer.parameters for layer in found.layers.values())
    assert "v at rank 8" in str(found)


def test_lines_that_are_too_few_are_left_out() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1), nn.Flatten(), nn.Linear(256, 10))
    few = nn.Sequential(nn.Conv2d(3, 16, 3, 4, 1), nn.Flatten(), nn.Linear(256, 10))
    for each in (net, few):
        hotrain.convert(each, "hot-importance", number="int", plan="memory", filter_fn=lambda m, _: m.weight.dim() > 2)
    found = calibrate_ranks(net, [batch()])
    assert list(found.layers) == ["0"]  # 8 lines, and 4
    assert "by importance" in str(found)
    with pytest.raises(ValueError, match="fewer than 8 lines"):
        calibrate_ranks(few, [batch()])


def test_the_variance_of_drawing_lines() -> None:
    """As of rows; half of the images are nearly blank, so that the bound of their weights decides."""
    draw = torch.Generator().manual_seed(0)
    geometry = Geometry((3, 3), padding=(1, 1))
    x, g = (torch.randn(8, n, 8, 6, dtype=F64, generator=draw) for n in (2, 3))
    x = x * torch.tensor([1.0, 1e-3], dtype=F64).repeat(4)[:, None, None, None]
    exact = product_for_weight(g, x, (3, 2, 3, 3), geometry)

    def drawn(key: int) -> torch.Tensor:
        g_lines, x_lines, of_lines = picked_lines(g, x, geometry, 0.5, key)
        return product_for_weight(g_lines, x_lines, (3, 2, 3, 3), of_lines)

    got = sum(float((drawn(key) - exact).square().sum()) for key in range(400)) / 400
    u = nn.functional.unfold(x, 3, padding=1).mT.unflatten(1, (8, 6)).flatten(0, 1)
    want = float(_by_importance(g.movedim(1, -1).flatten(0, 1), u, lines=True)[RANKS.index(8)])
    assert got == pytest.approx(want, rel=5 * math.sqrt(2 / 400))


def test_a_layer_without_a_gradient_gets_its_part_of_the_budget() -> None:
    """A weight of zero behind it: nothing is known of its draws; at the largest budget all rows are kept."""
    net = model("hot-importance")
    nn.init.zeros_(net[-1].out.weight)
    found = calibrate_ranks(net, [batch()], budget=16.0)
    assert {layer.rank for layer in found.layers.values()} == {16}
    half = calibrate_ranks(net, [batch()], budget=8.0)
    assert min(layer.rank for name, layer in half.layers.items() if not name.endswith("out")) > 2


def test_what_cannot_be_calibrated_is_refused() -> None:
    net = model()
    with pytest.raises(ValueError, match="budget=1 is not from 2 to 16"):
        calibrate_ranks(net, [batch()], budget=1)
    with pytest.raises(ValueError, match="no batch was given"):
        calibrate_ranks(net, [])
    with pytest.raises(ValueError, match="no batch of several samples"):
        calibrate_ranks(net, [(images(1, 3, 16), torch.arange(1))])
    found = calibrate_ranks(net, [batch()])
    hotrain.revert(net)
    hotrain.convert(net, "hq", filter_fn=lambda *_: True, plan="memory")
    with pytest.raises(ValueError, match="draws no rows"):
        found.apply(net)
    with pytest.raises(ValueError, match="no layer draws rows"):
        calibrate_ranks(net, [batch()])
    with pytest.raises(ValueError, match="sampled=0 of 8 rows"):
        covariance(16, 8, 0)
