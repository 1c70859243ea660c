"""Logits that a compiled model returns beside its loss: their gradient is attached outside of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain
from hotrain import compiling
from hotrain.compress import compiled, logits, losses
from hotrain.compress.operators import head

TOKENS, CHANNELS, CLASSES = (4, 64), 64, 301


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """From any size on, and nothing from a cache of graphs of other sizes."""
    monkeypatch.setattr(losses, "_SMALLEST", 1)
    monkeypatch.setattr(head, "_PIECE", 64 * 256)
    torch._dynamo.reset()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[logits.Taken | None]:
    """What was found in each graph."""
    found: list[logits.Taken | None] = []
    take_out = logits.take_out

    def spied(gm: torch.fx.GraphModule) -> logits.Taken | None:
        found.append(take_out(gm))
        gm.graph.lint()
        return found[-1]

    monkeypatch.setattr(logits, "take_out", spied)
    return found


# ---- the gradient ----


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_the_gradient_is_the_layers(dtype: torch.dtype, error: float, bias: bool) -> None:
    """bfloat16 rounds Y's gradient and the results, each by up to 2⁻⁹."""
    x = torch.randn(*TOKENS, CHANNELS).to(dtype).requires_grad_()
    w = torch.randn(CLASSES, CHANNELS).to(dtype).requires_grad_()
    b = torch.randn(CLASSES).to(dtype).requires_grad_() if bias else None
    given = [t for t in (x, w, b) if t is not None]
    y = F.linear(x, w, b).detach()
    attached = head.Logits.apply(x, w, b, y)
    assert attached.data_ptr() == y.data_ptr(), "no copy"
    g = torch.randn_like(y)
    of_exact = [t.detach().double().requires_grad_() for t in given]
    want = torch.autograd.grad(F.linear(*of_exact), of_exact, g.double())
    for a, b_ in zip(torch.autograd.grad(attached, given, g), want, strict=True):
        assert a.dtype == dtype
        assert (a - b_).norm() <= error * b_.norm()


def test_the_gradient_of_another_dtype_under_autocast() -> None:
    """y is bfloat16, x and w are float32, and so are their gradients; a frozen w has none."""
    x, w = torch.randn(*TOKENS, CHANNELS, requires_grad=True), torch.randn(CLASSES, CHANNELS)
    attached = head.Logits.apply(x, w, None, F.linear(x, w).detach().bfloat16())
    attached.float().square().sum().backward()
    want = 2 * F.linear(x, w) @ w
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert (x.grad - want).norm() <= 0.01 * want.norm()
    assert w.grad is None


# ---- what is taken out ----


