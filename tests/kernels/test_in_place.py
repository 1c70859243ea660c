"""Results written over what they are computed from, in graphs that Inductor compiles."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("triton")

from torch._inductor.utils import run_and_get_code

import hotrain
from hotrain import autograd, kernels
from hotrain.compress import compiled, exact_norms, in_place, kernel_nodes

WIDTH = 128


@pytest.fixture(autouse=True)
def _on_kernels(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[None]:
    """The kernels in the interpreter, where there is no GPU; operators, as in CUDA graphs; nothing from a cache."""
    if device.type == "cpu":
        monkeypatch.setattr(autograd, "KERNELS", dict.fromkeys(("cpu", "cuda"), kernels))
    monkeypatch.setattr(kernel_nodes, "insert", lambda half: False)
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(x)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Read(Mlp):
    """Its hidden layer's gradient has a second reader: the gradient of what is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.zeros(96, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(x)) + self.added)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(64, 64, 1, bias=False) for _ in range(2))
        self.one, self.two = nn.BatchNorm2d(64), nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.one(self.first(x)))
        return F.relu(self.two(self.second(y)) + x)


class Beside(nn.Module):
    """The norm's input is its shortcut, too, and so is the gradient of one that of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(self.norm(hidden) + hidden)


def _tokens(device: torch.device) -> Tensor:
    return torch.randn(2, 96, WIDTH, device=device)


def _images(device: torch.device) -> Tensor:
    return torch.randn(4, 64, 12, 12, device=device).to(memory_format=torch.channels_last)


class Reading(Mlp):
    """Its hidden layer has a second reader."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return x + self.second(F.gelu(hidden)) * hidden.detach().mean(-1, keepdim=True)


# A model, its input, how many operators write over their arguments, forward and backward, and how many do not.
CASES = [
    # Behind the last MLP the gradient is the step's own input, which its GELU does not read.
    pytest.param(lambda: nn.Sequential(Mlp(), Mlp()), _tokens, (2, 2), (0, 0), id="GELU of an MLP"),
    pytest.param(lambda: nn.Sequential(Gated(), Gated()), _tokens, (0, 2), (0, 0), id="SwiGLU"),
    pytest.param(Read, _tokens, (1, 0), (0, 1), id="GELU, of a gradient with a second reader"),
    pytest.param(Reading, _tokens, (0, 1), (1, 0), id="GELU, with a second reader"),
    # Of two blocks the first's g has two parts, and all norms but the last, whose g the graph is given.
    pytest.param(
        lambda: nn.Sequential(Residual(), Residual(), nn.Conv2d(64, 64, 1)), _images, (4, 4), (0, 0), id="batch norm"
    ),
    pytest.param(
        lambda: nn.Sequential(Residual(), Residual()), _images, (4, 3), (0, 1), id="batch norm of a given gradient"
    ),
    pytest.param(Beside, _images, (0, 0), (1, 1), id="batch norm beside its own input"),
]
NAMES = ("activate", "normalize"), ("activation_gradient", "gated_gradient", "norm_gradient")


def _step(call: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = call(x)
    torch.manual_seed(1)
    y.backward(torch.randn_like(y))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def _large(code: str) -> list[str]:
    """The buffers, but for those of statistics, one for each row or channel."""
    shapes = re.findall(r"= empty_strided_\w+\(\(([\d, ]+)\)", code)
    return [shape for shape in shapes if math.prod(map(int, shape.strip(", ").split(", "))) >= 2 * 96 * WIDTH]


@pytest.mark.parametrize(("build", "inputs", "written", "others"), CASES)
def test_same_results_without_a_copy(
    build: Callable[[], nn.Module], inputs: Callable[[torch.device], Tensor], written: tuple[int, int],
    others: tuple[int, int], monkeypatch: pytest.MonkeyPatch, device: torch.device,
) -> None:  # fmt: skip
    """To the bit those of operators with memory of their own; and Inductor copies no gradient before it is written."""
    torch.manual_seed(0)
    model = build().to(device).to(memory_format=torch.channels_last).train()
    hotrain.convert(model, "exact", memory="block")
    x, state = inputs(device), {name: t.clone() for name, t in model.state_dict().items()}
    found = []
    for is_written in (False, True):
        with monkeypatch.context() as patch:
            if not is_written:
                patch.setattr(in_place, "write", lambda half: False)
            torch._dynamo.reset()
            model.load_state_dict(state)
            grads, codes = run_and_get_code(_step, torch.compile(model, fullgraph=True), model, x)
            found.append((grads, "\n".join(codes)))
    (want, before), (got, after) = found
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
    for names, over, own in zip(NAMES, written, others, strict=True):
        assert sum(before.count(f"hotrain.{name}.default(") for name in names) == over + own
        assert sum(after.count(f"hotrain.{name}.default(") for name in names) == own
        assert sum(after.count(f"hotrain.{name}_.default(") for name in names) == over
    # A copy would be a buffer, and a kernel, more. A formula behind, as a sum, has one of its own, too, which it does
    # not write over what an operator has written to.
    assert len(_large(after)) <= len(_large(before)) + (build is Read)
    assert after.count("clone") == before.count("clone")


def test_a_norm_behind_statistics_of_the_compiler(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """In the place of the operator's where its kernel gains nothing (`choosing`): they read x, and a cast of it."""
    choose = compiled._choose

    def chosen(gm: torch.fx.GraphModule) -> float:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.hotrain.channel_statistics.default):
            exact_norms.put_statistics_back(gm.graph, node)
        return choose(gm)

    monkeypatch.setattr(compiled, "_choose", chosen)
    build = lambda: nn.Sequential(Residual(), Residual())  # noqa: E731
    with torch.autocast(device.type, torch.bfloat16):
        test_same_results_without_a_copy(build, _images, (4, 4), (0, 0), monkeypatch, device)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_kernel_that_fails_behind_one_that_has_written_is_an_error(
    in_place: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The reference would read a gradient with f' in it twice; where it reads what it was given, it runs."""
    from triton.runtime.errors import OutOfResources

    from hotrain.compress.operators import image_norm as operators
    from hotrain.kernels import batch_norm, support

    launch = batch_norm.launch

    def failing(kernel: Any, *args: Any, **options: Any) -> Any:
        if kernel is batch_norm._gradient_kernel:
            raise OutOfResources(2, 1, "shared memory")
        return launch(kernel, *args, **options)

    monkeypatch.setattr(support, "_broken", set())
    x, mean, r = _images(device), torch.zeros(64, device=device), torch.ones(64, device=device)
    _, *kept = operators._normalize(x, mean, r, None, None, x, "relu")
    given = (torch.randn_like(x), None, *kept, r, None, "relu", True)
    want = operators._norm_gradient(given[0].clone(memory_format=torch.preserve_format), *given[1:])
    monkeypatch.setattr(batch_norm, "launch", failing)
    if in_place:
        with pytest.raises(RuntimeError, match=r"a norm's gradient failed .*HOTRAIN_KERNELS=0"):
            operators._norm_gradient(*given, in_place=True)
        return
    with pytest.warns(UserWarning, match="reference in plain PyTorch"):
        got = operators._norm_gradient(*given)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # float32, summed in another order
