"""Compiled graphs on a GPU: Inductor and CUDA graphs draw anew in every step, and nothing waits for the device.

Gradients are compared with those of the uncompiled layers on the same draws. Inductor's fusion moves last bits of
bf16, which flips roundings, so the bound is a tenth of the method's own error against exact gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotrain
from hotrain import draws

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),  # of a partition without kernels
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(256), nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


class Broken(Block):
    """Dynamo goes on behind a graph break inside of a mode that it has entered before, as in SegFormer's head."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        torch._dynamo.graph_break()
        return x + self.fc2(nn.functional.gelu(self.fc1(y)))


def model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).cuda(), torch.randn(8, 196, 256, device="cuda")


def gradients(net: nn.Module, run: Callable[..., Tensor], x: Tensor, count: int = 5) -> list[list[Tensor]]:
    hotrain.manual_seed(1)
    seen = []
    for _ in range(count):
        net.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            y = run(x)
        y.float().square().mean().backward()
        seen.append([p.grad.clone() for p in net.parameters()])
    return seen


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    a, b = (torch.cat([g.flatten() for g in grads]) for grads in (got, want))
    return float((a - b).norm() / b.norm())


def test_device_keys_are_the_hosts() -> None:
    host, device = draws.Draws.of("a"), draws.Draws.of("a")
    keys = torch.stack([device.next_on(torch.device("cuda")) for _ in range(50)]).tolist()
    assert keys == [draws.signed(host.next()) for _ in range(50)]


@pytest.mark.filterwarnings("ignore:hotrain. no kernel:UserWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("method", ["hot-unbiased", "hot", "hla", "luq", "hot-importance"])  # luq: no kernels
def test_compiled_steps_are_the_uncompiled_ones(method: str, mode: str) -> None:
    """Each step its own draws, under CUDA graphs too, whose replays run no Python."""
    net, x = model()
    exact = gradients(net, net, x, 1)[0]
    # `hot` in fp8: as integers its noise, which the bound is made of, is the smaller part of its error.
    hotrain.convert(net, method, plan="memory", number="auto" if method == "hot" else None)
    want = gradients(net, net, x)
    run = torch.compile(net, fullgraph=True, mode=mode)
    got = gradients(net, run, x)
    noise = distance(want[0], exact)
    assert [distance(a, b) < 0.1 * noise for a, b in zip(got, want, strict=True)] == [True] * 5
    if all(state.running.draws for _, _, state in hotrain.converted_layers(net)):  # not of hot in fp8, and not of hla
        assert all(distance(got[i], got[i + 1]) > 0.2 * noise for i in range(4))
        assert {state.draws.step for _, _, state in hotrain.converted_layers(net)} == {4}


def test_a_captured_step_draws_anew_in_every_replay() -> None:
    """A training step captured by hand, without the compiler."""
    net, x = model()
    hotrain.convert(net, "hot-unbiased", plan="memory")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients(net, net, x, 3)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    net.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph), torch.autocast("cuda", torch.bfloat16):
        net(x).float().square().mean().backward()
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append([p.grad.clone() for p in net.parameters()])
    assert distance(seen[0], seen[1]) > 0
    assert distance(seen[1], seen[2]) > 0
    # three steps before, then replays alone: a capture runs nothing
    assert {state.draws.step for _, _, state in hotrain.converted_layers(net)} == {5}


def test_a_training_step_waits_for_nothing() -> None:
    net, x = model()
    hotrain.convert(net, "hot-unbiased", plan="memory")
    run: Any = torch.compile(net, fullgraph=True)
    for call in (net, run):
        gradients(net, call, x, 2)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                with torch.autocast("cuda", torch.bfloat16):
                    y = call(x)
                y.float().square().mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("plan", ["memory", "graphs"])
@pytest.mark.parametrize("method", ["hq8", "hot"])
def test_frozen_layers_leave_nothing_in_the_memory_of_a_cuda_graph(method: str, plan: str) -> None:
    """As LoRA freezes them: their steps look up tensors that no trained layer's has made before."""
    net, x = model()
    for block in net:
        for layer in (block.fc1, block.fc2):
            layer.weight.requires_grad_(False)
            layer.bias.requires_grad_(False)
    trained = [p for p in net.parameters() if p.requires_grad]
    assert len(trained) == 4
    want = torch.autograd.grad(net(x).float().square().mean(), trained)
    hotrain.convert(net, method, plan=plan)
    run = torch.compile(net, mode="reduce-overhead")
    for _ in range(4):
        with torch.autocast("cuda", torch.bfloat16):
            y = run(x)
        got = torch.autograd.grad(y.float().square().mean(), trained)
        assert distance(list(got), list(want)) < 0.5


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's, behind a graph break
def test_compressed_buffers_behind_a_graph_break() -> None:
    """What operators record there is recorded, and gradients are eager mode's, but for roundings and fc2's input, which
    is int4 there and of GELU's codes, int8, in eager mode."""
    torch.manual_seed(0)
    net, x = nn.Sequential(Broken()).cuda(), torch.randn(8, 196, 256, device="cuda")
    report = hotrain.convert(net, "exact", memory="block", plan="memory")
    want = gradients(net, net, x, 1)[0]
    before = str(report.buffers)
    report.buffers.formats.clear()
    got = gradients(net, torch.compile(net), x, 1)[0]
    assert distance(got, want) < 0.1  # int4's own
    assert "norm" in before
    assert set(report.buffers.formats) >= {"layer_norm", "gelu"}
