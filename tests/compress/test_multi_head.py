"""nn.MultiheadAttention, one call for a function mode: what is in it is compressed as if it were written out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from operator_cases import nbytes, saving
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain
from hotrain.compress.report import ATTRIBUTE

pytestmark = pytest.mark.usefixtures("small_tensors_too")

C, HEADS, TOKENS, SAMPLES = 48, 4, 24, 3


def causal() -> Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


def padding() -> Tensor:
    return torch.arange(TOKENS) >= torch.tensor([[TOKENS], [TOKENS - 5], [TOKENS - 9]])


@dataclass(frozen=True)
class Case:
    """options: of the module; given: of its call; of: which of three inputs are query, key and value."""

    options: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    of: tuple[int, int, int] = (0, 0, 0)
    widths: tuple[int, int, int] = (C, C, C)
    unbatched: bool = False


# Each a branch of `F.multi_head_attention_forward`.
CASES = {
    "tokens first": Case({"batch_first": False}),
    "samples first": Case(),
    "unbatched": Case(unbatched=True),
    "without biases": Case({"bias": False}),
    "weights, the mean of the heads": Case(given={"need_weights": True}),
    "weights of each head": Case(given={"need_weights": True, "average_attn_weights": False}),
    "weights of a mask": Case(given={"need_weights": True, "attn_mask": causal()}),
    "padding": Case(given={"key_padding_mask": padding()}),
    "a mask": Case(given={"attn_mask": causal()}),
    "a mask of numbers": Case(given={"attn_mask": torch.randn(TOKENS, TOKENS)}),
    "a mask for each head": Case(given={"attn_mask": torch.randn(SAMPLES * HEADS, TOKENS, TOKENS)}),
    "causal": Case(given={"attn_mask": causal(), "is_causal": True}),
    "a mask and padding": Case(given={"attn_mask": causal(), "key_padding_mask": padding()}),
    "keys of others": Case(of=(0, 1, 1)),
    "keys and values of others": Case(of=(0, 1, 2)),
    "other widths": Case({"kdim": 32, "vdim": 64}, of=(0, 1, 2), widths=(C, 32, 64)),
    "a key and a value more": Case({"add_bias_kv": True}),
    "a zero more": Case({"add_zero_attn": True}, {"attn_mask": causal(), "key_padding_mask": padding()}),
    "dropout": Case({"dropout": 0.3}),
    "dropout of weights": Case({"dropout": 0.3}, {"need_weights": True}),
}


class Around(nn.Module):
    """The module in a model, which `convert` takes."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.attention = nn.MultiheadAttention(C, HEADS, **{"batch_first": True, **case.options})

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = {"need_weights": False, **self.case.given}
        y, weights = self.attention(*(inputs[i] for i in self.case.of), **given)
        return (y,) if weights is None else (y, weights)


def built(name: str, dtype: torch.dtype = torch.float32) -> tuple[Around, list[Tensor]]:
    case = CASES[name]
    model = Around(case).to(dtype)
    for p in model.parameters():
        if p.dim() == 1:
            nn.init.normal_(p, std=0.1)
    shape = (TOKENS,) if case.unbatched else (SAMPLES, TOKENS)
    shape = shape if model.attention.batch_first else shape[::-1]
    inputs = [torch.randn(*shape, width, dtype=dtype, requires_grad=True) for width in case.widths]
    return model, [inputs[i] if i in case.of else inputs[i].detach() for i in range(3)]


