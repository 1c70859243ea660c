"""Calls as models make them: keywords, views, odd shapes, wrong arguments, frozen tensors, in-place flags."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import operator_cases
import pytest
import torch
from operator_cases import CASES, differentiate, nbytes, saving, with_operators
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hotrain.compress.formats import FORMATS, GROUPED
from hotrain.compress.interpose import Compressed
from hotrain.compress.operators import attention, base
from hotrain.compress.report import Buffers

pytestmark = pytest.mark.usefixtures("small_tensors_too")

X = (2, 7, 48)


def distance(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Of all gradients together, against their size, without what is NaN."""
    return operator_cases.distance(*([t.double().nan_to_num() for t in ts[1:]] for ts in (got, want)))


def outcome(call: Callable[..., Any], *inputs: Any) -> Any:
    """The result, or the class of the error."""
    try:
        torch.manual_seed(5)
        return call(*inputs)
    except Exception as error:
        return type(error)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


FORMS: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "mul by keywords": (lambda a, b: torch.mul(input=a, other=b), [rand(*X), rand(*X)]),
    "mul by a number": (lambda a: torch.mul(a, 2.5), [rand(*X)]),
    "a number times": (lambda a: 2 * a, [rand(*X)]),
    "mul by a mask": (lambda a: a * (a > 0), [rand(*X)]),
    # large enough that its own gradient, a sum that may cancel, does not decide
    "mul by one entry": (lambda a, b: a * b, [rand(*X), torch.tensor(4.0, requires_grad=True)]),
    "mul of two dtypes": (lambda a, b: a * b, [rand(*X), rand(*X, dtype=torch.bfloat16)]),
    "mul by itself": (lambda a: a * a, [rand(*X)]),
    "mul of complex": (lambda a: (torch.complex(a, a) * torch.complex(a, a)).abs(), [rand(*X)]),
    "mul of shapes that do not fit": (lambda a, b: a * b, [rand(*X), rand(5)]),
    "a factor between two that are added": (lambda a, b: torch.add(a, 2, b), [rand(*X), rand(*X)]),
    "layer_norm of nothing": (lambda _: F.layer_norm(None, [48]), [rand(*X)]),  # type: ignore[arg-type]
    "rms_norm of nothing": (lambda _: F.rms_norm(None, [48]), [rand(*X)]),  # type: ignore[arg-type]
    "matmul by keywords": (lambda a, b: torch.matmul(input=a, other=b), [rand(*X), rand(2, 48, 5)]),
    "matmul of a method, by keyword": (lambda a, b: a.matmul(other=b), [rand(*X), rand(2, 48, 5)]),
    "matmul with a matrix": (lambda a, b: a @ b, [rand(*X), rand(48, 5)]),
    "matmul of a matrix": (lambda a, b: a @ b, [rand(5, 7), rand(*X)]),
    "matmul with a vector": (lambda a, b: a @ b, [rand(*X), rand(48)]),
    "matmul in place": (operator.imatmul, [rand(*X), rand(2, 48, 48)]),
    "matmul with itself": (lambda a: a @ a.mT, [rand(*X)]),
    "matmul with a constant": (lambda a: a @ torch.ones(2, 48, 5), [rand(*X)]),
    "matmul of two dtypes": (lambda a, b: a @ b, [rand(*X), rand(2, 48, 5, dtype=torch.bfloat16)]),
    "matmul with integers": (lambda a: a @ torch.ones(2, 48, 5, dtype=torch.int64), [rand(*X)]),
    "matmul of complex": (lambda a: (torch.complex(a, a) @ torch.complex(a, a).mT).abs(), [rand(*X)]),
    "matmul of shapes that do not fit": (lambda a, b: a @ b, [rand(*X), rand(2, 47, 5)]),
    "matmul of batches that do not fit": (lambda a, b: a @ b, [rand(*X), rand(3, 48, 5)]),
    "matmul to nothing": (lambda a, b: a @ b, [rand(*X), rand(2, 48, 0)]),
    "matmul of strided rows": (lambda a, b: a[..., ::2] @ b, [rand(*X), rand(2, 24, 5)]),
    "bmm by keywords": (lambda a, b: torch.bmm(input=a, mat2=b), [rand(*X), rand(2, 48, 5)]),
    "bmm of batches that differ": (torch.bmm, [rand(*X), rand(1, 48, 5)]),
    "bmm of four axes": (torch.bmm, [rand(2, *X), rand(2, 2, 48, 5)]),
    "relu by keyword": (lambda a: F.relu(input=a, inplace=False), [rand(*X)]),
    "sigmoid by keyword": (lambda a: torch.sigmoid(input=a), [rand(*X)]),
    "tanh of a method": (lambda a: a.tanh(), [rand(*X)]),
    "gelu of no such kind": (lambda a: F.gelu(a, approximate="cubic"), [rand(*X)]),
    "leaky_relu, another slope": (lambda a: F.leaky_relu(a, 0.3), [rand(*X)]),
    "softmax, no axis": (lambda a: F.softmax(a.flatten(1), dim=1), [rand(*X)]),
    "softmax in float32": (lambda a: F.softmax(a, -1, dtype=torch.float32), [rand(*X, dtype=torch.bfloat16)]),
    "softmax of no such axis": (lambda a: torch.softmax(a, 5), [rand(*X)]),
    "softmax of one axis": (lambda a: torch.softmax(a, 0), [rand(48)]),
    "dropout of nothing": (lambda a: F.dropout(a, 0.0), [rand(*X)]),
    "dropout of all": (lambda a: F.dropout(a, 1.0), [rand(*X)]),
    "dropout beyond one": (lambda a: F.dropout(a, 1.5), [rand(*X)]),
    "dropout in evaluation": (lambda a: F.dropout(a, 0.5, training=False), [rand(*X)]),
    "layer_norm of another shape": (lambda a: F.layer_norm(a, (47,)), [rand(*X)]),
    "layer_norm of all": (lambda a: F.layer_norm(a, X), [rand(*X)]),
    "rms_norm of another shape": (lambda a: F.rms_norm(a, (7,)), [rand(*X)]),
    "group_norm of no such groups": (lambda a: F.group_norm(a, 5), [rand(2, 12, 5)]),
    "group_norm, channels last": (
        lambda a: F.group_norm(a.to(memory_format=torch.channels_last), 3),
        [rand(2, 12, 5, 5)],
    ),
    "batch_norm of two axes": (lambda a: F.batch_norm(a, None, None, training=True), [rand(9, 20)]),
    "batch_norm of one value a channel": (lambda a: F.batch_norm(a, None, None, training=True), [rand(1, 20, 1)]),
    "batch_norm, channels last": (
        lambda a: F.batch_norm(a.to(memory_format=torch.channels_last), None, None, training=True),
        [rand(2, 12, 5, 5)],
    ),
    "linear of a vector": (lambda a, w: F.linear(a, w), [rand(*X), rand(48)]),
    "linear of a matrix": (lambda a, w: F.linear(a, w), [rand(7, 48), rand(5, 48)]),
    "linear of widths that do not fit": (lambda a, w: F.linear(a, w), [rand(*X), rand(5, 47)]),
    "linear of two dtypes": (lambda a, w: F.linear(a, w), [rand(*X), rand(5, 48, dtype=torch.bfloat16)]),
    "linear of a transposed input": (lambda a, w: F.linear(a.mT, w), [rand(2, 48, 7), rand(5, 48)]),
    "conv2d of one image": (lambda a, w: F.conv2d(a, w), [rand(16, 5, 5), rand(4, 16, 3, 3)]),
    "conv2d, padding by name": (lambda a, w: F.conv2d(a, w, padding="same"), [rand(2, 16, 5, 5), rand(4, 16, 3, 3)]),
    "conv2d, lists": (
        lambda a, w: F.conv2d(a, w, stride=[2, 1], padding=[1, 0], dilation=(1,)),
        [rand(2, 16, 5, 5), rand(4, 16, 3, 3)],
    ),
    "conv2d, channels last": (
        lambda a, w: F.conv2d(a.to(memory_format=torch.channels_last), w),
        [rand(2, 16, 5, 5), rand(4, 16, 3, 3)],
    ),
    "conv2d of channels that do not fit": (lambda a, w: F.conv2d(a, w), [rand(2, 16, 5, 5), rand(4, 15, 3, 3)]),
    "max_pool2d with indices": (lambda a: F.max_pool2d(a, 2, return_indices=True)[0], [rand(2, 3, 6, 6)]),
    "max_pool2d, dilated": (lambda a: F.max_pool2d(a, 2, dilation=2), [rand(2, 3, 6, 6)]),
    "max_pool2d of one image": (lambda a: F.max_pool2d(a, 2), [rand(3, 6, 6)]),
    "max_pool2d, channels last": (
        lambda a: F.max_pool2d(a.to(memory_format=torch.channels_last), 3, 2, 1),
        [rand(2, 3, 7, 6)],
    ),
    "max_pool2d of a method's module": (nn.MaxPool2d(2, stride=None), [rand(2, 3, 6, 6)]),
    "max_pool2d of too much padding": (lambda a: F.max_pool2d(a, 2, padding=2), [rand(2, 3, 6, 6)]),
    "max_pool2d, one number each": (lambda a: F.max_pool2d(a, (2,), (1,), [1]), [rand(2, 3, 6, 6)]),
    "max_pool2d, stride of no number": (lambda a: F.max_pool2d(a, 2, ()), [rand(2, 3, 6, 6)]),
    "avg_pool2d by keywords": (
        lambda a: F.avg_pool2d(input=a, kernel_size=[3, 2], stride=(), padding=[1]),
        [rand(2, 3, 6, 6)],
    ),
    "avg_pool2d of one image": (lambda a: F.avg_pool2d(a, 2), [rand(3, 6, 6)]),
    "avg_pool2d, channels last": (
        lambda a: F.avg_pool2d(a.to(memory_format=torch.channels_last), 3, 2, 1),
        [rand(2, 3, 7, 6)],
    ),
    "avg_pool2d of a method's module": (nn.AvgPool2d(2, ceil_mode=True), [rand(2, 3, 7, 6)]),
    "avg_pool2d of too much padding": (lambda a: F.avg_pool2d(a, 2, padding=2), [rand(2, 3, 6, 6)]),
    "avg_pool2d of no stride": (lambda a: F.avg_pool2d(a, 2, 0), [rand(2, 3, 6, 6)]),
    "avg_pool2d by nothing": (lambda a: F.avg_pool2d(a, 2, divisor_override=0), [rand(2, 3, 6, 6)]),
    "attention of three axes": (F.scaled_dot_product_attention, [rand(6, 7, 8) for _ in range(3)]),
    "attention of other batches": (F.scaled_dot_product_attention, [rand(4, 2, 7, 8), *[rand(1, 2, 9, 8)] * 2]),
    "attention of one head for all": (F.scaled_dot_product_attention, [rand(2, 4, 7, 8), *[rand(2, 1, 9, 8)] * 2]),
    "attention of fewer values": (F.scaled_dot_product_attention, [*[rand(2, 2, 7, 8)] * 2, rand(2, 2, 5, 8)]),
    "attention of fewer heads of values": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [rand(2, 4, 7, 8), rand(2, 4, 7, 8), rand(2, 2, 7, 8)],
    ),
    "attention of wider queries": (F.scaled_dot_product_attention, [rand(2, 2, 7, 12), *[rand(2, 2, 7, 8)] * 2]),
    "attention of wider values": (F.scaled_dot_product_attention, [*[rand(2, 2, 7, 8)] * 2, rand(2, 2, 7, 12)]),
    "attention of two dtypes": (
        F.scaled_dot_product_attention,
        [rand(2, 2, 7, 8), *[rand(2, 2, 7, 8, dtype=torch.bfloat16)] * 2],
    ),
    "attention of transposed heads": (
        lambda q: F.scaled_dot_product_attention(*q.view(2, 7, 3, 4, 8).permute(2, 0, 3, 1, 4)),
        [rand(2, 7, 96)],
    ),
    "attention of strided channels": (
        lambda q: F.scaled_dot_product_attention(q.mT, q.mT, q.mT),
        [rand(2, 3, 8, 7)],
    ),
    "attention with dropout": (
        lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5),
        [rand(2, 3, 8, 8)],
    ),
    "attention with a trained bias": (
        lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m),
        [rand(2, 3, 8, 8), rand(3, 8, 8)],
    ),
    "attention, causal and masked": (
        lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(8, 8).bool(), is_causal=True),
        [rand(2, 3, 8, 8)],
    ),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.filterwarnings(
    "ignore:Using padding='same'", "ignore:Mismatch dtype", "ignore:Implicit dimension", "ignore:This overload"
)
def test_every_form_of_a_call_has_pytorchs_result_or_error(name: str) -> None:
    """Also where nothing can be compressed. Gradients: within what the formats lose (`test_operators`)."""
    call, inputs = FORMS[name]
    want = outcome(lambda *t: differentiate(call, list(t)), *inputs)
    got = outcome(lambda *t: differentiate(lambda *u: with_operators(call, *u), list(t)), *inputs)
    if isinstance(want, type):
        assert got is want
        return
    assert not isinstance(got, type), got
    # where its kernel for this layout is another, the last bits of y differ
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=1e-6 if "attention" in name else 0)
    assert [(g.dtype, g.shape) for g in got] == [(w.dtype, w.shape) for w in want]
    assert distance(got, want) <= 0.2


