"""`linear` and `conv2d` as functions: exact forward, gradcheck, what is refused, what is computed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import hotrain
from hotrain import functional

NAMES = hotrain.presets()
F64 = torch.float64
OFF: dict[str, Any] = {"grad_input_bits": None, "grad_weight_bits": None, "saved_bits": None}
# Nothing quantized and full rank: HLA's tiles, drawn rows (8 of the last 8), LBP's 8×8 tiles
EXACT = [
    hotrain.preset("hla", rank=16),
    hotrain.preset("hot-unbiased", rank=16, **OFF),
    hotrain.preset("lbp-wht", rank=64),
]

LEADS = [
    (),  # 1-D input: a vector
    (5,),  # 2-D
    (2, 19),  # 3-D
    (2, 3, 4),  # 4-D, a map
    (2, 2, 3, 3),  # 5-D
]


def operands(lead: tuple[int, ...], inputs: int = 3, outputs: int = 2, dtype: torch.dtype = F64) -> list[Tensor]:
    shapes = ((*lead, inputs), (outputs, inputs), (outputs,))
    return [torch.randn(shape, dtype=F64).to(dtype).requires_grad_() for shape in shapes]


def gradients(x: Tensor, w: Tensor, g_y: Tensor, method: Any, key: int = 1) -> tuple[Tensor, Tensor]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    functional.linear(x, w, method=method, key=key).backward(g_y)
    assert x.grad is not None
    assert w.grad is not None
    return x.grad, w.grad


# --- gradcheck -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", EXACT, ids=lambda m: m.name)
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_gradcheck_of_inputs_of_any_rank(lead: tuple[int, ...], method: hotrain.Method) -> None:
    """g_x, g_w and g_b against finite differences, entry by entry."""

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return functional.linear(x, w, b, method=method, key=1)

    assert torch.autograd.gradcheck(run, tuple(operands(lead)))


@pytest.mark.parametrize("method", EXACT, ids=lambda m: m.name)
@pytest.mark.parametrize("tokens", [1, 7, 49, 197, 577])
def test_gradcheck_of_any_number_of_tokens(tokens: int, method: hotrain.Method) -> None:
    for grid in (None, hotrain.Grid(math.isqrt(tokens), math.isqrt(tokens), tokens - math.isqrt(tokens) ** 2)):

        def run(x: Tensor, w: Tensor, grid: hotrain.Grid | None = grid) -> Tensor:
            return functional.linear(x, w, method=method, grid=grid, key=1)

        assert torch.autograd.gradcheck(run, tuple(operands((2, tokens))[:2]), fast_mode=True)


@settings(max_examples=80, deadline=None)
@given(
    lead=st.lists(st.integers(0, 7), min_size=0, max_size=4).map(tuple),
    inputs=st.integers(1, 33),
    outputs=st.integers(1, 33),
    which=st.sampled_from(range(3)),
)
def test_full_rank_without_bits_is_exact_for_any_shape(
    lead: tuple[int, ...], inputs: int, outputs: int, which: int
) -> None:
    x, w, _ = operands(lead, inputs, outputs)
    g_y = torch.randn(*lead, outputs, dtype=F64)
    want = torch.autograd.grad(F.linear(x, w), (x, w), g_y)
    got = gradients(x, w, g_y, EXACT[which])
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=1e-11)
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=1e-11)


@settings(max_examples=60, deadline=None)
@given(
    lead=st.lists(st.integers(0, 9), min_size=0, max_size=4).map(tuple),
    inputs=st.integers(1, 20),
    outputs=st.integers(1, 20),
    name=st.sampled_from(NAMES),
)
def test_every_preset_takes_any_shape(lead: tuple[int, ...], inputs: int, outputs: int, name: str) -> None:
    """Finite gradients of the right shapes, the same for the same key."""
    x, w, _ = operands(lead, inputs, outputs, torch.float32)
    g_y = torch.randn(*lead, outputs)
    g_x, g_w = gradients(x, w, g_y, name)
    assert g_x.shape == x.shape
    assert g_w.shape == w.shape
    assert torch.isfinite(g_x).all()
    assert torch.isfinite(g_w).all()
    again = gradients(x, w, g_y, name)
    assert torch.equal(again[0], g_x)
    assert torch.equal(again[1], g_w)


# --- forward ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64], ids=str)
@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_forward_is_exact_to_the_bit(lead: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    x, w, b = operands(lead, 20, 12, dtype)
    assert torch.equal(functional.linear(x, w, b, method=name), F.linear(x, w, b))
    assert torch.equal(functional.linear(x, w, method=name), F.linear(x, w))


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_under_autocast(dtype: torch.dtype) -> None:
    """bf16 products of float32, none of float64, as PyTorch's own; gradients come back in the parameters' dtype."""
    x, w, b = operands((2, 20), 20, 12, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        want = F.linear(x, w, b)
        got = functional.linear(x, w, b, method="hot-unbiased")
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    got.sum().backward()
    assert all(t.grad is not None and t.grad.dtype == dtype for t in (x, w, b))


@pytest.mark.parametrize("name", NAMES)
def test_a_transposed_weight_is_the_same_layer(name: str) -> None:
    """transformers' Conv1D stores (I, O)."""
    x, w, b = operands((2, 19), 20, 12)
    g_y = torch.randn(2, 19, 12, dtype=F64)
    turned = w.detach().T.contiguous().requires_grad_()
    x2 = x.detach().clone().requires_grad_()
    functional.linear(x, w, b, method=name, key=5).backward(g_y)
    y = functional.linear(x2, turned, b.detach(), method=name, key=5, transposed=True)
    assert torch.equal(y, torch.addmm(b.detach(), x2.view(-1, 20), turned).view(2, 19, 12))
    y.backward(g_y)
    torch.testing.assert_close(x2.grad, x.grad, rtol=0, atol=1e-12)
    assert turned.grad is not None
    torch.testing.assert_close(turned.grad.T, w.grad, rtol=0, atol=1e-12)


