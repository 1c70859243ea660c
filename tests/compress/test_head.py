"""A linear layer and the cross entropy of its result in compiled graphs: loss and gradients against float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import hotrain
from hotrain.compress import compiled, losses
from hotrain.compress.operators import head

TOKENS, CHANNELS, CLASSES = (4, 64), 64, 201


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """From any size on, in four pieces of which the last has fewer classes.

    Without oneDNN, whose kernels for AMX multiply zeros with what is behind the rows of a padded matrix: that may be
    NaN, and tests alone pad on a CPU (`_strides_as_on_a_gpu`).
    """
    monkeypatch.setattr(losses, "_SMALLEST", 1)
    monkeypatch.setattr(head, "_PIECE", 64 * 256)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


def labels(ignored: int = -100) -> Tensor:
    """Of which some are ignored."""
    found = torch.randint(0, CLASSES, TOKENS)
    found[0, :9] = ignored
    return found


# ---- the operator ----


@pytest.mark.parametrize("padded", [False, True], ids=["as many classes", "more"])
@pytest.mark.parametrize("logits", [False, True], ids=["the loss alone", "the logits too"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_gradients(
    dtype: torch.dtype,
    error: float,
    mean: bool,
    bias: bool,
    logits: bool,
    padded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of PyTorch's two operators; bfloat16 rounds Y, its gradient, and the results, each by up to 2⁻⁹.

    On a GPU the product has more classes, which count for nothing.
    """
    if padded:
        assert head._padded(CLASSES, torch.device("cuda")) == 256
        monkeypatch.setattr(head, "_padded", lambda classes, device: 256)
    x = torch.randn(*TOKENS, CHANNELS).to(dtype).requires_grad_()
    w = (torch.randn(CLASSES, CHANNELS) / 8).to(dtype).requires_grad_()
    b = torch.randn(CLASSES).to(dtype).requires_grad_() if bias else None
    g, target = torch.randn(*TOKENS, CLASSES).to(dtype) / 100, labels()
    given = [t for t in (x, w, b) if t is not None]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rest = target.view(-1), -100, mean, wide, logits
    loss, y, _ = torch.ops.hotrain.linear_cross_entropy(x, w, b, "exact", [], *rest)
    total = loss * 3 + ((y * g).sum() if logits else 0)
    got = [loss, *torch.autograd.grad(total, given)]
    of_exact = [t.detach().double().requires_grad_() for t in given]
    y = F.linear(*of_exact)
    kind = "mean" if mean else "sum"
    loss = F.cross_entropy(y.view(-1, CLASSES), target.view(-1), reduction=kind)
    total = loss * 3 + ((y * g.double()).sum() if logits else 0)
    for a, want in zip(got, [loss, *torch.autograd.grad(total, of_exact)], strict=True):
        assert a.isfinite().all()
        assert (a - want).norm() <= error * want.norm()
    assert loss.dtype == torch.float64
    assert y.dtype == torch.float64


def test_the_logits_alone() -> None:
    """A caller that throws the loss away."""
    x, w = (torch.randn(n, CHANNELS, dtype=torch.float64, requires_grad=True) for n in (256, CLASSES))
    _, y, _ = torch.ops.hotrain.linear_cross_entropy(
        x, w, None, "exact", [], labels().view(-1), -100, True, torch.float64, True
    )
    g = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, w), g)
    for a, want in zip(got, torch.autograd.grad(F.linear(x, w), (x, w), g), strict=True):
        assert torch.allclose(a, want)


def test_where_every_token_is_ignored() -> None:
    """PyTorch's mean of nothing is NaN; its sum is 0. There is no gradient."""
    x, w = (torch.randn(n, CHANNELS, requires_grad=True) for n in (256, CLASSES))
    for mean in (True, False):
        target = torch.full((256,), -100)
        rest = target, -100, mean, torch.float32, False
        loss, *_ = torch.ops.hotrain.linear_cross_entropy(x, w, None, "exact", [], *rest)
        assert bool(loss.isnan()) is mean
        got = torch.autograd.grad(loss, (x, w))
        assert all(not g.any() for g in got)


@pytest.mark.parametrize(
    ("tokens", "classes"), [(8192, 50257), (8192, 32768), (1, 10), (1 << 20, 7), (3, 1 << 24)], ids=str
)
def test_pieces_are_all_classes(tokens: int, classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, in order; no more pieces than a graph should have, and of a multiple of 64 classes but the last."""
    monkeypatch.undo()
    pieces = head._pieces(tokens, classes)
    assert [first for first, _ in pieces] == [sum(n for _, n in pieces[:place]) for place in range(len(pieces))]
    assert sum(n for _, n in pieces) == classes
    assert len(pieces) <= 32
    assert all(n % 64 == 0 for _, n in pieces[:-1])


# ---- where it is put ----


class Model(nn.Module):
    """The end of a language model, as transformers writes it."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], bias: bool = False) -> None:
        super().__init__()
        self.norm, self.head, self.loss = nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, CLASSES, bias=bias), loss

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        y = self.head(self.norm(x))
        return self.loss(y, target), y