MASKS = {
    "none": None,
    "every query's own": torch.rand(9, 11) > 0.3,
    "every head's own": torch.rand(3, 9, 11) > 0.3,
    "every sample's own": torch.rand(2, 1, 9, 11) > 0.3,
    "of keys": torch.rand(2, 1, 1, 11) > 0.3,
    "numbers": torch.randn(9, 11),
    "numbers, four axes": torch.randn(2, 3, 9, 11),
    "numbers, one row": torch.randn(1, 11),
    "of some keys for none": torch.arange(9)[:, None].ne(4).expand(9, 11),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_masks(mask: str, dtype: torch.dtype) -> None:
    """Booleans and numbers, of two, three and four axes; a row that may look at nothing."""
    m = MASKS[mask]
    m = m.to(dtype) if m is not None and m.is_floating_point() else m
    inputs = [rand(2, 3, n, 16, dtype=dtype) for n in (9, 11, 11)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m)

    got, want = differentiate(lambda *t: with_operators(call, *t), inputs), differentiate(call, inputs)
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(g.isnan(), w.isnan()) for g, w in zip(got, want, strict=True))
    assert distance(got, want) <= 0.25


REFUSED = {
    "one axis": torch.randn(11),
    "one axis of booleans": torch.arange(11) > 3,
    "no axis": torch.tensor(0.0),
    "integers": torch.ones(9, 11, dtype=torch.int64),
    "another precision": torch.randn(9, 11).double(),
}


