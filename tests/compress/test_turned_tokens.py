"""Tokens whose samples are behind tokens in memory, as nn.MultiheadAttention returns them: compiled, norms and residual
sums read a copy with rows in order; the model and its caller see PyTorch's layout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import hotrain
from hotrain import autograd, kernels
from hotrain.compress import compiled

C, TOKENS, SAMPLES = 64, 33, 8  # writes to small tensors are not counted
FORWARD = torch.ops.hotrain.norm_forward.default
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # no kernel runs on a CPU where it is not interpreted


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("triton")
    monkeypatch.setattr(autograd, "KERNELS", dict.fromkeys(("cpu", "cuda"), kernels))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """case: of the net and tokens (SAMPLES, TOKENS, C), in memory the other way around."""

    def __init__(self, case: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        self.case = case
        self.first, self.second = nn.LayerNorm(C), nn.RMSNorm(C)
        self.one, self.two = nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Any:
        return self.case(self, (x * 1.5).transpose(0, 1))


def _tokens(*shape: int) -> Tensor:
    return torch.randn(shape or (TOKENS, SAMPLES, C), device=DEVICE, requires_grad=True)


def _block(net: Net, t: Tensor) -> Tensor:
    y = t + net.one(net.first(t))
    return y + net.two(net.second(y))


def _in_place(net: Net, t: Tensor) -> Tensor:
    y = t + net.one(net.first(t))
    y += net.two(t)
    return net.second(y) + y


def _written(net: Net, t: Tensor) -> Tensor:
    y = t + net.one(net.first(t))
    with torch.no_grad():
        n = net.second(y)
    y.mul_(2)
    return y + net.two(net.second(y) + n)


def _turned_after(net: Net, t: Tensor) -> Tensor:
    return (t + net.one(net.first(t))).transpose(0, 1).view(-1, C)  # a view of that layout alone


def _by_hook(net: Net, t: Tensor) -> Tensor:
    y = t + net.one(net.first(t))
    y.register_hook(lambda g: 2 * g)
    return y + net.two(net.second(y))


CASES: dict[str, Callable[[Net, Tensor], Any]] = {
    "two sums": _block,
    "the tokens last": lambda net, t: net.one(net.first(t)) + t,
    "in place": _in_place,
    "written behind a norm": _written,
    "viewed in the other order": _turned_after,
    "a hook before a reader": _by_hook,
    "two results": lambda net, t: (_block(net, t), t + net.first(t)),
    "twice itself": lambda net, t: net.second(t + net.first(t) + t),
    "alpha": lambda net, t: torch.add(t, net.one(net.first(t)), alpha=0.5),
    "another shape": lambda net, t: t + net.first(t)[:, :1],
    "a number": lambda net, t: net.second(t + net.first(t).amax() + 1),
    "both turned": lambda net, t: net.second(t + net.first(t) + net.one(t.transpose(0, 1)).transpose(0, 1)),
    "a part of them": lambda net, t: net.second(t[:, 1:] + net.first(t)[:, 1:]) + t[:, 1:],
    "other functions": lambda net, t: F.gelu(t + net.first(t)) * (t - net.second(t)),
    "a dropout that drops nothing": lambda net, t: F.dropout(t + net.first(t), 0.0) + t,
    "concatenated": lambda net, t: net.first(torch.cat([t + net.first(t), t])),
}


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_the_model_s(name: str) -> None:
    """Results near to float32's rounding (a kernel sums in another order) and in exact's layout; gradients near."""
    net = Net(CASES[name])
    nn.init.normal_(net.first.bias)
    exact, x = copy.deepcopy(net.to(DEVICE)), _tokens()
    hotrain.convert(net, "exact", memory="block", plan="memory")

    def gradients(run: Callable[..., Any], parameters: Iterator[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
        found = run(x)
        found = [found] if isinstance(found, Tensor) else list(found)
        draw = torch.Generator().manual_seed(1)
        given = [torch.randn(y.shape, generator=draw).to(DEVICE) for y in found]
        made = torch.autograd.grad(found, (x, *parameters), given, allow_unused=True)
        return found, [g for g in made if g is not None]

    got, changed = gradients(torch.compile(net, backend="aot_eager", fullgraph=True), net.parameters())
    want, plain = gradients(exact, exact.parameters())
    for y, z in zip(got, want, strict=True):
        torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-5)
        assert y.stride() == z.stride()
    error = sum((a - b).norm() ** 2 for a, b in zip(changed, plain, strict=True)) ** 0.5
    assert error <= 0.26 * sum(b.norm() ** 2 for b in plain) ** 0.5


def test_the_kernels_run_and_what_is_turned_is_copied_once() -> None:
    """Of a block that is inside of a model: one copy before the first norm, none for the sum behind it."""
    net = Net(lambda net, t: _block(net, t).mean()).to(DEVICE)
    hotrain.convert(net, "exact", memory="block", plan="memory")
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    step = torch.compile(net, backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    step(_tokens())
    forward = graphs[0].graph
    norms = forward.find_nodes(op="call_function", target=FORWARD)
    assert len(norms) == 2
    copies = forward.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    read = {node for norm in norms for node in _behind(norm.args[0])}
    assert len(read & set(copies)) == 1


def _behind(node: Any) -> set[Any]:
    """All that a node is computed of."""
    found, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def test_a_hook_behind_a_reader_is_refused() -> None:
    """Its gradient would be a part of the tokens'."""

    def late(net: Net, t: Tensor) -> Tensor:
        y = _block(net, t)
        n = net.first(y)
        y.register_hook(lambda g: 2 * g)
        return n + y

    net = Net(late).to(DEVICE)
    hotrain.convert(net, "exact", memory="block", plan="memory")
    with pytest.raises(Exception, match="register the hook before"):
        torch.compile(net, backend="aot_eager", fullgraph=True)(_tokens())


class _Attending(nn.Module):
    """A pre-norm block whose residual stream is as long as it is wide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(C), nn.MultiheadAttention(C, 4, batch_first=True)
        self.behind, self.layer = nn.LayerNorm(C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        x = self.attention(n, n, n, need_weights=False)[0] + x
        return self.layer(self.behind(x)).mean()


@pytest.mark.skipif(DEVICE == "cuda", reason="there the partition makes Triton's nodes of the operators")
@pytest.mark.parametrize("attends", [True, False], ids=["nn.MultiheadAttention", "a layer that reads the output"])
def test_an_output_that_nothing_reads_is_not_packed(attends: bool) -> None:
    """nn.MultiheadAttention's last product reads a copy; behind a transpose of heads a layer reads the codes. And both
    norms are cast for their products in their kernels, one of them through a transpose."""

    class Reads(_Attending):
        def forward(self, x: Tensor) -> Tensor:
            q = self.norm(x).view(SAMPLES, TOKENS, 4, -1).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
            return self.layer(self.behind(self.layer(y) + x)).mean()

    net = (_Attending() if attends else Reads()).to(DEVICE)
    hotrain.convert(net, "exact", memory="block", plan="memory")
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=compiled.partition)
    with torch.autocast(DEVICE, torch.bfloat16):
        torch.compile(net, backend=backend, fullgraph=True)(_tokens(SAMPLES, TOKENS, C))
    (packs,) = graphs[0].find_nodes(op="call_function", target=torch.ops.hotrain.keep_heads.default)
    assert len(packs.args[0]) == (3 if attends else 4)
    norms = graphs[0].find_nodes(op="call_function", target=FORWARD)
    assert len(norms) == 2
    if attends:
        assert {norm.meta["val"][1].dtype for norm in norms} == {torch.bfloat16}
