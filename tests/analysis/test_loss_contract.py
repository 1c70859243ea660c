"""What a loss_fn may be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotrain.layer_gradients import loss_of

X, Y = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])


def _both(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    "loss_fn",
    [
        _both,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        F.cross_entropy,
        nn.CrossEntropyLoss(),
        lambda output, target: F.cross_entropy(output, target),
        lambda output, target: -output.log_softmax(1).gather(1, target[:, None]).mean(),
        None,
    ],
    ids=["function", "lambda", "functional", "module", "criterion", "method of the output", "default"],
)
@pytest.mark.parametrize("pack", [tuple, list])
def test_contracts_agree(loss_fn, pack: type) -> None:
    model = nn.Linear(8, 3)
    want = F.cross_entropy(model(X), Y)
    torch.testing.assert_close(loss_of(model, pack((X, Y)), loss_fn), want)


def test_a_criterion_that_casts_its_output_leaves_the_model_alone() -> None:
    model = nn.Linear(8, 3).bfloat16()
    loss = loss_of(model, (X.bfloat16(), Y), lambda output, target: F.cross_entropy(output.float(), target))
    assert loss.dtype == torch.float32
    assert model.weight.dtype == torch.bfloat16
    assert model.double().weight.dtype == torch.float64  # casting works again


class Named(nn.Linear):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> SimpleNamespace:  # type: ignore[override]
        logits = super().forward(x)
        return SimpleNamespace(logits=logits, loss=None if labels is None else F.cross_entropy(logits, labels))


def test_mappings_and_model_outputs() -> None:
    model = Named(8, 3)
    want = F.cross_entropy(model(X).logits, Y)
    assert torch.equal(loss_of(model, {"x": X, "labels": Y}), want)
    assert torch.equal(loss_of(model, (X, Y), F.cross_entropy), want)
    with pytest.raises(ValueError, match="add its labels"):
        loss_of(model, {"x": X})


def test_errors_of_the_loss_itself_are_not_hidden() -> None:
    def broken(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0]).no_such_method()

    with pytest.raises(AttributeError, match="no_such_method"):
        loss_of(nn.Linear(8, 3), (X, Y), broken)
    with pytest.raises(RuntimeError):  # shapes that do not fit
        loss_of(nn.Linear(9, 3), (X, Y), _both)


@pytest.mark.parametrize(
    ("loss_fn", "batch", "message"),
    [
        (lambda m, b: m(b[0]), (X, Y), r"shape \(4, 3\)"),
        (lambda m, b: 1.0, (X, Y), "got float"),
        (lambda m, b: m(b[0]).sum().detach(), (X, Y), "requires no grad"),
        (lambda m, b: m(b[0]).sum() * float("nan"), (X, Y), "the loss is nan"),
        (F.cross_entropy, X, "batches of"),
        (None, X, "without a loss_fn"),
    ],
)
def test_bad_losses(loss_fn, batch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loss_of(nn.Linear(8, 3), batch, loss_fn)