@pytest.mark.parametrize("mask", REFUSED)
def test_masks_that_pytorch_refuses_are_refused(mask: str) -> None:
    q, k, v = (rand(2, 3, n, 16) for n in (9, 11, 11))
    want = outcome(F.scaled_dot_product_attention, q, k, v, REFUSED[mask])
    assert isinstance(want, type)
    assert outcome(lambda: with_operators(F.scaled_dot_product_attention, q, k, v, REFUSED[mask])) is want


def _image(*shape: int) -> Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last)


LAYOUTS = {
    "channels last": _image(4, 32, 8, 8),
    "some channels of it": _image(4, 32, 8, 8)[:, :16],
    "some rows of it": _image(4, 32, 8, 8)[:, :, 2:6],
    "some columns of it": _image(4, 32, 8, 8)[..., 1:7],
    "one position of it": _image(4, 32, 8, 8)[:, :, :1, :1],
    "five axes": torch.randn(2, 8, 3, 4, 5).to(memory_format=torch.channels_last_3d),
    "turned": torch.randn(4, 32, 8, 6).transpose(2, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_norms_result_has_the_strides_of_pytorchs(layout: str) -> None:
    x = LAYOUTS[layout].detach().requires_grad_()
    got, want = with_operators(F.group_norm, x, 4), F.group_norm(x, 4)
    assert torch.equal(got, want)
    assert got.stride() == want.stride()


def test_the_switch_of_attentions_kernels_is_heeded() -> None:
    """`sdpa_kernel(MATH)` asks for PyTorch's plain formula, whose gradients are then exact."""
    inputs = [rand(2, 3, 7, 16) for _ in range(3)]
    with sdpa_kernel(SDPBackend.MATH):
        got = differentiate(lambda *t: with_operators(F.scaled_dot_product_attention, *t), inputs)
        want = differentiate(F.scaled_dot_product_attention, inputs)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_result_can_be_changed_in_place(name: str) -> None:
    """A view that a custom function returns could not. Codes are a copy, so that gradients are those of forward."""
    inputs = CASES[name].inputs()

    def run(copies: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        y = with_operators(CASES[name].call, *inputs)
        y = y.clone() if copies else y
        y[..., :1] = 0.5
        y *= 2
        return y.detach(), *torch.autograd.grad(y.square().sum(), inputs)

    assert all(torch.equal(g, w) for g, w in zip(run(False), run(True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_as_any_tensor(name: str) -> None:
    """An embedding's weight goes into DeBERTa's dropout: the same mask, and the same draws behind it."""
    inputs = [nn.Parameter(t.detach().clone()) for t in CASES[name].inputs()]

    def run(call: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        return call(*inputs).detach(), torch.rand(())

    got, want = run(lambda *t: with_operators(CASES[name].call, *t)), run(CASES[name].call)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_draws_behind_dropout_are_pytorchs(p: float, inplace: bool) -> None:
    """PyTorch draws a mask only between: all draws behind a dropout of everything were others."""
    x = rand(*X)

    def run(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        y = call(x + 0)
        return y, torch.rand(()), *torch.autograd.grad(y.sum(), x)

    def dropout(t: Tensor) -> Tensor:
        return F.dropout(t, p, inplace=inplace)

    (y, draw, g_x), (want, next_draw, g) = run(lambda t: with_operators(dropout, t)), run(dropout)
    assert torch.equal(y, want)
    assert torch.equal(draw, next_draw)
    torch.testing.assert_close(g_x, g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dropout_rounds_as_pytorch(dtype: torch.dtype) -> None:
    """On a CPU the fused operator, which PyTorch uses on GPUs, has another last bit for p = 0.15, 0.42 and others."""
    x = rand(*X, dtype=dtype)
    for percent in range(1, 100):
        found = []
        for call in (lambda t, p: with_operators(F.dropout, t, p), F.dropout):
            torch.manual_seed(3)
            found.append(call(x, percent / 100))
        assert torch.equal(*found), percent


INPLACE = {
    "relu": lambda x: F.relu(x, inplace=True),
    "silu": lambda x: F.silu(x, inplace=True),
    "hardswish": lambda x: F.hardswish(x, inplace=True),
    "leaky_relu": lambda x: F.leaky_relu(x, inplace=True),
    "dropout": lambda x: F.dropout(x, 0.3, inplace=True),
}


@pytest.mark.parametrize("name", INPLACE)
def test_in_place_flags(name: str) -> None:
    """The tensor itself becomes the result, through a view of it too; a leaf is refused as PyTorch refuses it."""
    x = rand(*X)

    def run(call: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        t = x + 0
        y = call(t[1])
        assert torch.equal(y, t[1])
        return t.detach().clone(), torch.autograd.grad(t.sin().sum(), x)[0]

    got, want = run(lambda t: with_operators(INPLACE[name], t)), run(INPLACE[name])
    assert torch.equal(got[0], want[0])
    assert (got[1] - want[1]).norm() <= 0.2 * want[1].norm()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        with_operators(INPLACE[name], x)
    y = x.exp()  # keeps its result, which must not be overwritten
    with_operators(INPLACE[name], y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", INPLACE)
def test_in_place_a_gradient_keeps_its_layout(name: str) -> None:
    """In channels-last PyTorch's copy would bring zeros in another order, and every gradient before it to theirs."""
    x = rand(2, 32, 24, 24).detach().to(memory_format=torch.channels_last).requires_grad_()
    torch.manual_seed(3)
    (got,) = torch.autograd.grad(with_operators(INPLACE[name], x * 2).square().sum(), x)
    assert got.is_contiguous(memory_format=torch.channels_last)
    torch.manual_seed(3)
    (want,) = torch.autograd.grad(INPLACE[name](x * 2).square().sum(), x)
    assert (got - want).norm() <= 0.2 * want.norm()


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("linear", "conv2d", "layer_norm", "rms"))])
def test_a_weight_changed_in_place_before_backward_raises(name: str) -> None:
    """As in PyTorch: it is kept itself, not a copy."""
    case = CASES[name]
    inputs = case.inputs()
    if len(inputs) == 1:
        pytest.skip("has no weight")
    y = with_operators(case.call, *inputs)
    with torch.no_grad():
        inputs[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", [name for name in CASES if name != "dropout" and "pool2d" not in name])
def test_an_input_changed_in_place_before_backward_does_no_harm(name: str) -> None:
    """Codes are a copy of what it was: where PyTorch has to raise, the gradient is that of the forward."""
    case = CASES[name]
    inputs = case.inputs()
    want = differentiate(lambda *t: with_operators(case.call, *t), inputs)[1:]
    g = torch.randn(case.call(*inputs).shape, generator=torch.Generator().manual_seed(7))
    copies = [t.detach().clone().requires_grad_() for t in inputs]
    x = copies[0] + 0
    y = with_operators(case.call, x, *copies[1:])
    with torch.no_grad():
        x.zero_()
    for got, w in zip(torch.autograd.grad(y, copies, g), want, strict=True):
        assert torch.equal(got, w)


@pytest.mark.parametrize("name", [name for name in CASES if len(CASES[name].shapes) > 1])
def test_frozen_tensors_get_no_gradient_and_the_others_the_same(name: str) -> None:
    """Each in its turn, and all but one."""
    case = CASES[name]
    inputs = case.inputs()
    want = differentiate(lambda *t: with_operators(case.call, *t), inputs)
    for chosen in ({i} for i in range(len(inputs))):
        for trained in (chosen, set(range(len(inputs))) - chosen):
            fixed = [t.detach().requires_grad_(i in trained) for i, t in enumerate(inputs)]
            y = with_operators(case.call, *fixed)
            g = torch.randn(y.shape, generator=torch.Generator().manual_seed(7))
            grads = torch.autograd.grad(y, [fixed[i] for i in sorted(trained)], g)
            for i, got in zip(sorted(trained), grads, strict=True):
                # The same codes, or none where a frozen partner needs none.
                assert (got - want[1 + i]).norm() <= 0.2 * want[1 + i].norm() + 1e-6


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_kept_where_no_gradient_is_asked(name: str) -> None:
    """Under no_grad, and of tensors that need none: PyTorch's own function runs."""
    case = CASES[name]
    inputs = case.inputs()
    fixed = [t.detach() for t in inputs]

    def seeded(call: Callable[..., Tensor], inputs: list[Tensor]) -> Tensor:
        torch.manual_seed(1)
        return call(*inputs)

    def run(*inputs: Tensor) -> Tensor:
        return with_operators(case.call, *inputs)

    with saving() as held:
        with torch.no_grad():
            got = seeded(run, inputs)
        plain = seeded(run, fixed)
    assert held == []
    assert not got.requires_grad
    assert torch.equal(got, seeded(case.call, inputs))
    # `matmul` chooses its kernel by what requires gradients.
    assert torch.equal(plain, seeded(case.call, fixed))


@pytest.mark.parametrize("w_trains", [True, False])
def test_a_frozen_weight_keeps_no_input(w_trains: bool) -> None:
    """LoRA's base layers: g_x asks for the weight alone."""
    for shape, w in (((2, 7, 48), rand(20, 48)), ((2, 16, 6, 6), rand(4, 16, 3, 3))):
        weight = w.detach().requires_grad_(w_trains)
        run: Any = F.linear if w.dim() == 2 else F.conv2d
        x = rand(*shape)
        with saving() as held:
            with_operators(run, x, weight)
        # exact, a frozen weight keeps nothing either
        assert (nbytes(held, [weight]) > 0) == w_trains


@pytest.mark.parametrize("name", ["gelu", "relu", "silu", "tanh", "layer_norm, plain", "softmax", "linear, no bias"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(name: str, bad: float) -> None:
    """In y as in PyTorch. In the gradients of norms, softmax and weights, and of what keeps its input, too; but tanh is
    flat at infinity."""
    case = CASES[name]
    inputs = case.inputs()
    with torch.no_grad():
        inputs[0].view(-1)[5] = bad
    got, want = (differentiate(call, inputs) for call in (lambda *t: with_operators(case.call, *t), case.call))
    torch.testing.assert_close(got[0], want[0], rtol=0, atol=0, equal_nan=True)
    if name == "tanh" and bad == float("inf"):
        assert got[1].isfinite().all()
    elif name != "relu":
        place = 1 + (name == "linear, no bias")
        assert not got[place].isfinite().all()
        assert (got[place].isfinite() <= want[place].isfinite()).all()


@pytest.mark.parametrize("name", ["relu", "relu6", "hardsigmoid", "leaky_relu"])
def test_slopes_at_corners_are_pytorchs(name: str) -> None:
    """Where two pieces meet, and at infinities; g_y's infinities end where PyTorch ends them. ReLU passes on at NaN;
    of some others PyTorch's vectorised and scalar loops differ there."""
    x = torch.tensor([[-3.0, 0.0, 3.0, 6.0, -0.0, float("inf"), -float("inf"), 1.0]] * 2)
    x[0, -1] = float("nan") if name == "relu" else 1.0
    x.requires_grad_()
    g = torch.ones_like(x)
    g[1] = float("inf")
    call = getattr(F, name)
    got, want = (torch.autograd.grad(f(x), x, g)[0] for f in (lambda t: with_operators(call, t), call))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_functional_transforms_see_pytorchs_functions() -> None:
    """`torch.func` differentiates and maps what it is given: nothing is compressed inside."""
    x, w = torch.randn(3, 7, 48), torch.randn(20, 48)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return (F.gelu(F.linear(F.layer_norm(x, (48,)), w)) * 2).square().sum()

    def run() -> tuple[Tensor, Tensor]:
        return torch.func.grad(loss)(w, x), torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x[:, None])

    got, want = with_operators(run), run()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_what_was_compressed_and_what_was_not_is_written_down() -> None:
    buffers = Buffers()
    q = rand(2, 3, 8, 8)
    with Compressed(buffers):
        F.gelu(rand(*X))
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        F.leaky_relu(rand(*X), 0.3)
    assert set(buffers.formats) == {"gelu"}
    assert set(buffers.full) == {"scaled_dot_product_attention", "leaky_relu"}
    assert "kept in full precision: no fused kernel" in str(buffers)


@pytest.mark.parametrize("turned", [False, True])
def test_a_small_operand_of_a_matmul_is_kept_as_it_is(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Itself, so that the gradient it makes is exact; frozen, it lets PyTorch's own run, which keeps nothing else."""
    a, b = rand(*X), rand(2, 5, 48) if turned else rand(2, 48, 5)
    monkeypatch.setattr(base, "SMALL", b.numel() + 1)

    def call(a: Tensor, b: Tensor) -> Tensor:
        return a @ (b.mT if turned else b)

    with saving() as held:
        got = differentiate(lambda *t: with_operators(call, *t), [a, b])
    want = differentiate(call, [a, b])
    assert nbytes(held, [b]) == GROUPED[FORMATS["matmul"]].nbytes(X)
    assert any(t.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for t in held)
    assert torch.equal(got[1], want[1])
    assert 0 < (got[2] - want[2]).norm() <= 0.02 * want[2].norm()  # of 127 steps to a largest entry
    with saving() as held:
        with_operators(call, a, b.detach())
    assert nbytes(held, [b]) == 0


# name → (what it is called in the report, the call, shapes)
LEFT: dict[str, tuple[str, Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "batch_norm": ("batch_norm", lambda x: F.batch_norm(x, torch.zeros(7), torch.ones(7)), (X,)),
    "batch_norm, a module": ("batch_norm", nn.BatchNorm1d(7).eval().requires_grad_(False), (X,)),
    "interpolate": ("interpolate", lambda x: F.interpolate(x, 5, None, "area", None), (X,)),
    "glu": ("glu", lambda x: F.glu(input=x, dim=-1), (X,)),
    "log_softmax": ("log_softmax", lambda x: F.log_softmax(x, dim=-1), (X,)),
    "log_softmax, a function": ("log_softmax", lambda x: torch.log_softmax(x, -1), (X,)),
    "log_softmax, a method": ("log_softmax", lambda x: x.log_softmax(dim=-1), (X,)),
    "matmul with a vector": ("matmul", torch.matmul, (X, (48,))),
}


@pytest.mark.parametrize("name", LEFT)
def test_calls_that_no_operator_supports_are_written_down(name: str) -> None:
    """Those that keep a tensor as large as their input; run as they are, to the bit, and where they train alone."""
    what, call, shapes = LEFT[name]
    inputs = [rand(*shape) for shape in shapes]

    def run(*inputs: Tensor) -> tuple[Tensor, dict[str, str]]:
        buffers = Buffers()
        with Compressed(buffers):
            return call(*inputs), buffers.full

    with saving() as held:
        _, full = run(*inputs)
    assert set(full) == {what}
    assert nbytes(held) >= inputs[0].nbytes
    got, want = (differentiate(f, inputs) for f in (lambda *t: run(*t)[0], call))
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert run(*(t.detach() for t in inputs))[1] == {}


@pytest.mark.parametrize("kind", ["nearest", "bilinear"])
def test_an_interpolation_that_keeps_nothing_is_not_left_full(kind: str) -> None:
    buffers = Buffers()
    with saving() as held, Compressed(buffers):
        F.interpolate(rand(2, 3, 8, 8), scale_factor=2, mode=kind)
    assert held == []
    assert buffers.full == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_attention_s_kernel_is_one_that_the_device_has(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash, and bfloat16 in the memory-efficient kernel, ask for compute capability 8.0."""
    with FakeTensorMode():
        q = torch.empty(2, 3, 8, 16, device="cuda", dtype=dtype)
    monkeypatch.setattr(attention, "_prefers_cudnn", lambda *facts: False)

    def kernel(*capability: int) -> str | None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return attention.backend(q, q, q, None, 0.0, False)

    half = dtype != torch.float32
    assert [kernel(8, 0), kernel(9, 0)] == ["flash" if half else "efficient"] * 2
    assert kernel(7, 5) == (None if dtype == torch.bfloat16 else "efficient")


def test_cudnn_s_kernel_runs_where_pytorch_prefers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked with the facts it depends on, q's heads for one of k and the mask among them; not where it is off."""
    with FakeTensorMode():
        q = torch.empty(2, 6, 8, 16, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(2, 3, 9, 16, device="cuda", dtype=torch.bfloat16)
        mask = torch.zeros(8, 9, device="cuda", dtype=torch.bfloat16)
        flags = torch.zeros(2, 1, 8, 9, device="cuda", dtype=torch.bool)
        trained = torch.zeros(8, 9, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(attention, "_prefers_cudnn", lambda *facts: not asked.append(facts))
    assert attention.backend(q, k, k, None, 0.0, False) == "cudnn"
    assert asked == [(q.device, torch.bfloat16, 2, 8, 9, 16, False, False, 0, torch.bfloat16)]
    assert attention.backend(q, k, k, mask, 0.1, False) == "cudnn"
    assert attention.backend(q, k, k, flags, 0.0, False) == "cudnn"
    assert asked[1:] == [
        (q.device, torch.bfloat16, 2, 8, 9, 16, True, False, 2, torch.bfloat16),
        (q.device, torch.bfloat16, 2, 8, 9, 16, False, False, 4, torch.bool),
    ]
    assert attention.backend(q, k, k, trained, 0.0, False) == "efficient", "it has no gradient"
    assert len(asked) == 3
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert attention.backend(q, k, k, None, 0.0, False) == "flash"
    assert len(asked) == 3


def test_a_tracer_asks_for_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the answer as a constant: one graph."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    torch._dynamo.reset()
    call = torch.compile(lambda x: x + attention._is_ampere(x.device), backend="eager", fullgraph=True)
    assert torch.equal(call(torch.ones(3)), torch.ones(3))


def test_layers_share_a_mask_of_booleans() -> None:
    """It is kept as it came, once, and not as every layer's own numbers."""
    inputs = [rand(2, 3, n, 16) for n in (9, 11, 11)]
    mask = MASKS["every sample's own"]

    def layers(mask: Tensor | None) -> int:
        with saving() as held:
            tensors = [with_operators(F.scaled_dot_product_attention, *inputs, mask) for _ in range(3)]
        assert len(tensors) == 3
        return nbytes(held)

    assert layers(mask) == layers(None) + mask.nbytes


# Dynamo puts these two into its graph without asking a mode.
PASSED_BY = {"hardswish", "hardsigmoid"}


@pytest.mark.parametrize("name", CASES)
def test_a_compilers_graph_has_the_operator(name: str) -> None:
    """Dynamo asks the mode by other names than eager does: what it does not find is kept full without a word."""
    case, buffers, targets = CASES[name], Buffers(), []

    def run(*inputs: Tensor) -> Tensor:
        with Compressed(buffers):
            return case.call(*inputs)

    def backend(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch._dynamo.reset()
    torch.compile(run, backend=backend, fullgraph=True)(*case.inputs())
    assert any("hotrain" in target for target in targets) == (name not in PASSED_BY)
