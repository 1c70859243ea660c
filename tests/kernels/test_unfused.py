"""The kernels that eager mode has of its own, against the formulas that a compiler fuses."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("triton")


import hotrain
from hotrain import autograd, kernels
from hotrain.compress import launcher
from hotrain.compress.formats import BITS, GROUPED
from hotrain.compress.interpose import Compressed
from hotrain.compress.operators import base
from hotrain.compress.operators.activation import Curve, Slope
from hotrain.compress.operators.batch_norm import BatchNorm
from hotrain.compress.operators.norm import Norm, channels_of
from hotrain.compress.report import Buffers
from hotrain.compress.slopes import ACTIVATIONS
from hotrain.kernels import activation, attention, norm, support
from hotrain.kernels import codes as packing
from hotrain.quantize.channels import middles
from hotrain.saved import Grouped, group_size

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# (rows, C): the fewest channels, a half that is no power of two, a tile exactly and one row more, tokens and channels
# of a ViT, many tiles of one program, the longest row of one program.
SHAPES = [(1, 4), (7, 48), (49, 100), (33, 128), (197, 768), (2100, 16), (3, 4096)]
FORMAT = Grouped(4, whole=True)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter, of infinities and NaN


@pytest.fixture(autouse=True)
def _poisoned(poison: None) -> None:
    """No program may leave an entry unwritten."""


@pytest.fixture
def compressed(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The kernels in the formulas, in the interpreter too."""
    if device.type == "cpu":
        monkeypatch.setattr(autograd, "KERNELS", dict.fromkeys(("cpu", "cuda"), kernels))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels are called from now on, in order."""
    names: list[str] = []
    run = kernels.run
    monkeypatch.setattr(kernels, "run", lambda name, *args: (names.append(name), run(name, *args))[1])
    return names


def draw(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of many sizes, whose channels have means of their own."""
    t = torch.randn(rows, columns, device=device) * torch.exp2(torch.arange(rows, device=device) % 5)[:, None]
    return (t + torch.randn(columns, device=device)).to(dtype)


def alike(columns: int, device: torch.device, w: Tensor | None = None) -> Tensor:
    """c = 1 of all channels, and γ."""
    ones = torch.ones(columns, device=device)
    return torch.stack([ones, ones if w is None else w])


def statistics(x: Tensor, by_row: bool) -> tuple[Tensor, Tensor]:
    axis = 1 if by_row else 0
    wide = x.float()
    return wide.mean(axis), torch.rsqrt(wide.var(axis, correction=0) + 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["int8", "int4 nearest", "int4 nearest/row"])
