"""ReLUs that keep bits: PyTorch's gradient to the bit, a sixteenth of bf16 kept, and only where convert put them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hotrain
from hotrain.nn import activation
from hotrain.nn.activation import BitReLU
from hotrain.saved import Bits


@pytest.mark.parametrize(
    "shape",
    [(0,), (1,), (7,), (8,), (9,), (3, 5, 7), (2, 4, 4, 4)],
    ids=["nothing", "one", "under a byte", "a byte", "over a byte", "odd", "image"],
)
def test_bits_round_trip(shape: tuple[int, ...]) -> None:
    flags = torch.rand(shape) > 0.5
    kept = Bits().keep(flags)
    assert kept[0].nbytes == -(-flags.numel() // 8)
    assert torch.equal(Bits().restore(kept, flags.shape), flags)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_is_that_of_relu_to_the_bit(inplace: bool, dtype: torch.dtype) -> None:
    # zeros, a signed zero, a NaN and infinities stand where the mask could differ
    x = torch.randn(64, 33, dtype=dtype)
    x[0, :5] = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf")])
    g = torch.randn_like(x)
    outcomes = []
    for kind in (nn.ReLU, BitReLU):
        leaf = x.clone().requires_grad_()
        y = kind(inplace)(leaf * 1)
        y.backward(g)
        outcomes.append((y.detach(), leaf.grad))
    assert torch.equal(outcomes[0][0].nan_to_num(1e9), outcomes[1][0].nan_to_num(1e9))
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def test_second_derivatives_pass_through() -> None:
    x = torch.randn(40, dtype=torch.float64, requires_grad=True)
    module = BitReLU()
    assert torch.autograd.gradgradcheck(lambda t: module(t) ** 2, (x,))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(True), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())


def test_convert_and_revert() -> None:
    model = network()
    report = hotrain.convert(model, "hot")
    assert report.activations == ["1", "3"]
    assert "2 ReLUs" in str(report)
    assert isinstance(copy.deepcopy(model)[1], BitReLU)
    hotrain.revert(model)
    assert [type(m) for m in model] == [nn.Conv2d, nn.ReLU, nn.Conv2d, nn.ReLU]


@pytest.mark.parametrize(
    ("plan", "shape", "on_gpu", "keeps_bits"),
    [
        ("speed", (2, 8, 4, 4), True, False),  # the convolution behind stays exact and holds the output
        ("graphs", (2, 8, 4, 4), True, False),
        ("memory", (2, 8, 4, 4), True, True),  # every convolution keeps codes instead
        ("speed", (2, 16, 8), True, True),  # tokens: Linear layers are converted for speed as well
        ("speed", (2, 8, 4, 4), False, True),  # without a GPU nothing is planned
    ],
)
def test_images_on_a_gpu_keep_bits_only_where_their_convolutions_keep_codes(
    plan: str, shape: tuple[int, ...], on_gpu: bool, keeps_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation, "_plans", lambda device: on_gpu)
    model = network()
    hotrain.convert(model, "hot", plan=plan)
    x, kept = torch.randn(shape, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        model[3](x)
    assert [t.dtype for t in kept] == [torch.uint8 if keeps_bits else torch.float32]
    # a later plan holds, and nothing of it is left behind
    hotrain.convert(model, "hot", plan="memory")
    assert activation.PLANNED not in model[3].__dict__
    hotrain.convert(model, "hot", plan=plan)
    hotrain.revert(model)
    assert activation.PLANNED not in model[3].__dict__


def test_only_where_the_method_keeps_less_than_x() -> None:
    assert hotrain.convert(network(), "dropout").activations == []


def test_a_filter_leaves_the_others_alone() -> None:
    model = nn.ModuleDict({"a": network(), "b": network()})
    report = hotrain.convert(model, "hot", filter_fn=lambda m, name: name.startswith("a."))
    assert report.activations == ["a.1", "a.3"]
    assert type(model["b"][1]) is nn.ReLU


def test_a_converted_stack_keeps_less_than_exact() -> None:
    # The second convolution's input is ReLU's output: kept whole for ReLU it would hide what the codes save.
    x = torch.randn(4, 32, 16, 16)
    model = network()
    exact = hotrain.saved_bytes(model, x).total
    hotrain.convert(model, "hot")
    # Kept: x and the first ReLU's output in an eighth, both ReLUs' in a thirty-second; exact keeps three tensors.
    assert hotrain.saved_bytes(model, x).total <= (2 / 8 + 2 / 32) / 3 * exact + 2048


def test_transformed_and_exported_it_is_pytorchs() -> None:
    """As converted layers are: `torch.func` and `torch.export` take no autograd function with a context."""
    model, x = network().train(), torch.randn(2, 32, 8, 8)
    want = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    hotrain.convert(model, "hot")
    parameters = dict(model.named_parameters())
    found = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(parameters)
    torch.testing.assert_close([*found.values()], [*want])
    graph = torch.export.export(model, (x,)).graph
    assert not any(str(node.target).startswith("hotrain") for node in graph.nodes)