class Model(nn.Module):
    """A language model as transformers writes it: the loss of the next token, and the logits."""

    def __init__(self, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(CLASSES, CHANNELS), nn.LayerNorm(CHANNELS)
        self.body, self.head = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def of(self, y: Tensor, ids: Tensor) -> Tensor:
        shifted = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous()
        return F.cross_entropy(y.float().view(-1, CLASSES), shifted.view(-1), ignore_index=-100)

    def features(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.norm(x + torch.tanh(self.body(x)))

    def forward(self, ids: Tensor) -> Any:
        y = self.head(self.features(ids)[:, slice(0, None), :])  # as `logits_to_keep` of transformers' models has it
        return self.of(y, ids), y


class First(Model):
    def forward(self, ids: Tensor) -> Any:
        loss, y = super().forward(ids)
        return y, loss, y.shape[-1]


class Named(Model):
    def forward(self, ids: Tensor) -> Any:
        loss, y = super().forward(ids)
        return {"loss": loss, "logits": y}


class OnlyTheLoss(Model):
    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids)[0], None


class OnlyTheLogits(Model):
    def forward(self, ids: Tensor) -> Any:
        return self.head(self.features(ids)).sum(), self.head(self.features(ids))


class Twice(Model):
    def forward(self, ids: Tensor) -> Any:
        loss, y = super().forward(ids)
        return loss, y, y


class ReadAgain(Model):
    def forward(self, ids: Tensor) -> Any:
        loss, y = super().forward(ids)
        return loss + y.float().logsumexp(-1).square().mean() / 10, y


class Written(Model):
    """Something is written behind the loss, which could be x, or share its memory."""

    def forward(self, ids: Tensor) -> Any:
        x = self.features(ids)
        y = self.head(x)
        return self.of(y, ids) + x.detach().clone().mul_(2).sum() * 0, y


class OwnWeight(Model):
    """A weight that is computed: it is no argument of the graph."""

    def forward(self, ids: Tensor) -> Any:
        y = F.linear(self.features(ids), self.head.weight * 2)
        return self.of(y, ids), y


MODELS: dict[str, tuple[Callable[[], Model], bool]] = {
    "a pair": (Model, True),
    "with a bias": (lambda: Model(bias=True), True),
    "tied to the embedding": (lambda: Model(tied=True), True),
    "logits first": (First, True),
    "a mapping": (Named, True),
    "no logits": (OnlyTheLoss, False),
    "no cross entropy": (OnlyTheLogits, False),
    "logits twice": (Twice, True),
    "logits read again": (ReadAgain, False),
    "something is written": (Written, False),
    "a weight that is computed": (OwnWeight, False),
}


def parts(results: Any) -> tuple[Tensor, Tensor | None]:
    """Loss and logits of what a model returns."""
    values = list(results.values()) if isinstance(results, dict) else list(results)
    tensors = [t for t in values if isinstance(t, Tensor)]
    return next(t for t in tensors if t.dim() == 0), next((t for t in tensors if t.dim()), None)


def gradients(model: nn.Module, results: Any, further: bool) -> list[Tensor]:
    loss, y = parts(results)
    if further and y is not None:
        loss = loss + (y.float() * torch.linspace(-1, 1, CLASSES)).square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("further", [False, True], ids=["the loss", "the loss and another one of the logits"])
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_eager_mode(name: str, further: bool, taken: list[logits.Taken | None]) -> None:
    """The converted model's: loss and logits up to rounding; gradients differ where the compiled graph keeps tensors in
    other formats, by less than a step of their codes."""
    make, wanted = MODELS[name]
    torch.manual_seed(0)
    model, ids = make(), torch.randint(0, CLASSES, TOKENS)
    hotrain.convert(model, "exact", memory="block", plan="memory")
    want = model(ids)
    want_gradients = gradients(model, want, further)
    got = compiling.compile_in_mode(model, None)(ids)
    assert any(taken) is wanted
    (loss, y), (exact, exact_y) = parts(got), parts(want)
    assert torch.allclose(loss, exact)
    if y is not None and exact_y is not None:
        assert torch.allclose(y, exact_y, atol=1e-5)
        assert y.requires_grad
        assert y.stride() == exact_y.stride()
        assert not y._is_view()
    for a, b in zip(gradients(model, got, further), want_gradients, strict=True):
        assert (a - b).norm() <= 0.03 * b.norm()


def test_the_logits_may_be_written_and_the_loss_thrown_away(taken: list[logits.Taken | None]) -> None:
    """As of PyTorch's own compiled models. The gradient of the head is of x itself, in eager mode of its codes."""
    torch.manual_seed(0)
    model, ids = Model(), torch.randint(0, CLASSES, TOKENS)
    hotrain.convert(model, "exact", memory="block", plan="memory")
    found = []
    for run in (model, compiling.compile_in_mode(model, None)):
        _, y = run(ids)
        y.mul_(2)
        found.append(torch.autograd.grad(y.square().mean(), list(model.parameters())))
    assert any(taken)
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 0.1 * b.norm()


def test_a_frozen_head_and_evaluation(taken: list[logits.Taken | None]) -> None:
    torch.manual_seed(0)
    model, ids = Model(), torch.randint(0, CLASSES, TOKENS)
    model.head.requires_grad_(False)
    hotrain.convert(model, "exact", memory="block", plan="memory")
    trained = [p for p in model.parameters() if p.requires_grad]
    fast = compiling.compile_in_mode(model, None)
    found = [torch.autograd.grad(sum(t.float().square().mean() for t in run(ids)), trained) for run in (model, fast)]
    assert any(taken)
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 0.03 * b.norm()
    taken.clear()
    with torch.no_grad():
        assert not fast(ids)[1].requires_grad
    assert not any(taken)


def test_backward_has_no_argument_as_large_as_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is the gradient that PyTorch makes zeros for; saved logits are in the product's dtype, once."""
    model, ids = Model(), torch.randint(0, CLASSES, TOKENS)
    hotrain.convert(model, "exact", memory="block", plan="memory")
    entries = ids.numel() * CLASSES
    compress, large = compiled.compress, []

    def looked_at(forward: Any, backward: Any, *args: Any) -> None:
        places = backward.graph.find_nodes(op="placeholder")
        large.append([n.name for n in places if isinstance(n.meta["val"], Tensor) and n.meta["val"].numel() >= entries])
        compress(forward, backward, *args)

    monkeypatch.setattr(compiled, "compress", looked_at)
    for run in (torch.compile(model), compiling.compile_in_mode(model, None)):
        torch._dynamo.reset()
        with torch._inductor.config.patch(fx_graph_cache=False):
            run(ids)[0].backward()
    (saved, tangent), (alone,) = large
    assert "tangents" in tangent
    assert alone == saved


@pytest.mark.gpu
def test_cuda_graphs_replay_it_in_less_memory() -> None:
    """Gradients of both losses over steps that are replayed; backward has a lower peak, by the zeros."""
    tokens, classes, device = (8, 1024), 8192, torch.device("cuda")
    peaks = []
    for compile in (lambda model: torch.compile(model, mode="reduce-overhead"), lambda model: compiling.compile_in_mode(
        model, "reduce-overhead"
    )):  # fmt: skip
        torch.manual_seed(0)
        torch._dynamo.reset()
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "CLASSES", classes)
            model = Model().to(device)
            hotrain.convert(model, "exact", memory="block", plan="memory")
            fast = compile(model)
            for further in (False,) * 6 + (True,) * 4:
                ids = torch.randint(0, classes, tokens, device=device)
                with torch.autocast("cuda", torch.bfloat16):
                    results = fast(ids)
                    want = model(ids)
                loss, y = results
                extra = y.float().square().mean() if further else 0
                of_exact = want[0] + (want[1].float().square().mean() if further else 0)
                exact = torch.autograd.grad(of_exact, list(model.parameters()))
                del want, of_exact
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                got = torch.autograd.grad(loss + extra, list(model.parameters()))
                if not further:
                    torch.cuda.synchronize()
                    peak = torch.cuda.max_memory_allocated()
                for a, b in zip(got, exact, strict=True):
                    assert (a - b).norm() <= 0.03 * b.norm()
                del results, loss, y, extra, got, exact
            peaks.append(peak)
    size = tokens[0] * tokens[1] * classes * 2
    assert peaks[0] - peaks[1] >= 0.9 * size