def results(run: Callable[..., Any], model: nn.Module, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Of forward, and the gradients of inputs and parameters for a fixed gradient of each."""
    torch.manual_seed(3)  # dropout draws alike
    found = list(run(*inputs))
    draw = torch.Generator().manual_seed(4)
    given = [torch.randn(y.shape, generator=draw, dtype=y.dtype) for y in found]
    wanted = [t for t in (*inputs, *model.parameters()) if t.requires_grad]
    return found, list(torch.autograd.grad(found, wanted, given))


@pytest.mark.parametrize("name", CASES)
def test_what_is_in_it_is_compressed(name: str) -> None:
    """Results to the bit and in PyTorch's memory layout; gradients near; fewer bytes; and nothing of it in full."""
    model, inputs = built(name)
    exact = copy.deepcopy(model)
    hotrain.convert(model, "exact", memory="block", plan="memory")
    with saving() as held:
        got, gradients = results(model, model, inputs)
    with saving() as whole:
        want, exact_gradients = results(exact, exact, inputs)
    for y, z in zip(got, want, strict=True):
        assert torch.equal(y, z)
        assert y.stride() == z.stride()
    # 4 bits of x: 0.06 to 0.1 of its size, and what q, k and v lose in less; all of it in some gradients, and twice.
    for g, e in zip(gradients, exact_gradients, strict=True):
        assert g.stride() == e.stride()
        assert (g - e).norm() <= 0.2 * e.norm() + 1e-6
    assert nbytes(held, list(model.parameters())) < nbytes(whole, list(exact.parameters()))
    assert "multi_head_attention_forward" not in model.__dict__[ATTRIBUTE].full


# Compiled, a dropout draws its bits at once, others than in eager mode.
@pytest.mark.parametrize("name", [name for name in CASES if name != "dropout of weights"])
def test_compiled_it_is_what_it_is_in_eager_mode(name: str) -> None:
    """One graph; results to the bit, gradients near exact's."""
    model, inputs = built(name)
    exact = copy.deepcopy(model)
    hotrain.convert(model, "exact", memory="block", plan="memory")
    torch._dynamo.reset()
    got, gradients = results(torch.compile(model, backend="aot_eager", fullgraph=True), model, inputs)
    want, exact_gradients = results(exact, exact, inputs)
    for y, z in zip(got, want, strict=True):
        assert torch.equal(y, z)
    for g, e in zip(gradients, exact_gradients, strict=True):
        assert (g - e).norm() <= 0.2 * e.norm() + 1e-6


def test_of_a_class_with_functions_of_its_own_it_stays_whole() -> None:
    """Such a class sees the call itself, as from PyTorch."""
    seen: list[Any] = []

    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    model, inputs = built("samples first")
    hotrain.convert(model, "exact", memory="block", plan="memory")
    model(*(t.detach().as_subclass(Own).requires_grad_() for t in inputs))  # type: ignore[attr-defined]
    assert F.multi_head_attention_forward in seen


@pytest.mark.parametrize("compiled", [False, True])
def test_padding_of_another_shape_is_refused(compiled: bool) -> None:
    """As by PyTorch, also where it has as many entries: (T, B) for (B, T)."""
    model = Around(Case(given={"key_padding_mask": padding().T}))
    hotrain.convert(model, "exact", memory="block", plan="memory")
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    with pytest.raises(Exception, match=f"Expected key_padded_mask.shape\\[0\\] to be {SAMPLES}, but got {TOKENS}"):
        run(*[torch.randn(SAMPLES, TOKENS, C, requires_grad=True)] * 3)


def test_it_calls_what_a_user_has_put_into_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And PyTorch's own again, where that is taken out."""
    model, inputs = built("samples first")
    exact = copy.deepcopy(model)
    hotrain.convert(model, "exact", memory="block", plan="memory")
    plain = F.scaled_dot_product_attention
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", lambda *args, **given: 2 * plain(*args, **given))
        replaced = model(*inputs)[0]
        assert torch.equal(replaced, exact(*inputs)[0])
        torch._dynamo.reset()
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(*inputs)[0], replaced)
    assert torch.equal(model(*inputs)[0], exact(*inputs)[0])
    assert not torch.equal(model(*inputs)[0], replaced)


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_s_gradients_are_near_those_of_float64(norm_first: bool) -> None:
    """Two blocks of nn.TransformerEncoder, post-norm as by default and pre-norm."""
    layer = nn.TransformerEncoderLayer(C, HEADS, 96, 0.0, batch_first=True, norm_first=norm_first)
    model: nn.Module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)  # the blocks are copies of one
    x = torch.randn(SAMPLES, TOKENS, C, requires_grad=True)
    double, wide = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    g = torch.randn_like(x)
    want = torch.autograd.grad(double(wide), (wide, *double.parameters()), g.double())
    hotrain.convert(model, "exact", memory="block", plan="memory")
    got = torch.autograd.grad(model(x), (x, *model.parameters()), g)
    error = sum((a - b).norm() ** 2 for a, b in zip(got, want, strict=True)) ** 0.5
    assert 0 < error <= 0.2 * sum(b.norm() ** 2 for b in want) ** 0.5
