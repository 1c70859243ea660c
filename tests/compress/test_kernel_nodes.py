"""Opaque operators become nodes of their kernels in a compiled graph; on a GPU with the same gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain
from hotrain.compress import kernel_nodes


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("kernels_in_graphs.py")
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def test_every_opaque_operator_becomes_its_kernels(rows: list[dict[str, Any]]) -> None:
    """Every operator that is registered is tried. No operator of ours is left, each kernel's results are new tensors,
    and nothing reads memory that no kernel has written."""
    *found, last = rows
    assert {row["name"] for row in found} == set(last["all"]) - {"bilinear"}  # PyTorch's kernel, which stays
    for row in found:
        assert row["changed"], row["name"]
        assert any("triton_kernel_wrapper_functional" in target for target in row["targets"]), row["name"]
        assert not any("hotrain" in target or "mutation" in target for target in row["targets"]), row["name"]
        assert row["unwritten"] == [], row["name"]


def test_results_are_those_that_the_operator_describes(rows: list[dict[str, Any]]) -> None:
    """Shapes, strides and dtypes: the graph around the operator was made of its description."""
    for row in rows[:-1]:
        assert row["after"] == row["before"], row["name"]


def test_an_operator_whose_kernel_has_failed_stays(rows: list[dict[str, Any]]) -> None:
    """Its reference runs, which Inductor would fuse into something else."""
    assert rows[-1]["broken"] is False


def test_on_a_cpu_the_operators_stay() -> None:
    """There are no kernels to put in their place."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 64)
    graph.output(graph.call_function(torch.ops.hotrain.keep_codes.default, (x, "int8")))
    assert not kernel_nodes.insert(graph)


def test_in_cuda_graphs_the_operators_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is looked at: a graph's launches take no time of the host."""
    monkeypatch.setattr(kernel_nodes, "_on_kernels", lambda node: pytest.fail("looked at"))
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.ops.hotrain.keep_codes.default, (graph.placeholder("x"), "int8")))
    with torch._inductor.config.patch("triton.cudagraphs", True):
        assert not kernel_nodes.insert(graph)


class Block(nn.Module):
    """Both norms, attention, GELU, SiLU and a gate."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate, self.down = nn.Linear(width, 384), nn.Linear(width, 384), nn.Linear(384, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(self.first(x)).reshape(b, n, 3, 3, c // 3).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))
        h = self.second(x)
        return x + self.down(F.gelu(self.up(h)) + F.silu(self.gate(h)) * self.up(h))


def images() -> nn.Module:
    norms = nn.BatchNorm2d(64), nn.BatchNorm2d(96)
    first, last = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 96, 1)
    net = nn.Sequential(first, norms[0], nn.ReLU(), last, norms[1], nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return net.to(memory_format=torch.channels_last)


def tokens(device: str) -> Tensor:
    return torch.randn(8, 96, 192, device=device)


def pictures(device: str) -> Tensor:
    return torch.randn(8, 64, 16, 16, device=device).contiguous(memory_format=torch.channels_last)


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "inputs"), [(Block, tokens), (images, pictures)], ids=["tokens", "images"])
def test_gradients_are_those_of_the_operators(
    make: Callable[[], nn.Module], inputs: Callable[[str], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels are the same. What Inductor fuses with a sum of partial sums may add in another order: float32's
    rounding of some hundred terms, 1e-5 of the largest."""
    torch.manual_seed(1)
    x = inputs("cuda")
    found: list[list[Tensor]] = []
    inserted: list[bool] = []
    insert = kernel_nodes.insert
    for way in (lambda _: False, lambda half: inserted.append(insert(half)) or inserted[-1]):
        monkeypatch.setattr(kernel_nodes, "insert", way)
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = make().cuda()
        hotrain.convert(net, "exact", memory="block", plan="memory")
        with torch._inductor.config.patch(fx_graph_cache=False):
            run = torch.compile(net)
            for _ in range(3):
                net.zero_grad()
                given = x.clone().requires_grad_()
                with torch.autocast("cuda", torch.bfloat16):
                    run(given).float().square().mean().backward()
        found.append([given.grad, *(p.grad.clone() for p in net.parameters())])  # type: ignore[list-item]
    assert any(inserted)
    for want, got in zip(*found, strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))
