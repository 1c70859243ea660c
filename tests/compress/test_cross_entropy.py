"""Cross entropy of interpolated logits in compiled graphs: loss and gradients against autograd in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import hotrain
from hotrain.compress import losses
from hotrain.compress.operators import cross_entropy

IMAGES, CLASSES, SIZE = 5, 19, (12, 15)
WEIGHT = torch.rand(CLASSES) + 0.5
Loss = Callable[[Tensor, Tensor], Tensor]
UP: dict[str, dict[str, Any]] = {
    "a factor": {"scale_factor": 4},
    "a size, corners aligned": {"size": (31, 33), "align_corners": True},
}
LOSSES: dict[str, dict[str, Any]] = {
    "a mean": {"ignore_index": 255},
    "a sum": {"reduction": "sum"},
    "weights of classes": {"weight": WEIGHT, "ignore_index": 0},
}


class Head(nn.Module):
    """The end of a segmentation model, which returns its logits too."""

    def __init__(self, up: dict[str, Any], loss: Loss) -> None:
        super().__init__()
        self.up, self.loss = up, loss

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return self.loss(F.interpolate(x, mode="bilinear", **self.up), target), x * 1


class Graphs:
    """What a model's compiled graphs have, from the tracer and in the joint graph."""

    def __init__(self) -> None:
        self.targets: list[str] = []
        self.largest = 0

    def compiled(self, model: nn.Module) -> Any:
        torch._dynamo.reset()

        def count(gm: torch.fx.GraphModule, _: Any) -> Any:
            for node in gm.graph.nodes:
                value = node.meta.get("val")
                if isinstance(value, Tensor) and value.is_floating_point():
                    self.largest = max(self.largest, value.numel())
            return make_boxed_func(gm.forward)

        def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
            losses.in_pieces(gm.graph)  # as Inductor does
            gm.recompile()
            self.targets += [str(node.target) for node in gm.graph.nodes]
            of_aot = aot_autograd(fw_compiler=count, bw_compiler=count)
            return of_aot(gm, inputs)

        return torch.compile(model, backend=backend, fullgraph=True)

    @property
    def has_it(self) -> bool:
        return any("interpolated_cross_entropy" in target for target in self.targets)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One or two images at a time, and from any size on."""
    monkeypatch.setattr(losses, "_SMALLEST", 1)
    monkeypatch.setattr(cross_entropy, "_PIECE", 2 * CLASSES * 31 * 33)


def batch(up: dict[str, Any], layout: torch.memory_format = torch.contiguous_format) -> tuple[Tensor, Tensor]:
    """Logits, and labels of which a tenth is ignored."""
    x = (3 * torch.randn(IMAGES, CLASSES, *SIZE)).to(memory_format=layout)
    size = F.interpolate(x, mode="bilinear", **up).shape[2:]
    target = torch.randint(0, CLASSES, (IMAGES, *size))
    return x.requires_grad_(), target


def converted(up: dict[str, Any], loss: Loss) -> tuple[nn.Module, Graphs]:
    model = Head(up, loss).train()
    hotrain.convert(model, "exact", memory="block")
    return model, Graphs()


def step(call: Any, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of the logits."""
    loss, _ = call(x, target)
    (gradient,) = torch.autograd.grad(loss * 3, x)
    return loss, gradient


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("up", UP)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients(loss: str, up: str, layout: torch.memory_format) -> None:
    """In float32, sums of some 10⁴ terms; and nothing of the size of all interpolated logits is in a graph."""
    x, target = batch(UP[up], layout)
    ignored = LOSSES[loss].get("ignore_index", -100)
    target[torch.rand(target.shape) < 0.1] = ignored
    model, graphs = converted(UP[up], lambda y, t: F.cross_entropy(y, t, **LOSSES[loss]))
    got = step(graphs.compiled(model), x, target)
    wide = {k: v.double() if isinstance(v, Tensor) else v for k, v in LOSSES[loss].items()}
    exact = Head(UP[up], lambda y, t: F.cross_entropy(y, t, **wide))
    want = step(exact, x.detach().double().requires_grad_(), target)
    assert graphs.has_it
    assert graphs.largest < CLASSES * target.numel()
    assert got[0].dtype == torch.float32
    assert got[1].stride() == x.stride()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


