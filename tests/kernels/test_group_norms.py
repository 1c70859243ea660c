"""The kernels of group and instance norms, statistics by sample and group of channels, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from hotrain import autograd
from hotrain.compress.operators import image_norm
from hotrain.compress.slopes import ACTIVATIONS
from hotrain.kernels import batch_norm
from hotrain.saved import Bits, Grouped, unpack_parts

CLOSE = 2.0**-20  # float32 in another order, of the magnitudes that are added
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# (samples, positions, channels, groups): two channels a group; groups of a number that is no power of two, as Stable
# Diffusion has; one group; one channel a group (instance norm); a half that is no multiple of 8; fewer positions than a
# tile has rows, one of them; several programs a sample, whose last tile is a part.
SHAPES = [
    (3, 49, 64, 32), (2, 16, 320, 32), (2, 64, 48, 1), (3, 36, 16, 16), (2, 25, 40, 4), (5, 1, 64, 8), (1, 300, 32, 8),
    (2, 131, 24, 3),
]  # fmt: skip
normalize: Any = batch_norm.normalize
norm_gradient: Any = batch_norm.gradient
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _poisoned(poison: None) -> None:
    """No program may leave an entry unwritten."""


def rounding(dtype: torch.dtype, size: Tensor) -> Tensor:
    """One rounding of numbers of that size; Triton's interpreter truncates."""
    return size.abs().double() * torch.finfo(dtype).eps + torch.finfo(dtype).tiny


def levels_of(name: str) -> tuple[int, int] | None:
    levels = ACTIVATIONS[name].levels if name else None
    return None if levels is None else (levels.first, levels.per_one)


class Case:
    """Rows of several samples, whose groups have means and widths of their own."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, w: bool = True) -> None:
        self.samples, self.positions, self.channels, self.groups = shape
        size = self.samples, self.positions, self.channels
        x = torch.randn(size, device=device) * torch.rand(self.samples, 1, 1, device=device).exp()
        self.x = (x + 3 * torch.randn(self.samples, 1, self.channels, device=device)).to(dtype).flatten(0, 1)
        self.w = torch.randn(self.channels, device=device) if w else None
        self.b = torch.randn(self.channels, device=device) if w else None
        mean, var = self.statistics(self.x)
        self.mean, self.r = mean.float(), (var + 1e-5).rsqrt().float()

    def each(self, t: Tensor) -> Tensor:
        """Rows by sample and group, (samples, positions, groups, channels of a group), float64."""
        return t.double().view(self.samples, -1, self.groups, self.channels // self.groups)

    def statistics(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        var, mean = torch.var_mean(self.each(rows), (1, 3), correction=0)
        return mean, var

    def normal(self, rows: Tensor) -> Tensor:
        mean, r = (t.double()[:, None, :, None] for t in (self.mean, self.r))
        return ((self.each(rows) - mean) * r).view(rows.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_statistics(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Of groups far from zero: float32's rounding of the sums, not of the squares of x."""
    case = Case(shape, dtype, device)
    x = (case.x.double() + 30).to(dtype)
    mean, var = batch_norm.statistics(x, case.samples, case.groups, entries=256, waves=1)
    want, wide = case.statistics(x)
    apart = (case.each(x) - want[:, None, :, None]).square()
    size = apart.mean((1, 3)) + apart.amax((1, 3))
    assert mean.shape == var.shape == (case.samples, case.groups)
    assert mean.dtype == var.dtype == torch.float32
    assert ((mean - want).abs() <= rounding(torch.float32, want) + CLOSE * size.sqrt()).all()
    assert ((var - wide).abs() <= CLOSE * size).all()


def test_statistics_of_what_is_not_finite(device: torch.device) -> None:
    """A NaN spoils its group of its sample alone; equal values have no variance, and not less."""
    x = torch.full((2 * 20, 16), 3.3, device=device)
    x[25, 5] = float("nan")
    mean, var = batch_norm.statistics(x, 2, 4)
    spoilt = torch.zeros(2, 4, dtype=torch.bool, device=device)
    spoilt[1, 1] = True
    assert (mean[~spoilt] == x[0, 0]).all()
    assert (var[~spoilt] == 0).all()
    assert mean[spoilt].isnan().all()
    assert var[spoilt].isnan().all()


