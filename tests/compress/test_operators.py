"""Each operator by itself: PyTorch's forward to the bit, the gradients of its formula, and the bytes it says."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from operator_cases import CASES, Case, Whole, differentiate, distance, nbytes, saving, with_operators
from torch import Tensor

from hotrain.compress.formats import BITS, GROUPED
from hotrain.compress.slopes import ACTIVATIONS

pytestmark = pytest.mark.usefixtures("small_tensors_too")

every = pytest.mark.parametrize("name", CASES)


def both(case: Case, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(y, gradients) of the compressed and of the exact call."""
    inputs = case.inputs(dtype)
    return differentiate(lambda *t: with_operators(case.call, *t), inputs), differentiate(case.call, inputs)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_forward_is_pytorchs_to_the_bit(name: str, dtype: torch.dtype) -> None:
    """The same kernels run; only what they leave is changed. Gradients have the dtypes of their tensors."""
    case = CASES[name]
    got, want = both(case, dtype)
    assert torch.equal(got[0], want[0])
    assert got[0].dtype == want[0].dtype
    assert [t.stride() for t in got[:1]] == [t.stride() for t in want[:1]]
    assert [t.dtype for t in got[1:]] == [dtype] * len(case.shapes)


@every
def test_the_formula_is_pytorchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With formats that lose nothing the gradients are autograd's, in float64.

    To 1e-7 of the largest entry: PyTorch multiplies hardsigmoid's by the float32 next to 1/6. GELU's slope is that of
    its tanh form, 0.0009 off at most (`curves`)."""
    for form in GROUPED:
        monkeypatch.setitem(GROUPED, form, Whole())
    for kind, activation in ACTIVATIONS.items():
        if activation.levels is not None:
            monkeypatch.setitem(ACTIVATIONS, kind, dataclasses.replace(activation, levels=Whole()))
    got, want = both(CASES[name], torch.float64)
    for g, w in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(g, w, rtol=0, atol=(1e-3 if name == "gelu" else 1e-7) * float(w.abs().max()))


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_gradients_are_as_close_as_the_format(name: str, dtype: torch.dtype) -> None:
    got, want = both(CASES[name], dtype)
    assert all(g.isfinite().all() for g in got)
    rounding = 2 * max(torch.finfo(dtype).eps, 2.0**-24)
    assert distance(got[1:], want[1:]) <= CASES[name].loss + rounding


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_held_is_what_the_formats_say(name: str, dtype: torch.dtype) -> None:
    """To the byte, without weights, which are there anyway."""
    case = CASES[name]
    inputs = case.inputs(dtype)
    with saving() as held:
        y = with_operators(case.call, *inputs)
    weights = inputs[1:] if name.startswith(("linear", "conv2d")) or "norm" in name else []
    assert y.requires_grad
    assert nbytes(held, weights) == case.nbytes(dtype)


@every
def test_autocast_gives_pytorchs_dtypes(name: str) -> None:
    """Autocast's lists differ from device to device: what PyTorch's operator returns here, ours does."""
    case = CASES[name]
    for dtype in (torch.float32, torch.bfloat16):
        inputs = case.inputs(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            got = differentiate(lambda *t: with_operators(case.call, *t), inputs)
            want = differentiate(case.call, inputs)
        assert got[0].dtype == want[0].dtype
        assert [t.dtype for t in got] == [t.dtype for t in want]
        assert torch.equal(got[0], want[0])


@every
def test_a_second_derivative_is_right_or_an_error(name: str) -> None:
    """Codes are constants to autograd: what it would leave out must not pass for a derivative."""
    case = CASES[name]
    inputs = case.inputs(torch.float64)

    def second(call) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        y = call(*inputs)
        first = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs, allow_unused=True)

    exact = not case.kept or case.kept[0][0] == BITS
    if not exact:
        with pytest.raises(RuntimeError, match="second derivative"):
            second(lambda *t: with_operators(case.call, *t))
        return
    # PyTorch has no second derivative of hardsigmoid itself.
    plain = case.call if name != "hardsigmoid" else lambda x: (x + 3).clamp(0, 6) / 6
    for got, want in zip(second(lambda *t: with_operators(case.call, *t)), second(plain), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_second_derivative_that_autograd_would_cut_is_refused() -> None:
    """A Laplacian: what is differentiated depends on x by a path without codes, too; autograd follows that alone."""
    x = torch.randn(512, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="'product' has no second derivative"):
        torch.autograd.grad(with_operators(lambda t: t.sin() * t, x).sum(), x, create_graph=True)


LOGITS = (1, 16, 64, 256, 2048)  # standard deviations of the logits; 2048: all weights but one are zero


@pytest.mark.parametrize("std", LOGITS)
def test_attentions_gradients_are_bounded_for_any_logits(std: float) -> None:
    """They are those of attention at rounded q, k and v, whose weights sum to one.

    Against the exact log-sum-exp, with the rounding of a logit in the exponent, they reach 1e20.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, 64, 64, generator=generator) for _ in range(3)]
    inputs = [(t * scale).requires_grad_() for t, scale in zip(inputs, (std**0.5, std**0.5, 1), strict=True)]
    call = torch.nn.functional.scaled_dot_product_attention
    got = differentiate(lambda *t: with_operators(call, *t), inputs)[1:]
    want = differentiate(call, inputs)[1:]
    ratios = [float(g.norm() / w.norm()) for g, w in zip(got, want, strict=True)]
    assert ratios[2] == pytest.approx(1, abs=0.05)
    if std <= 64:
        assert ratios == pytest.approx([1, 1, 1], abs=0.1)
    # g_q = scale Σ p (g v − Σ p g v) k, a mean of k with weights of g v's range at most; rounding adds a few percent.
    _, k, v = inputs
    g = torch.randn(v.shape, generator=torch.Generator().manual_seed(7))
    products = g @ v.mT
    span = products.amax(-1) - products.amin(-1)
    assert bool((got[0].norm(dim=-1) <= 1.1 * 64**-0.5 * span * k.norm(dim=-1).amax(-1, keepdim=True)).all())
    if std <= 16:
        cosines = [torch.cosine_similarity(a.flatten(), b.flatten(), 0) for a, b in zip(got, want, strict=True)]
        assert min(cosines) > 0.985
