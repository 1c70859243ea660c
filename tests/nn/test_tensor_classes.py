"""Inputs of a class with a `__torch_function__`, as fastai's TensorImage and MONAI's MetaTensor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import hotrain
from hotrain.compress.eager import PLAIN, sees_functions


class Tagged(Tensor):
    """With PyTorch's own `__torch_function__`, which makes results of the class."""


class Noted(Tensor):
    """What is computed of it has its note."""

    note: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(y, Noted):
            y.note = [vars(arg).get("note") for arg in args if isinstance(arg, Noted)]
        return y


class Unwrapped(Tensor):
    """As torchvision's images: results are plain tensors."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = super().__torch_function__(func, types, args, kwargs or {})
        return y.as_subclass(Tensor) if isinstance(y, cls) else y


class OwnRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        lifted = x.float()
        return self.weight * (lifted * torch.rsqrt(lifted.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Net(nn.Module):
    """A write in place behind each kind of operator: autograd forbids it for a view that a function returns."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(32, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.ReLU()
        self.layer, self.rows, self.rms = nn.Linear(32, 32), nn.LayerNorm(32), OwnRMSNorm(32)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y *= 2
        y = self.norm(y)
        y += x
        y = self.pool(self.relu(y))  # whose result PyTorch's own keeps
        y *= 2
        y = self.layer(y.movedim(1, -1))
        y += 1
        for function in (self.rows, self.rms, F.gelu):
            y = function(y)
            y *= 2
        return y


def trained(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    y = model(x)
    y.as_subclass(Tensor).square().sum().backward()
    return y, [p.grad.as_subclass(Tensor) for p in model.parameters() if p.grad is not None]


def image(kind: type[Tensor]) -> Tensor:
    x = torch.randn(8, 32, 16, 16, generator=torch.Generator().manual_seed(1)).as_subclass(kind)
    if isinstance(x, Noted):
        x.note = "of x"
    return x


@pytest.mark.parametrize("memory", ["block", "linear"])
@pytest.mark.parametrize("kind", [Tagged, Noted, Unwrapped])
def test_results_are_those_of_the_exact_model(kind: type[Tensor], memory: str) -> None:
    """Value, class and what the class adds; they are written to in place."""
    torch.manual_seed(0)
    exact = Net()
    model = copy.deepcopy(exact)
    report = hotrain.convert(model, memory=memory)
    (y, grads), (want, wanted) = trained(model, image(kind)), trained(exact, image(kind))
    assert type(y) is type(want)
    assert getattr(y, "note", None) == getattr(want, "note", None)
    assert torch.equal(y.as_subclass(Tensor), want.as_subclass(Tensor))
    if kind is Noted:
        assert all(map(torch.equal, grads, wanted))
    if kind is not Unwrapped:  # what follows the first layer is plain then
        assert str(report).count("its input is a Noted") == (2 if kind is Noted else 0)
        assert (f"what is computed of {kind.__name__}  kept in full" in str(report)) == (memory == "block")
    assert "kept for backward" not in str(report)  # predicted of plain tensors


def test_layers_follow_their_method_for_a_class_with_pytorchs_function() -> None:
    """And nothing else is compressed: gradients are those of plain tensors with memory="linear", to the bit."""
    torch.manual_seed(0)
    model = Net()
    other, exact = copy.deepcopy(model), copy.deepcopy(model)
    hotrain.convert(model)
    hotrain.convert(other, memory="linear")
    grads = trained(model, image(Tagged))[1]
    assert all(map(torch.equal, grads, trained(other, image(Tensor))[1]))
    assert not all(map(torch.equal, grads, trained(exact, image(Tensor))[1]))


def test_the_class_is_a_part_of_what_a_layer_remembers() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    report = hotrain.convert(model)
    for kind in (Tensor, Noted, Tensor):
        trained(model, torch.randn(4, 8, 64).as_subclass(kind))
        assert ("its input is a Noted" in str(report)) == (kind is Noted)


def test_classes_whose_function_pytorch_does_not_call_are_as_before() -> None:
    assert not any(map(sees_functions, (*PLAIN, DTensor)))
    assert all(map(sees_functions, (Tagged, Noted, Unwrapped)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_left_to_pytorch() -> None:
    """Strided ones, of no shape: a model whose layers stay exact takes them, and its gradients are exact's."""

    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).to_padded_tensor(0.0)  # type: ignore[no-any-return]

    model = Ragged()
    x = torch.nested.nested_tensor([torch.randn(300, 64), torch.randn(200, 64)])
    want = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    hotrain.convert(model, "exact", memory="block", plan="memory")
    got = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(map(torch.equal, got, want))