@pytest.mark.parametrize("name", ["", "relu", "silu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_result_and_codes(shape: tuple[int, ...], dtype: torch.dtype, name: str, device: torch.device) -> None:
    """y = f(γ x̂ + β + shortcut) of PyTorch's group norm in float64; codes within half a step of x̂."""
    case = Case(shape, dtype, device, w=name != "relu")
    shortcut = torch.randn_like(case.x) if name == "silu" else None
    tensors = case.x, case.mean, case.r, case.w, case.b, shortcut
    y, codes, scale, _ = normalize(*tensors, name, levels_of(name), torch.float32)
    normal = case.normal(case.x)
    v = normal if case.w is None else normal * case.w.double() + case.b.double()
    v = v if shortcut is None else v + shortcut.double()
    want = ACTIVATIONS[name].f(v) if name else v
    size = 1 + v.abs() + (case.each(case.x).abs() * case.r.double()[:, None, :, None]).view(v.shape) * 4
    assert y.dtype == torch.float32
    assert ((y - want).abs() <= CLOSE * size).all()
    back = Grouped(4, whole=True).restore((codes, scale), case.x.shape, torch.float64)
    step = scale.double().view(-1, 1)
    assert ((back - normal).abs() <= step * (0.5 + 2.0**-7) + CLOSE * size).all()
    image = case.x.double().view(case.samples, -1, case.channels).mT
    of_torch = F.group_norm(image, case.groups, None, None, 1e-5).mT.reshape(v.shape)
    assert ((normal - of_torch).abs() <= CLOSE * size * 2).all()  # μ and r are rounded to float32


def exact_gradients(case: Case, g: Tensor, kept: list[Tensor], name: str) -> tuple[list[Tensor], list[Tensor]]:
    """float64: of f's slopes and x̂ as restored, by autograd through the statistics, and what roundings are of."""
    codes, scale, marks = kept
    normal = Grouped(4, whole=True).restore((codes, scale), g.shape, torch.float64)
    slope = torch.ones_like(normal)
    if name and levels_of(name) is None:
        slope = Bits(neighbours=True).restore((marks,), g.shape).double()
    elif name:
        levels = ACTIVATIONS[name].levels
        assert levels is not None
        slope = levels.restore((marks,), g.shape, torch.float64)
    w = torch.ones(case.channels, dtype=torch.float64, device=g.device) if case.w is None else case.w.double()
    r = case.r.double()[:, None, :, None]
    d = torch.zeros_like(normal, requires_grad=True)
    w, b = w.clone().requires_grad_(), torch.zeros_like(w).requires_grad_()
    shift, n = case.each(d) * r, case.each(normal)  # n(x + d) to the first order in d
    moved = n + shift - shift.mean((1, 3), keepdim=True) - n * (shift * n).mean((1, 3), keepdim=True)
    behind = slope * g.double()
    found = torch.autograd.grad(w * moved.view(g.shape) + b, (d, b, w), behind)
    size, gamma = behind.abs(), w.detach().abs()
    of_g = case.each(gamma * size)
    of_n = of_g * n.abs()
    inner = of_g + of_g.mean((1, 3), keepdim=True) + n.abs() * of_n.mean((1, 3), keepdim=True)
    return list(found), [(r * inner).view(g.shape), size.sum(0), (size * normal.abs()).sum(0)]


@pytest.mark.parametrize("name", ["", "relu", "silu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(shape: tuple[int, ...], dtype: torch.dtype, name: str, device: torch.device) -> None:
    """Of one value per statistic but a constant (`(5, 1, 64, 8)` has eight), for each way to have an f."""
    case = Case(shape, dtype, device, w=name != "relu")
    shortcut = torch.randn_like(case.x) if name == "silu" else None
    _, *kept = normalize(case.x, case.mean, case.r, case.w, case.b, shortcut, name, levels_of(name))
    g = torch.randn_like(case.x)
    passes_on = shortcut is not None
    g_x, sums, behind = norm_gradient(
        g, None, *kept, case.r, case.w, name, levels_of(name), passes_on, torch.float32
    )  # fmt: skip
    (want, g_b, g_w), sizes = exact_gradients(case, g, kept, name)
    assert g_x.dtype == sums.dtype == torch.float32
    assert behind.shape == (g.shape if passes_on else (0,))
    inner = 1.0 if levels_of(name) else 0.0  # slopes' products are rounded to g's dtype
    for got, exact, size in zip((g_x, *sums), (want, g_b, g_w), sizes, strict=True):
        wrong = (got.double() - exact).abs() > inner * rounding(dtype, size) + 2 * CLOSE * size
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}"


@pytest.mark.parametrize("name", ["", "silu"])
def test_definition(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators' plain PyTorch, which runs where no kernel does, is what the kernels compute."""
    case = Case((3, 49, 64, 32), torch.float32, device)
    image = case.x.view(3, 7, 7, 64).permute(0, 3, 1, 2)
    g = torch.randn_like(case.x)

    def run() -> list[Tensor]:
        mean, var = image_norm._channel_statistics(image, 32)
        y, *kept = image_norm._normalize(image, case.mean, case.r, case.w, case.b, None, name)
        codes = unpack_parts(kept[0], 4)
        image_of_g = g.view(3, 7, 7, 64).permute(0, 3, 1, 2)
        g_x, sums, _ = image_norm._norm_gradient(image_of_g, None, *kept, case.r, case.w, name, False)
        return [mean, var, y, kept[1].float(), g_x, sums, codes.float()]

    found = run()
    monkeypatch.setattr(autograd, "KERNELS", {})
    for got, want in zip(found[:-1], run()[:-1], strict=True):
        # A code at the boundary of two moves a gradient by a step of x̂, a seventh of it: one in a hundred may.
        assert got.shape == want.shape
        far = (got - want).abs() > 2.0**-16 * (1 + want.abs())
        assert far.double().mean() <= 0.01
