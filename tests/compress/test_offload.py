"""Offloading of a whole model: the same gradients from tensors that were away, in eager mode and compiled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from small_models import ConvNet
from torch import Tensor, nn

import hotrain
from hotrain.compress import offload


def gradients(model: nn.Module, forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    model.zero_grad()
    forward(torch.ones(2, 32, 8, 8)).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_without(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 1)
    travelled: list[Tensor] = []
    plain_empty = torch.empty_like

    def empty_like(tensor: Tensor, **options: object) -> Tensor:
        travelled.append(tensor)
        return plain_empty(tensor, **options)  # type: ignore[arg-type]

    torch.manual_seed(0)
    model = ConvNet()
    model.drop.p = 0.0  # a compiler draws its own masks
    torch._dynamo.reset()
    make = (lambda m: torch.compile(m, backend="aot_eager")) if compiled else (lambda m: m)
    want = gradients(model, make(model))
    keys = list(model.state_dict())
    hotrain.convert(model, plan=hotrain.Point("exact+offload", offload=True))
    assert list(model.state_dict()) == keys
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch._dynamo.reset()
        with monkeypatch.context() as patch:
            patch.setattr(offload.torch, "empty_like", empty_like)
            got = gradients(twin, make(twin))
        assert (2, 32, 8, 8) in {tuple(tensor.shape) for tensor in travelled}
        assert not {p.data_ptr() for p in twin.parameters()} & {t.data_ptr() for t in travelled}, "parameters stay"
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        travelled.clear()
    hotrain.revert(model)
    assert type(model) is ConvNet