def causal(y: Tensor, target: Tensor, **options: Any) -> Tensor:
    """`transformers.loss.loss_utils.ForCausalLMLoss`."""
    y = y.float()
    shifted = F.pad(target, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(y.view(-1, CLASSES), shifted.view(-1).to(y.device), ignore_index=-100, **options)


def flat(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y.view(-1, CLASSES), target.view(-1))


def capped(y: Tensor, target: Tensor) -> Tensor:
    return causal(30 * torch.tanh(y / 30), target)


def cut(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y[..., :-1, :].reshape(-1, CLASSES).float(), target[..., 1:].reshape(-1))


def regularized(y: Tensor, target: Tensor) -> Tensor:
    wide = y.float()
    return F.cross_entropy(wide.view(-1, CLASSES), target.view(-1)) + wide.logsumexp(-1).square().mean()


def written(y: Tensor, target: Tensor) -> Tensor:
    y.mul_(0.5)
    return flat(y, target)


def written_late(y: Tensor, target: Tensor) -> Tensor:
    """As a model that scales what it returns; autograd refuses that of an operator with several results."""
    loss = flat(y, target)
    y.mul_(0.5)
    return loss


def added_to(y: Tensor, target: Tensor) -> Tensor:
    """As Mixtral adds the loss of its routers: the loss is written, the logits are not."""
    loss = causal(y, target)
    loss += 0.5
    return loss


def contiguous(y: Tensor, target: Tensor) -> Tensor:
    """OPT's, whose caller has the result too."""
    y = y.contiguous()
    return causal(y, target) + 0 * y.float().sum()


def in_float32(y: Tensor, target: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return flat(y.float(), target)


def with_probabilities(y: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(y.float().view(-1, CLASSES), F.one_hot(target.view(-1).clamp(0), CLASSES).float())


def of_the_logits(y: Tensor, target: Tensor) -> Tensor:
    return flat(y, y.argmax(-1))


def beside(y: Tensor, target: Tensor) -> Tensor:
    """Behind the layer, before the loss, something else reads the logits."""
    entropy = y.float().softmax(-1).square().sum() / 1000
    return causal(y, target) + entropy


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "transformers": (causal, True),
    "a sum": (lambda y, t: causal(y, t, reduction="sum"), True),
    "without a cast": (flat, True),
    "others read the logits": (beside, True),
    "contiguous already": (contiguous, True),
    "logits are capped": (capped, False),
    "logits are cut": (cut, False),
    "the cast is read again": (regularized, False),
    "written in place": (written, False),
    "written behind the loss": (written_late, False),
    "the loss is written": (added_to, True),
    "autocast ends between": (in_float32, False),
    "smoothed labels": (lambda y, t: causal(y, t, label_smoothing=0.1), False),
    "weights": (lambda y, t: causal(y, t, weight=torch.linspace(1, 2, CLASSES)), False),
    "each token's loss": (lambda y, t: causal(y, t, reduction="none").mean(), False),
    "probabilities": (with_probabilities, False),
    "labels of the logits": (of_the_logits, False),
}


def steps(model: nn.Module, run: Any, x: Tensor, target: Tensor, autocast: bool) -> list[Tensor]:
    """Loss, logits, and gradients of the loss."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, y = run(x, target)
    return [loss, y, *torch.autograd.grad(loss, list(model.parameters()))]


def put_into(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets of the graphs that the pass has seen, behind it."""
    seen: list[str] = []
    pass_ = losses.in_pieces

    def spied(graph: torch.fx.Graph) -> None:
        pass_(graph)
        graph.lint()
        seen.extend(str(node.target) for node in graph.nodes)

    monkeypatch.setattr(compiled, "in_pieces", spied)
    return seen


@pytest.mark.parametrize("name", LOSSES)
def test_where_it_is_put(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the step is that of eager mode, whose layer keeps the same codes; bfloat16 is rounded elsewhere."""
    loss, wanted = LOSSES[name]
    torch.manual_seed(0)
    model, x, target = Model(loss), torch.randn(*TOKENS, CHANNELS), labels()
    if name == "without a cast":
        target[target < 0] = 0
    hotrain.convert(model, "exact", memory="block", plan="memory")
    want = steps(model, model, x, target, True)
    seen = put_into(monkeypatch)
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        got = steps(model, torch.compile(model, fullgraph=True), x, target, True)
    assert ("hotrain.linear_cross_entropy" in seen) is wanted
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert (a.double() - b.double()).norm() <= 0.02 * b.double().norm()


def test_a_frozen_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under LoRA: nothing of x is kept, and only its gradient is computed."""
    torch.manual_seed(0)
    model, x, target = Model(causal), torch.randn(*TOKENS, CHANNELS), labels()
    model.head.requires_grad_(False)
    hotrain.convert(model, "exact", memory="block", plan="memory")
    of = model.norm

    def step(run: Any) -> list[Tensor]:
        return list(torch.autograd.grad(run(x, target)[0], list(of.parameters())))

    want, seen = step(model), put_into(monkeypatch)
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        got = step(torch.compile(model, fullgraph=True))
    assert "hotrain.linear_cross_entropy" in seen
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_evaluation_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss without a gradient."""
    model, seen = Model(causal), put_into(monkeypatch)
    hotrain.convert(model, "exact", memory="block", plan="memory")
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model)(torch.randn(*TOKENS, CHANNELS), labels())
    assert "hotrain.linear_cross_entropy" not in seen


def test_a_model_that_was_not_converted_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's setting is process-wide; a frozen head of an exact model has the form that the pass looks for."""
    converted, exact, seen = Model(causal), Model(causal), put_into(monkeypatch)
    exact.head.requires_grad_(False)
    hotrain.convert(converted, "exact", memory="block", plan="memory")
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        for model, wanted in ((converted, True), (exact, False)):
            seen.clear()
            torch.compile(model)(torch.randn(*TOKENS, CHANNELS), labels())[0].backward()
            assert seen
            assert ("hotrain.linear_cross_entropy" in seen) is wanted


class OnlyTheLoss(Model):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, target)[0]


@pytest.mark.parametrize("kind", [Model, OnlyTheLoss])
@pytest.mark.parametrize("padded", [False, True], ids=["as many classes", "more"])
def test_no_gradient_of_all_classes_is_in_a_graph(
    kind: type[Model], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many entries as the logits have, forward computes them in the product's dtype, and backward nothing.

    Where the product has more classes, it is whole in the graph only if its logits are not returned, and is not copied.
    """
    if padded:
        monkeypatch.setattr(head, "_padded", lambda classes, device: 256)
    model, x, target = kind(causal), torch.randn(*TOKENS, CHANNELS), labels()
    hotrain.convert(model, "exact", memory="block", plan="memory")
    large: dict[str, set[torch.dtype]] = {}
    copies: list[str] = []
    whole: list[int] = []
    entries, compress = x[..., 0].numel() * CLASSES, compiled.compress

    def looked_at(forward: Any, backward: Any, *args: Any) -> None:
        for name, half in (("forward", forward), ("backward", backward)):
            values = [n.meta.get("val") for n in half.graph.nodes if n.op == "call_function"]
            large[name] = {t.dtype for t in values if isinstance(t, Tensor) and t.numel() >= entries}
            copied = half.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
            copies.extend(name for node in copied if node.meta["val"].numel() >= entries)
        products = [n.meta["val"] for n in forward.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
        whole.extend(t.numel() for t in products if t.numel() > entries)
        compress(forward, backward, *args)

    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(fx_graph_cache=False):
        patch.setattr(compiled, "compress", looked_at)
        torch._dynamo.reset()
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.compile(model)(x, target)
        (found if kind is OnlyTheLoss else found[0]).backward()
    tangent = set() if kind is OnlyTheLoss else {torch.bfloat16}  # PyTorch's, of logits that are returned
    assert large == {"forward": {torch.bfloat16}, "backward": tangent}
    assert copies == []
    assert bool(whole) == (padded and kind is OnlyTheLoss)


@pytest.mark.parametrize("bias", [False, True])
def test_one_piece_of_the_gradient_exists_at_a_time(bias: bool) -> None:
    """In the order in which Inductor runs them: the products of a piece are behind it and before the next piece."""
    model, x, target = OnlyTheLoss(causal, bias), torch.randn(*TOKENS, CHANNELS), labels()
    hotrain.convert(model, "exact", memory="block", plan="memory")

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.compile(model)(x, target)
        loss.backward()

    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        _, codes = run_and_get_code(step)
    (backward,) = [code for code in codes if "logits_gradient.default(" in code]
    calls = re.findall(r"= torch\.ops\.hotrain\.(logits_gradient)\.default\(|extern_kernels\.(mm)\(", backward)
    assert ["piece" if piece else "mm" for piece, _ in calls] == ["piece", "mm", "mm"] * 4


def test_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is saved for each of more tokens than a small tensor has is saved as it is: in float32 the bias's gradient,
    which no codes of x enter, is that of float64."""
    torch.manual_seed(0)
    model, x, target = (
        Model(causal, bias=True),
        torch.randn(2, 1 << 14, CHANNELS),
        torch.randint(0, CLASSES, (2, 1 << 14)),
    )
    target[0, :99] = -100
    exact = Model(causal, bias=True).double()
    exact.load_state_dict(model.state_dict())
    (want,) = torch.autograd.grad(exact(x.double(), target)[0], exact.head.bias)
    hotrain.convert(model, "exact", memory="block", plan="memory")
    seen = put_into(monkeypatch)
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        (got,) = torch.autograd.grad(torch.compile(model, fullgraph=True)(x, target)[0], model.head.bias)
    assert "hotrain.linear_cross_entropy" in seen
    assert (got - want).norm() <= 1e-5 * want.norm()