# --- what is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("asked", ["x", "w", "b", "xw", "xb", "wb", "xwb"])
def test_only_what_is_asked(name: str, asked: str) -> None:
    """And what is asked does not depend on what else is."""
    x, w, b = operands((2, 20), 20, 12)
    g_y = torch.randn(2, 20, 12, dtype=F64)
    everything = torch.autograd.grad(functional.linear(x, w, b, method=name, key=3), (x, w, b), g_y)
    parts = {"x": x, "w": w, "b": b}
    chosen = {k: (t.detach().requires_grad_() if k in asked else t.detach()) for k, t in parts.items()}
    functional.linear(chosen["x"], chosen["w"], chosen["b"], method=name, key=3).backward(g_y)
    for (k, t), want in zip(chosen.items(), everything, strict=True):
        if k in asked:
            assert t.grad is not None
            torch.testing.assert_close(t.grad, want, rtol=0, atol=1e-12)
        else:
            assert t.grad is None


@pytest.mark.parametrize("name", NAMES)
def test_the_bias_gradient_is_the_exact_sum(name: str) -> None:
    x, w, b = operands((2, 20), 20, 12)
    g_y = torch.randn(2, 20, 12, dtype=F64)
    functional.linear(x, w, b, method=name).backward(g_y)
    assert b.grad is not None
    torch.testing.assert_close(b.grad, g_y.sum((0, 1)), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_views_give_the_same(name: str) -> None:
    """x and g_y transposed, strided, expanded."""
    x, w, _ = operands((18, 20), 20, 12)
    x = x.detach()
    g_y = torch.randn(18, 20, 12, dtype=F64)
    want = gradients(x, w, g_y, name)
    views = (
        (x.permute(2, 0, 1).contiguous().permute(1, 2, 0), g_y.transpose(0, 1).contiguous().transpose(0, 1)),
        (x.repeat_interleave(2, 1)[:, ::2], g_y.repeat_interleave(2, 2)[..., ::2]),
    )
    for x_view, g_view in views:
        for got, expected in zip(gradients(x_view, w, g_view, name), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    ones = torch.ones((), dtype=F64).expand(18, 20, 12)
    for got, expected in zip(gradients(x, w, ones, name), gradients(x, w, ones.clone(), name), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lead", [(0,), (0, 197), (3, 0), (0, 4, 4)], ids=str)
def test_an_empty_batch_works(lead: tuple[int, ...], name: str) -> None:
    x, w, b = operands(lead, 20, 12, torch.float32)
    functional.linear(x, w, b, method=name).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    for t in (w, b):
        assert t.grad is not None
        assert torch.equal(t.grad, torch.zeros_like(t))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_16_bit_inputs_have_their_dtype(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x, w, b = operands((2, 20), 20, 12, dtype)
        functional.linear(x, w, b, method=name).sum().backward()
        assert all(t.grad is not None and t.grad.dtype == dtype for t in (x, w, b))


@pytest.mark.parametrize("name", [n for n in NAMES if hotrain.preset(n).draws])
def test_another_key_draws_other_numbers(name: str) -> None:
    x, w, _ = operands((2, 48), 20, 12)
    g_y = torch.randn(2, 48, 12, dtype=F64)
    first, second = (gradients(x, w, g_y, name, key)[1] for key in (1, 2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("key", [0, -1, 2**63, 2**64 - 1, 2**64 + 3, -(2**63)])
def test_any_integer_is_a_key(key: int) -> None:
    """Of which 64 bits count: forward and backward agree on them (full rank, so that a wrong draw shows at once)."""
    method = hotrain.preset("hot-unbiased", rank=16, **OFF)
    x, w, _ = operands((2, 48), 20, 12)
    g_y = torch.randn(2, 48, 12, dtype=F64)
    g_w = gradients(x, w, g_y, method, key)[1]
    torch.testing.assert_close(g_w, g_y.flatten(0, 1).T @ x.detach().flatten(0, 1), rtol=0, atol=1e-11)
    low = [gradients(x, w, g_y, "hot-unbiased", k)[1] for k in (key, key % 2**64)]
    assert torch.equal(low[0], low[1])


# --- what is refused -------------------------------------------------------------------------------------------------

LINEAR_ERRORS = [
    (torch.randn(2, 8, dtype=torch.complex64), TypeError, "complex64"),
    (torch.ones(2, 8, dtype=torch.int64), TypeError, "int64"),
    (torch.ones(2, 8, dtype=torch.bool), TypeError, "bool"),
    (torch.randn(2, 8).to_sparse(), TypeError, "sparse"),
    (torch.randn(2, 7), ValueError, r"\(2, 7\)"),
    (torch.randn(()), ValueError, r"\(\)"),
    ([[1.0] * 8], TypeError, "list"),
]


@pytest.mark.parametrize(("x", "error", "got"), LINEAR_ERRORS, ids=[g for _, _, g in LINEAR_ERRORS])
def test_linear_refuses(x: Any, error: type[Exception], got: str) -> None:
    """Naming the layer, what was got, what is accepted and (for dtypes) what to do."""
    with pytest.raises(error, match=got) as caught:
        functional.linear(x, torch.randn(4, 8), method="hot", name="blocks.3.mlp.fc1")
    assert "blocks.3.mlp.fc1" in str(caught.value)
    assert "accepted" in str(caught.value)


@pytest.mark.parametrize(
    ("x", "error", "got"),
    [
        (torch.randn(1, 4, 5, 5, dtype=torch.complex64), TypeError, "complex64"),
        (torch.ones(1, 4, 5, 5, dtype=torch.int32), TypeError, "int32"),
        (torch.randn(1, 3, 5, 5), ValueError, r"\(1, 3, 5, 5\)"),
        (torch.randn(4, 5), ValueError, r"\(4, 5\)"),
    ],
    ids=["complex", "integer", "channels", "axes"],
)
def test_conv2d_refuses(x: Tensor, error: type[Exception], got: str) -> None:
    with pytest.raises(error, match=got) as caught:
        functional.conv2d(x, torch.randn(6, 4, 3, 3), method="hot", name="layer1.conv1")
    assert "layer1.conv1" in str(caught.value)


@pytest.mark.parametrize("method", [3, None, object()], ids=["number", "None", "object"])
def test_a_method_is_a_name_or_a_value(method: Any) -> None:
    with pytest.raises(ValueError, match=r"is neither a preset's name \(exact, hot, .*\) nor a hotrain.Method"):
        functional.linear(torch.randn(2, 8), torch.randn(4, 8), method=method)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_a_second_derivative_is_refused_by_name(name: str, kind: str) -> None:
    """Where the gradients are computed, as autograd would leave out what goes through codes without a word."""
    if kind == "linear":
        x, w = torch.randn(2, 20, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
        y = functional.linear(x, w, method=name, name="head.fc")
    else:
        x, w = torch.randn(2, 8, 5, 5, requires_grad=True), torch.randn(4, 8, 3, 3, requires_grad=True)
        y = functional.conv2d(x, w, method=name, name="head.fc")
    for t in (x, w):
        with pytest.raises(RuntimeError, match=r"'head\.fc' has no second derivative") as caught:
            torch.autograd.grad(y.square().sum(), t, retain_graph=True, create_graph=True)
        assert "filter_fn" in str(caught.value)


def test_x_changed_in_place_is_noticed_or_harmless() -> None:
    """What was kept as codes cannot change any more; what was kept as x itself is watched by autograd."""
    for name in NAMES:
        x, w = torch.randn(2, 32, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
        inner = x * 1
        y = functional.linear(inner, w, method=name, key=1)
        want = torch.autograd.grad(y.sum(), w, retain_graph=True)[0]
        with torch.no_grad():
            inner.zero_()
        method = hotrain.preset(name)
        if method.saved.bits is None and method.grad_weight.tile == 1:
            with pytest.raises(RuntimeError, match=r"modified .*inplace"):
                torch.autograd.grad(y.sum(), w)
        else:
            assert torch.equal(torch.autograd.grad(y.sum(), w)[0], want)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda x: functional.linear(x, None), TypeError, "linear: the weight is a NoneType"),
        (lambda x: functional.linear(x, x), ValueError, r"the weight has shape \(2, 40, 64\); accepted are 2 axes"),
        (lambda x: functional.linear(x, x[0], grid=(5, 8)), TypeError, r"the grid is \(5, 8\); .*hotrain.Grid"),
        (lambda x: functional.conv2d(x, x), ValueError, "accepted are 4 axes"),
        (lambda x: functional.conv2d(x, x[0].view(8, 5, 8, 8), groups=3), ValueError, "divisors of the 8 output"),
        (lambda x: functional.conv2d(x, x[0].view(8, 5, 8, 8), groups=0), ValueError, "groups=0"),
    ],
    ids=["no weight", "3-d weight", "tuple as grid", "3-d kernel", "groups that do not divide", "no groups"],
)
def test_a_bad_argument_is_named(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call(torch.randn(2, 40, 64))