@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (197, 768), (3, 4096)])
def test_what_was_kept_comes_back(shape: tuple[int, int], form: str, dtype: torch.dtype, device: torch.device) -> None:
    """The definition's numbers to the bit: a product of an integer and a scale, rounded once."""
    spec = GROUPED[form]
    kept = spec.keep(draw(*shape, torch.float32, device))
    got, want = packing.unpack(*kept, spec.bits, dtype), spec.restore(kept, shape, dtype)
    if device.type == "cpu" and dtype == torch.bfloat16:  # which the interpreter cuts off
        torch.testing.assert_close(got, want, rtol=2**-7, atol=0)
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize("by_row", [True, False], ids=["rows", "channels"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_codes_of_what_is_normalized(
    shape: tuple[int, int], dtype: torch.dtype, by_row: bool, device: torch.device
) -> None:
    """The format's codes: the same scale to a unit of bfloat16, entries within one step, all but a few the same."""
    x = draw(*shape, dtype, device)
    mean, r = statistics(x, by_row)
    normal = (x.float() - (mean[:, None] if by_row else mean)) * (r[:, None] if by_row else r)
    codes, scale = norm.pack(x, mean, r, by_row)
    want = FORMAT.keep(normal)
    assert codes.shape == want[0].shape
    assert scale.shape == want[1].shape
    torch.testing.assert_close(scale.float(), want[1].float(), rtol=2**-7, atol=0)
    got, expected = (FORMAT.restore(kept, shape, torch.float32) for kept in ((codes, scale), want))
    step = want[1].float().view(-1, 1)
    assert ((got - expected).abs() <= 1.1 * step).all()
    assert ((got - expected).abs() > 0.1 * step).float().mean() <= 0.01 + 8 / got.numel()


def test_codes_without_a_mean(device: torch.device) -> None:
    x = draw(33, 48, torch.float32, device)
    r = torch.rsqrt(x.square().mean(1))
    got = FORMAT.restore(norm.pack(x, None, r, True), x.shape, torch.float32)
    normal = x * r[:, None]
    # Half a step of seven to the largest, whose rounding to bfloat16 makes it 2⁻⁸ larger.
    assert ((got - normal).abs() <= normal.abs().amax(1, keepdim=True) / 13.9).all()


@pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_a_norm(shape: tuple[int, int], dtype: torch.dtype, centered: bool, device: torch.device) -> None:
    """Against the formula in float64 on the same codes: float32 sums of C or of all rows, and the result's rounding."""
    x, g = draw(*shape, torch.float32, device), draw(*shape, dtype, device)
    mean, r = statistics(x, True)
    kept = norm.pack(x, mean if centered else None, r, True)
    w = torch.randn(shape[1], device=device)
    g_x, sums, _ = norm.gradient(g, *kept, r, alike(shape[1], device, w), dtype, centered)
    normal, wide = FORMAT.restore(kept, shape, torch.float32).double(), g.double()
    scaled = wide * w.double()
    inner = scaled - normal * (scaled * normal).mean(1, keepdim=True)
    inner = inner - scaled.mean(1, keepdim=True) if centered else inner
    want = inner * r.double()[:, None]
    assert g_x.dtype == dtype
    size = scaled.abs().amax(1, keepdim=True) * (1 + normal.abs().amax(1, keepdim=True) ** 2) * r.double()[:, None]
    assert ((g_x.double() - want).abs() <= torch.finfo(dtype).eps * want.abs() + 2.0**-18 * size + 1e-7).all()
    both = torch.stack([wide.sum(0), (wide * normal).sum(0)])
    among = torch.stack([wide.abs().sum(0), (wide * normal).abs().sum(0)])
    assert ((sums.double() - both).abs() <= 2.0**-18 * among + 1e-7).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shortcut_s_gradient_is_added_and_the_sum_copied(shape: tuple[int, int], device: torch.device) -> None:
    """float32 beside 16 bits, as autocast has them: one rounding more, and the copy's."""
    x, g, other = (
        draw(*shape, torch.float32, device),
        draw(*shape, torch.bfloat16, device),
        draw(*shape, torch.float32, device),
    )
    mean, r = statistics(x, True)
    kept, w = norm.pack(x, mean, r, True), alike(shape[1], device, torch.randn(shape[1], device=device))
    alone, sums, none = norm.gradient(g, *kept, r, w, torch.float32, True)
    assert none.numel() == 0
    total, again, copy = norm.gradient(g, *kept, r, w, torch.float32, True, other, torch.float16)
    size = alone.abs() + other.abs()  # one of the two additions may keep its product unrounded
    assert ((total - (alone + other)).abs() <= 2.0**-22 * size).all()
    assert torch.equal(sums, again)
    assert copy.dtype == torch.float16
    torch.testing.assert_close(copy.float(), total, rtol=2.0**-10, atol=2.0**-24)


@pytest.mark.parametrize("branch", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["layer", "rms", "rms_cast"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_norm_with_its_codes(
    shape: tuple[int, int], kind: str, branch: torch.dtype | None, device: torch.device
) -> None:
    """Of a sum, against float64: y, r, and the codes that `pack` makes of the same numbers."""
    dtype, y_dtype = torch.float32, torch.float32 if kind == "rms_cast" else torch.bfloat16
    x = draw(*shape, dtype, device) + 0.5
    more = None if branch is None else draw(*shape, branch, device)
    w, b = torch.randn(shape[1], device=device), torch.randn(shape[1], device=device)
    centered, eps = kind == "layer", 1e-5
    found = norm.forward(x, more, w, b if centered else None, eps, (dtype, y_dtype), centered, kind == "rms_cast")
    total, y, r, codes, scale, channels = found
    lifted = x if more is None else x + more
    if more is None:
        assert total.numel() == 0
    else:
        torch.testing.assert_close(total, lifted, rtol=2.0**-23, atol=0)
    wide = lifted.double()
    mean = wide.mean(1, keepdim=True) if centered else torch.zeros_like(wide[:, :1])
    factor = torch.rsqrt((wide - mean).square().mean(1, keepdim=True) + eps)
    torch.testing.assert_close(r.double(), factor[:, 0], rtol=2.0**-19, atol=0)
    want = (wide - mean) * factor * w.double() + (b.double() if centered else 0)
    near = (wide.abs() + mean.abs()) * factor * w.double().abs() * 2.0**-19 + 1e-6
    rounding = torch.finfo(y_dtype).eps * (2 if device.type == "cpu" else 1)  # the interpreter cuts off
    assert ((y.double() - want).abs() <= rounding * want.abs() + near).all()
    means = mean[:, 0].float() if centered else None
    torch.testing.assert_close(channels, norm.channels(lifted, means, r, w), rtol=2.0**-18, atol=0)
    same = norm.pack(lifted, means, r, True, channels)
    torch.testing.assert_close(scale.float(), same[1].float(), rtol=2.0**-7, atol=0)
    assert (codes != same[0]).float().mean() < 0.01 + 8 / codes.numel(), "halves may fall otherwise"


@pytest.mark.parametrize("branch", [False, True], ids=["", "branch"])
@pytest.mark.parametrize(
    ("kind", "dtype", "added"), [("layer", torch.bfloat16, torch.float32), ("rms", torch.float32, torch.bfloat16)]
)
@pytest.mark.parametrize("shape", [(7, 48), (49, 100), (33, 128), (3, 4096)])
def test_a_norm_of_a_sum_with_a_bias(
    shape: tuple[int, int],
    kind: str,
    dtype: torch.dtype,
    added: torch.dtype,
    branch: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the definition, and as the norm of the sum in float32: it is rounded after the branch alone."""
    x, w, b = draw(*shape, dtype, device), torch.randn(shape[1], device=device), torch.randn(shape[1], device=device)
    bias = (4 * torch.randn(shape[1], device=device)).to(added)
    more = draw(*shape, torch.float32, device) if branch else None
    vectors, flags = (w, b if kind == "layer" else None, 1e-5), (kind == "layer", False, True)
    dtypes = torch.float32, torch.float32
    got = norm.forward(x, more, *vectors, dtypes, *flags, bias)
    same = norm.forward(x.float() + bias.float(), more, *vectors, dtypes, *flags)
    monkeypatch.setattr(autograd, "KERNELS", {})
    want = torch.ops.hotrain.norm_forward(x, more, *vectors, *dtypes, *flags, bias, None, 1.0)
    for total, y, r, codes, scale, channels in (same, want):
        torch.testing.assert_close(got[0], total, rtol=2.0**-22, atol=2.0**-20)
        torch.testing.assert_close(got[1], y, rtol=2.0**-16, atol=2.0**-16)
        torch.testing.assert_close(got[2], r, rtol=2.0**-19, atol=0)
        torch.testing.assert_close(got[5], channels, rtol=2.0**-18, atol=0)
        torch.testing.assert_close(got[4].float(), scale.float(), rtol=2.0**-7, atol=0)
        assert (got[3] != codes).float().mean() < 0.01 + 8 / codes.numel(), "halves may fall otherwise"


@pytest.mark.parametrize("kind", ["samples", "channels", "bits"])
@pytest.mark.parametrize("shape", [(16, 48), (48, 100), (24, 1024)])
def test_a_branch_and_a_gradient_are_multiplied(
    kind: str, shape: tuple[int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a number for each of four samples or channel, or a dropout's mask: as the products, and the definition.

    Products with no more than 16 significant bits are exact, so that what is added is the same to the bit.
    """
    x, more = draw(*shape, torch.float32, device), draw(*shape, torch.bfloat16, device)
    g, other = draw(*shape, torch.bfloat16, device), draw(*shape, torch.float32, device)
    w, b = torch.randn(shape[1], device=device), torch.randn(shape[1], device=device)
    if kind == "bits":
        mask = torch.rand(shape, device=device) < 0.7
        (factor,), times, full = BITS.keep(mask), 1.25, mask * 1.25
    elif kind == "channels":
        factor, times = torch.randint(1, 9, (1, shape[1]), device=device) / 4, 1.25
        full = (factor * times).expand(shape)
    else:
        factor, times = torch.tensor([0.0, 1.0, 0.0, 1.5], device=device), 1.25
        full = factor.repeat_interleave(shape[0] // 4)[:, None].expand(shape) * times
    rest = (w, b, 1e-5, (torch.float32, torch.float32), True, False, True, None)
    got = norm.forward(x, more, *rest, factor, times)
    product = more.float() * full
    want = norm.forward(x, product, *rest)
    # One addition may keep its product unrounded.
    torch.testing.assert_close(got[0], want[0], rtol=2.0**-22, atol=2.0**-22)
    torch.testing.assert_close(got[1], want[1], rtol=2.0**-16, atol=2.0**-16)
    kept, r, w = got[3:5], got[2], got[5]
    plain = norm.gradient(g, *kept, r, w, torch.float32, True, other, torch.float32)
    multiplied = norm.gradient(g, *kept, r, w, torch.float32, True, other, torch.bfloat16, factor, times)
    # Two compilations, which may contract other products and sums to one rounding; terms of up to 2⁴ cancel.
    for one, another in zip(multiplied[:2], plain[:2], strict=True):
        torch.testing.assert_close(one, another, rtol=2.0**-20, atol=2.0**-18)
    wanted = plain[2] * full
    torch.testing.assert_close(multiplied[2].float(), wanted, rtol=2.0**-7, atol=0)
    assert torch.equal(multiplied[2] == 0, wanted == 0)
    monkeypatch.setattr(autograd, "KERNELS", {})
    ops, flat = torch.ops.hotrain, (torch.float32, torch.float32, True, False, True, None)
    total, *_ = ops.norm_forward(x, more, *rest[:3], *flat, factor, times)
    torch.testing.assert_close(total, want[0], rtol=2.0**-22, atol=2.0**-22)
    *_, copy = ops.norm_backward(g, *kept, r, w, other, torch.float32, True, torch.float32, factor, times)
    torch.testing.assert_close(copy, wanted, rtol=2.0**-12, atol=2.0**-12)


def test_channels_that_stand_out(device: torch.device) -> None:
    """Of numbers alike c is 1. A channel at 30 times the others keeps its own numbers, and the others keep theirs.

    Without c the step is a seventh of that channel's: the others, below half of it, are zero.
    """
    torch.manual_seed(0)
    x = torch.randn(4096, 256, device=device)
    x[:, 7] += 30
    for mean, r in (statistics(x, True), (None, torch.rsqrt(x.square().mean(1)))):
        c = norm.channels(x, mean, r, None)
        assert torch.equal(c[0], c[1])
        assert 16 <= c[0, 7] <= 64
        assert (c[0, torch.arange(256) != 7] <= 2).all()
        w = torch.randn(256, device=device)
        assert torch.equal(norm.channels(x, mean, r, w), torch.stack([c[0], w * c[0]]))
        normal = (x if mean is None else x - mean[:, None]) * r[:, None]
        torch.testing.assert_close(channels_of(normal, w), norm.channels(x, mean, r, w), rtol=2.0**-20, atol=0)
        got = FORMAT.restore(norm.pack(x, mean, r, True, c), x.shape, torch.float32) * c[0]
        # Half a step, 1/7 of a row's largest entry; rounded to bfloat16 and up.
        assert ((got - normal).abs() <= 0.5 / 6.9 * c[0] * (normal / c[0]).abs().amax(1, keepdim=True)).all()
        error = (got - normal).norm(dim=0) / normal.norm(dim=0)
        assert (error < 0.3).all()
        plain = FORMAT.restore(norm.pack(x, mean, r, True), x.shape, torch.float32)
        assert (plain[:, :7] == 0).float().mean() > 0.9
    even = torch.randn(4096, 256, device=device)
    assert (norm.channels(even, *statistics(even, True), None) <= 2).all()


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_channels_of_few_rows(rows: int, device: torch.device) -> None:
    """Fewer than are sampled, and a number that is not finite: c stays 1, and the row has no finite scale."""
    x = torch.randn(rows, 48, device=device)
    mean, r = statistics(x, True)
    normal = (x - mean[:, None]) * r[:, None]
    torch.testing.assert_close(norm.channels(x, mean, r, None), channels_of(normal, None), rtol=2.0**-20, atol=0)
    x[0, 3] = float("nan")
    assert (norm.channels(x, mean, r, None) == 1).all()
    assert (channels_of((x - mean[:, None]) * r[:, None], None) == 1).all()
    assert (norm.channels(torch.zeros_like(x), mean * 0, r, None) == 1).all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_row(bad: float, device: torch.device) -> None:
    """And comes out of it as no finite number, as in PyTorch."""
    x, g = draw(9, 48, torch.float32, device), draw(9, 48, torch.float32, device)
    mean, r = statistics(x, True)
    x[4, 5] = bad
    kept = norm.pack(x, mean, r, True)
    assert not FORMAT.restore(kept, x.shape, torch.float32)[4].isfinite().all()
    g_x, *_ = norm.gradient(g, *kept, r, alike(48, device), torch.float32, True)
    assert not g_x[4].isfinite().any()
    assert g_x[torch.arange(9) != 4].isfinite().all()
    g[2, 7] = bad
    again = norm.pack(torch.randn_like(g), mean, r, True)
    g_x, sums, _ = norm.gradient(g, *again, r, alike(48, device), torch.float32, True)
    assert not g_x[2].isfinite().any()
    assert not sums[0, 7].isfinite()
    assert sums[0, :7].isfinite().all()


def gradients(f: Any, *inputs: Tensor) -> list[Tensor]:
    y = f(*inputs)
    y = y if isinstance(y, Tensor) else y[0]
    weights = torch.empty_like(y).copy_(torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape))  # strides of y
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), inputs)]


CALLS: dict[str, tuple[Any, tuple[int, ...], bool]] = {
    "layer": (lambda x, w, b: F.layer_norm(x, (48,), w, b), (3, 11, 48), True),
    "rms": (lambda x, w, b: F.rms_norm(x, (48,), w, 1e-5) + b, (3, 11, 48), True),
    "rms_cast": (lambda x, w, b: w * F.rms_norm(x, (48,), None, 1e-5) + b, (3, 11, 48), True),
    "batch": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (5, 48, 4, 6), False),
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_norm_in_eager_mode_is_the_kernels(
    kind: str, compressed: None, device: torch.device, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formula with kernels against the formula without: the same forward, gradients to the rounding of codes that
    may take either side (an entry of a hundred by 1/7 of the largest)."""
    _, shape, by_row = CALLS[kind]
    x = torch.randn(shape, device=device)
    x = (x if by_row else x.contiguous(memory_format=torch.channels_last)).requires_grad_()
    w, b = (torch.randn(48, device=device).requires_grad_() for _ in range(2))

    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        given = None if kind.startswith("rms") else b
        if kind == "batch":
            y = BatchNorm.apply(x, w, b, 1e-5, "int4 nearest/row", None, None, 0.1)[0]
        else:
            y = Norm.apply(x, w, given, kind, 1, 1e-5, "int4 nearest/row")[0]
        return y if given is not None else y + b

    got = gradients(norm, x, w, b)
    before = ["norm.channels", "norm.pack", "norm.gradient"]
    assert calls == (before if by_row else ["norm.pack", "batch_norm.gradient"])
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "is_eager", lambda t: False)
        want = gradients(norm, x, w, b)
    exact = gradients(CALLS[kind][0], x, w, b)
    torch.testing.assert_close(got[0], exact[0], rtol=1e-5, atol=1e-5)
    for g, d, e in zip(got[1:], want[1:], exact[1:], strict=True):
        assert g.shape == d.shape
        assert g.stride() == d.stride()
        assert (g - d).norm() <= 0.02 * e.norm()
        assert (g - e).norm() <= 0.25 * e.norm()


def test_a_norm_over_several_axes_and_of_frozen_parameters(compressed: None, device: torch.device) -> None:
    """Rows of two axes are the definition's; what needs no gradient gets none."""
    x, w = torch.randn(5, 3, 16, device=device).requires_grad_(), torch.randn(3, 16, device=device)
    y = Norm.apply(x, w, None, "layer", 2, 1e-5, "int4 nearest/row")[0]
    (got,) = torch.autograd.grad(y.square().sum(), x)
    z = F.layer_norm(x, (3, 16), w)
    (want,) = torch.autograd.grad(z.square().sum(), x)
    assert (got - want).norm() <= 0.3 * want.norm()
    frozen = torch.randn(48, device=device)
    t = torch.randn(7, 48, device=device).requires_grad_()
    y = Norm.apply(t, frozen, frozen, "layer", 1, 1e-5, "int4 nearest/row")[0]
    y.sum().backward()
    assert t.grad is not None
    assert frozen.grad is None


@pytest.mark.parametrize("name", ["relu", "relu6"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entries", [8, 1024 * 8, 1025 * 8, 50 * 3 * 56])
def test_bits_of_where_a_gradient_passes(entries: int, dtype: torch.dtype, name: str, device: torch.device) -> None:
    """To the bit, with zeros, the upper bound, infinities and NaN; a gradient that does not pass ends, were it inf."""
    kind = ACTIVATIONS[name]
    x = (3 * torch.randn(entries, device=device)).to(dtype)
    x[:8] = torch.tensor([0.0, -0.0, 6.0, float("inf"), -float("inf"), float("nan"), -1.0, 5.0])
    for in_place in (False, True):
        given = x.clone()
        y, bits = activation.bits(given, name, in_place)
        assert (y is given) == in_place
        assert torch.equal(y.nan_to_num(7), kind.f(x).nan_to_num(7))
        assert torch.equal(bits, BITS.keep(kind.slope(x))[0])
    g = torch.randn(entries, device=device).to(dtype)
    g[1::7] = float("inf")
    assert torch.equal(activation.bits_gradient(g, bits), torch.where(kind.slope(x), g, 0.0))


@pytest.mark.parametrize("name", ["relu", "relu6"])
def test_bits_in_eager_mode_are_the_kernels(
    name: str, compressed: None, device: torch.device, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images in channels-last too; a second derivative, which passes where the first does, has the formula's graph."""
    x = torch.randn(2, 8, 5, 6, device=device).to(memory_format=torch.channels_last).requires_grad_()
    y = Slope.apply(x, name)
    want = ACTIVATIONS[name].f(x)
    assert torch.equal(y, want)
    assert y.stride() == x.stride()
    g = torch.randn_like(y)
    assert torch.equal(torch.autograd.grad(y, x, g, retain_graph=True)[0], torch.autograd.grad(want, x, g)[0])
    assert calls == ["activation.bits", "activation.bits_gradient"]
    g.requires_grad_()
    (g_x,) = torch.autograd.grad(y, x, g, create_graph=True)
    (second,) = torch.autograd.grad(g_x.sum(), g)
    assert torch.equal(second, ACTIVATIONS[name].slope(x.detach()).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 1 / 0.9, 0.0])
@pytest.mark.parametrize("entries", [8, 1024 * 8, 1025 * 8, 50 * 3 * 56])
def test_a_mask_and_what_it_passes(entries: int, factor: float, dtype: torch.dtype, device: torch.device) -> None:
    """Bits to the bit; g times the factor, in float32 and rounded once, or 0, not 0 · inf."""
    mask, g = torch.rand(entries, device=device) < 0.7, torch.randn(entries, device=device).to(dtype)
    mask[1], g[1] = False, float("inf")
    bits = activation.flags(mask)
    assert torch.equal(bits, BITS.keep(mask)[0])
    got, want = activation.bits_gradient(g, bits, factor), torch.where(mask, g.double() * factor, 0.0)
    assert got.dtype == dtype
    rounded = torch.finfo(dtype).eps * (1.0 if device.type == "cpu" else 0.5) + 2.0**-22  # the interpreter cuts off
    assert ((got.double() - want).abs() <= (0.0 if factor == 1.0 else rounded) * want.abs()).all()
    assert (got[~mask] == 0).all()


@pytest.mark.parametrize("kind", ["images", "a permutation", "a view"])
@pytest.mark.parametrize("name", ["relu", "relu6", "silu"])
def test_in_place_in_eager_mode(
    name: str, kind: str, compressed: None, device: torch.device, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensor itself is written, by the kernel where it has one, and its gradient is PyTorch's."""
    monkeypatch.setattr(base, "SMALL", 2)
    x = torch.randn(2, 8, 5, 6, device=device).to(memory_format=torch.channels_last).requires_grad_()
    g, mode = torch.randn_like(x, requires_grad=False), Compressed(Buffers())
    function, written = getattr(F, name), {}

    def step() -> Tensor:
        t = {"images": x * 1, "a permutation": (x * 1).permute(0, 3, 1, 2), "a view": (x * 1)[:]}[kind]
        y = function(t, inplace=True)
        written[len(written)] = t, y
        return torch.autograd.grad(y, x, g.permute(0, 3, 1, 2) if kind == "a permutation" else g)[0]

    with mode:
        got = step()
    want = step()
    (t, y), (_, expected) = written.values()
    assert t.data_ptr() == y.data_ptr()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    assert (got - want).norm() <= (0.2 if name == "silu" else 0) * want.norm()  # x in int4; one bit is exact
    if name != "silu":  # a view is written by `copy_`, whose gradient may have another layout
        assert calls[0] == "activation.bits"
        assert kind != "images" or calls[1:] == ["activation.bits_gradient"]


@pytest.mark.parametrize("entries", [48, 45], ids=["bytes", "a part of a byte"])
def test_dropout_in_eager_mode(
    entries: int, compressed: None, device: torch.device, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's draws, and its gradients: of a tensor in memory order and transposed, and a second time."""
    monkeypatch.setattr(base, "SMALL", 2)
    x, g = (torch.randn(3, entries, device=device) for _ in range(2))
    for turned in (False, True):
        found = []
        for compressing in (True, False):
            torch.manual_seed(3)
            t = (x.T.contiguous().T if turned else x.clone()).requires_grad_()
            with Compressed(Buffers()) if compressing else nullcontext():
                y = F.dropout(t, 0.3)
            g_y = torch.empty_like(y).copy_(g).detach().requires_grad_()
            (g_x,) = torch.autograd.grad(y, t, g_y, retain_graph=True)
            (again,) = torch.autograd.grad(y, t, g_y, create_graph=True)
            found.append([y, g_x, again, *torch.autograd.grad(again.sum(), g_y)])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=2.0**-22, atol=0)
    assert calls == (["activation.flags", "activation.bits_gradient"] * 2 if entries == 48 else [])


def heads(batch: int, tokens: int, count: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(batch, tokens, count, width, device=device).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 48, 64, 256])
def test_four_at_once_are_what_each_alone_is(width: int, dtype: torch.dtype, device: torch.device) -> None:
    """q, k and v are in one tensor, the output alone; fewer heads or tokens of k and v are fewer programs.

    k, and v if it has middles, are packed less these, in float32.
    """
    packed = heads(2, 21, 3 * 4, width, dtype, device)
    q, k, v = packed.unflatten(2, (3, 4)).unbind(2)
    group = group_size(width)
    out, few, narrow = heads(2, 21, 4, width, dtype, device), [t[:, :5] for t in (k, v)], [t[:, :, :1] for t in (k, v)]
    for number, tensors in ((2, (q, k, v, out)), (2, (q, *few, out)), (1, (q, *narrow, q.contiguous()))):
        middle = torch.randn(number, 2, *tensors[1].shape[2:], device=device)
        kept = attention.pack(tensors, group, (8, 4), middle)
        less = [t.float() - middle[place - 1][:, None] if 0 < place <= number else t for place, t in enumerate(tensors)]
        alone = [part for place, t in enumerate(less) for part in packing.pack(t, group, 8 if place < 2 else 4)]
        assert len(kept) == 8
        assert all(torch.equal(got, want) for got, want in zip(kept, alone, strict=True))
        for got, codes, scale, bits in zip(
            attention.unpack(kept, (8, 4), dtype), kept[::2], kept[1::2], (8, 8, 4, 4), strict=True
        ):
            assert torch.equal(got, packing.unpack(codes, scale, bits, dtype))
        first = attention.unpack(kept[:6], (8, 4), dtype)
        assert len(first) == 3
        assert all(torch.equal(a, b) for a, b in zip(first, attention.unpack(kept, (8, 4), dtype)[:3], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "tokens", "width"), [(1, 3, 16), (2, 21, 48), (3, 64, 256), (5, 1, 8)])
def test_middles_by_the_kernel(batch: int, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Of tensors in any layout, one or two; 0 where a number that is looked at is not finite."""
    k, v = heads(batch, tokens, 6, width, dtype, device).unflatten(2, (3, 2)).unbind(2)[1:]
    k[-1, 0, 1, 3], v[0, 0, 0, 5], v[0, :, 1, 2] = float("nan"), float("-inf"), 1000
    by_head = heads(batch, 2, tokens, width, dtype, device).transpose(1, 2)
    for tensors in ([k], [k, v], [by_head, k.contiguous()], [v.mT.contiguous().mT, v[:, :1].expand(v.shape)]):
        found, want = attention.middles(tensors), middles(tensors)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-4)
        assert found.isfinite().all()
    found = attention.middles([k, v])
    assert (found == 0).nonzero().tolist() == [[0, batch - 1, 1, 3], [1, 0, 0, 5]]
    assert found[1, 0, 1, 2] == 1000
    assert (found[1, 1:, 1, 2] < 500).all()


def test_attention_in_eager_mode_is_the_kernels(
    compressed: None, device: torch.device, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (heads(2, 21, 3, 16, torch.float32, device).transpose(1, 2).requires_grad_() for _ in range(3))
    buffers = Buffers()
    monkeypatch.setattr(base, "SMALL", 2)
    with Compressed(buffers):
        y = F.scaled_dot_product_attention(q, k, v)
    g = torch.randn_like(y)
    got = torch.autograd.grad(y, (q, k, v), g)
    assert calls == ["attention.middles", "attention.pack", "attention.unpack"]
    want = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), g)
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 0.35 * b.norm()  # v and the output in int4 (docs/numerics.md: a quarter of g_q, g_k)


def test_a_kernel_that_does_not_compile_leaves_the_formula(
    compressed: None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose callers have it: of norms, functions' codes and bits; GELU's slope there is its tanh form's."""
    x = torch.randn(6, 48, device=device, requires_grad=True)
    w, g = torch.randn(48, device=device, requires_grad=True), torch.randn(6, 48, device=device)
    calls: list[tuple[Any, tuple[Tensor, ...]]] = [
        (lambda: Norm.apply(x, w, None, "layer", 1, 1e-5, "int4 nearest/row")[0], (x, w)),
        (lambda: Curve.apply(x, "gelu", "int8", False)[0], (x,)),
        (lambda: Slope.apply(x, "relu"), (x,)),
    ]
    broken = {"norm.gradient", "codes.activate", "codes.gradient", "activation.bits", "activation.bits_gradient"}
    for call, inputs in calls:
        want = torch.autograd.grad(call(), inputs, g)
        with monkeypatch.context() as patch:
            patch.setattr(support, "_broken", broken)
            got = torch.autograd.grad(call(), inputs, g)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=0.001 * float(g.abs().max()))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rms, self.qkv = nn.LayerNorm(64), nn.RMSNorm(64), nn.Linear(64, 192)
        self.out, self.wide, self.narrow = nn.Linear(64, 64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.rms(x))))


@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
def test_a_block_in_eager_mode(
    how: str, compressed: None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them in a model: forward and gradients as by the formulas, to the rounding of its dtype. Entries between
    two codes may take either, in some of a thousand."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    model = Block().to(device, dtype).train()
    hotrain.convert(model, "exact", memory="block")
    monkeypatch.setattr(base, "SMALL", 2)
    x = torch.randn(2, 31, 64, device=device, dtype=dtype)

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=how == "autocast"):
            y = model(x)
        y.float().square().mean().backward()
        return y.detach().float(), torch.cat(
            [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
        )

    y, got = step()
    monkeypatch.setattr(launcher, "is_eager", lambda t: False)
    y_formula, want = step()
    near = 1e-5 if how == "float32" else 2**-6
    assert (y - y_formula).norm() <= near * y_formula.norm()
    assert (got - want).norm() <= (0.01 if how == "float32" else 0.03) * want.norm()


def test_traced_it_is_the_definition(compressed: None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler is to see the formula, which it fuses with what is around."""

    def fail(*args: Any) -> Any:
        raise AssertionError("a kernel of eager mode in a trace")

    monkeypatch.setattr(kernels, "run", fail)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(x: Tensor) -> Tensor:
        y = torch.ops.hotrain.norm(x.view(5, 4, 12), None, None, "layer", 2, 1e-5, "int4 nearest/row")[0]
        return torch.ops.hotrain.slope(y, "relu").square().sum()

    x = torch.randn(5, 48, device=device).requires_grad_()
    run(x).backward()
    assert x.grad is not None