def test_under_autocast_the_loss_is_in_float32() -> None:
    """The gradient is rounded to bfloat16 before the two products, which round again: three roundings of 2⁻⁹."""
    up = UP["a factor"]
    x, target = batch(up)
    x = x.detach().bfloat16().requires_grad_()
    model, graphs = converted(up, F.cross_entropy)
    with torch.autocast("cpu", torch.bfloat16):
        exact = Head(up, lambda y, t: F.cross_entropy(y.float(), t))
        got = step(graphs.compiled(model), x, target)
    want = step(exact, x.detach().double().requires_grad_(), target)
    assert graphs.has_it
    assert got[1].dtype == torch.bfloat16
    assert got[0].dtype == torch.float32
    assert got[0].item() == pytest.approx(want[0].item(), rel=1e-3)
    error = (got[1].double() - want[1]).norm() / want[1].norm()
    assert error < 3 * 2**-8, error


def test_a_scaled_loss_in_float16_has_the_gradient_of_the_exact_one() -> None:
    """GradScaler multiplies with 2¹⁶ first, and a mean divides by more pixels than that: neither rounds to zero."""
    up = UP["a factor"]
    x, target = batch(up)
    x = x.detach().half().requires_grad_()
    model, graphs = converted(up, F.cross_entropy)
    with torch.autocast("cpu", torch.float16):
        loss, _ = graphs.compiled(model)(x, target)
        (got,) = torch.autograd.grad(loss * 2.0**16, x)
    wide = x.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(Head(up, F.cross_entropy)(wide, target)[0] * 2.0**16, wide)
    assert graphs.has_it
    error = (got.double() - want).norm() / want.norm()
    assert error < 3 * 2**-11, error


def test_a_target_of_another_size_raises_as_pytorch_does() -> None:
    """Also where it could be broadcast."""
    up = UP["a factor"]
    x, target = batch(up)
    model, graphs = converted(up, F.cross_entropy)
    with pytest.raises(Exception, match="size mismatch"):
        graphs.compiled(model)(x, target[:, :1])
    assert not graphs.has_it


def test_without_a_label_the_loss_is_nan_and_gradients_are_zero() -> None:
    up = UP["a factor"]
    x, target = batch(up)
    target[:] = -100
    model, graphs = converted(up, F.cross_entropy)
    loss, gradient = step(graphs.compiled(model), x, target)
    assert graphs.has_it
    assert loss.isnan()
    assert not gradient.any()


def _constructed(y: Tensor, t: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(ignore_index=255)(y, t)


def test_a_loss_that_is_constructed_in_forward() -> None:
    """As transformers does, in a model whose logits are one of its results."""
    up = UP["a factor"]
    x, target = batch(up)
    target[:2] = 255
    model, graphs = converted(up, _constructed)
    got = step(graphs.compiled(model), x, target)
    want = step(Head(up, _constructed), x.detach().double().requires_grad_(), target)
    assert graphs.has_it
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


def _changed(y: Tensor, t: Tensor) -> Tensor:
    y[:, 0] = 1.0
    return F.cross_entropy(y, t)


OTHERS: dict[str, Loss] = {
    "two losses": lambda y, t: F.cross_entropy(y, t) + y.mean(),
    "other logits": lambda y, t: F.cross_entropy(y * 2, t),
    "logits that were written to": _changed,
    "label smoothing": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1),
    "no reduction": lambda y, t: F.cross_entropy(y, t, reduction="none").mean(),
    "probabilities": lambda y, t: F.cross_entropy(y, F.one_hot(t, CLASSES).movedim(-1, 1).to(y.dtype)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_are_left_alone(name: str) -> None:
    up = UP["a factor"]
    x, target = batch(up)
    model, graphs = converted(up, OTHERS[name])
    got = step(graphs.compiled(model), x, target)
    want = step(Head(up, OTHERS[name]), x.detach().double().requires_grad_(), target)
    assert not graphs.has_it
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5 * b.abs().max().item())
