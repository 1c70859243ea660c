"""Two processes on gloo: ranks draw different numbers, replicas stay equal, sharded parameters train."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from two_processes import found_by_each, process_group

import hotrain
from hotrain import planning
from hotrain.transform.tokens import Grid

STEPS = 3


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def batch() -> Tensor:
    """The same on both ranks: gradients differ by the draws alone."""
    return torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(3))


def _worker(rank: int, port: int, folder: str) -> None:
    with process_group(rank, port):
        hotrain.manual_seed(0)
        found = {"ddp": ddp(), "compiled ddp": ddp(compiled=True), "fsdp": fsdp(), "compiled fsdp": compiled_fsdp()}
        torch.save(found, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found: they start once for all tests."""
    return found_by_each(_worker, tmp_path_factory.mktemp("ranks"))


def ddp(compiled: bool = False) -> dict[str, Any]:
    net = model()
    hotrain.manual_seed(0)
    hotrain.convert(net, "hot-unbiased")
    local = torch.autograd.grad(net(batch()).square().mean(), net[0].weight)[0]
    net[0].zero_grad()
    hotrain.manual_seed(0)
    replica: nn.Module = DistributedDataParallel(net)
    if compiled:
        replica = torch.compile(replica, backend="aot_eager")  # type: ignore[assignment]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    averaged = None
    for _ in range(STEPS):
        optimizer.zero_grad()
        replica(batch()).square().mean().backward()
        averaged = net[0].weight.grad.clone() if averaged is None else averaged
        optimizer.step()
    return {"local": local, "averaged": averaged, "weights": [p.detach() for p in net.parameters()]}


def fsdp() -> dict[str, Any]:
    """FSDP2 of each layer's weights, converted before sharding and after it; exact, with nothing lost, and with hot."""
    from torch.distributed.fsdp import fully_shard

    grads: dict[str, Any] = {}
    lossless = hotrain.preset("hot", rank=16, grad_input_bits=None, grad_weight_bits=None, saved_bits=None)
    methods = {"exact": "exact", "lossless": lossless, "lossless, sharded first": lossless, "hot": "hot"}
    for name, method in methods.items():
        net = nn.Sequential(model(), nn.LayerNorm(64))
        first = "sharded first" in name
        if not first:
            hotrain.convert(net, method)
        fully_shard(net[0], mesh=_mesh())
        fully_shard(net, mesh=_mesh())
        if first:
            hotrain.convert(net, method)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            net(batch()).square().mean().backward()
            grads[name] = [p.grad.full_tensor() for p in net.parameters()]
            optimizer.step()
        grads[f"{name} calls"] = [state.calls for _, _, state in hotrain.converted_layers(net)]
        grads[f"{name} bytes"] = hotrain.saved_bytes(net, batch()).total
    net = model()
    fully_shard(net[0], mesh=_mesh())
    grads["of a layer itself"] = str(hotrain.convert(net, "hot"))
    return grads


class Block(nn.Module):
    """One that the compiler does not step over, as it does over `nn.Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def compiled_fsdp() -> dict[str, Any]:
    """Blocks compiled one by one, then sharded: the usual order. Gradients of two steps, compiled and not."""
    from torch.distributed.fsdp import fully_shard

    grads: dict[str, Any] = {}
    for name in ("eager", "compiled"):
        hotrain.manual_seed(0)
        net = nn.Sequential(Block(), Block())
        hotrain.convert(net, "hot-unbiased")
        for block in net:
            if name == "compiled":
                block.compile(backend="aot_eager", fullgraph=True)
            fully_shard(block, mesh=_mesh())
        fully_shard(net, mesh=_mesh())
        torch._dynamo.utils.counters.clear()
        for _ in range(2):
            net.zero_grad()
            net(batch().requires_grad_()).square().mean().backward()
            grads[name] = [p.grad.full_tensor() for p in net.parameters()]
        grads[f"{name} graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        grads[f"{name} steps"] = [state.draws.step for _, _, state in hotrain.converted_layers(net)]
    return grads


def _mesh() -> Any:
    return dist.device_mesh.init_device_mesh("cpu", (2,))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "compiled ddp"])
def test_ddp_draws_differently_and_stays_in_step(ranks: list[dict[str, Any]], kind: str) -> None:
    """On equal inputs the ranks' own gradients differ (so their errors average out), and weights stay equal.

    Compiled, the layers' counters are on the device, where DistributedDataParallel must not make them all one."""
    first, second = (rank[kind] for rank in ranks)
    assert not torch.equal(first["local"], second["local"])
    torch.testing.assert_close(first["averaged"], (first["local"] + second["local"]) / 2, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))
    start = [p.detach() for p in model().parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(first["weights"], start, strict=True))


@pytest.mark.slow
def test_fsdp2_shards_converted_layers(ranks: list[dict[str, Any]]) -> None:
    """Weights are gathered, freed and gathered again around the kept codes: two AdamW steps, equal to exact where
    the method loses nothing (float32 products in another order: 1e-4 of a gradient's size)."""
    for found in (rank["fsdp"] for rank in ranks):
        assert found["lossless calls"] == found["lossless, sharded first calls"] == found["hot calls"] == [2, 2]
        assert "convert before fully_shard" in found["of a layer itself"]
        for order in ("lossless", "lossless, sharded first"):
            for got, want in zip(found[order], found["exact"], strict=True):
                assert (got - want).norm() <= 1e-4 * want.norm()
        assert all(g.isfinite().all() for g in found["hot"])
        assert 0 < found["hot bytes"] < found["lossless bytes"] <= found["exact bytes"]
        assert not torch.equal(found["hot"][0], found["exact"][0])
    assert all(torch.equal(a, b) for a, b in zip(ranks[0]["fsdp"]["hot"], ranks[1]["fsdp"]["hot"], strict=True))


@pytest.mark.slow
def test_ddp_compiled_takes_the_same_steps(ranks: list[dict[str, Any]]) -> None:
    """Three SGD steps on the same draws. A rounding that a last bit flips moves an entry of a gradient by one step of
    its codes: 1e-3 of a weight's size is a hundred times less than what the steps change."""
    for rank in ranks:
        for got, want in zip(rank["compiled ddp"]["weights"], rank["ddp"]["weights"], strict=True):
            assert (got - want).norm() <= 1e-3 * want.norm()


@pytest.mark.slow
def test_fsdp2_of_compiled_blocks(ranks: list[dict[str, Any]]) -> None:
    """Parameters are gathered outside of the graphs; the second step's gradients are the uncompiled ones."""
    for found in (rank["compiled fsdp"] for rank in ranks):
        assert found["compiled graphs"] >= 1
        assert found["compiled steps"] == found["eager steps"] == [1] * 4
        for got, want in zip(found["compiled"], found["eager"], strict=True):
            assert (got - want).norm() <= 1e-3 * want.norm()


def _plans(rank: int, port: int, folder: str) -> None:
    """Each rank measures times of its own."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        both = [planning.agreed(f"layer {n}", (float(rank), 2.5)) for n in range(20)]
        only_here = planning.agreed(f"only on {rank}", None)
        method, grid = hotrain.preset("hq8"), Grid(8, 8, prefix=1)
        x, w, gpu = (4, 65, 32), (96, 32), torch.device("cuda", rank)
        question = planning.Question(
            x, w, torch.bfloat16, torch.float32, True, True, True, method, grid, False, None, gpu
        )
        torch.save({"both": both, "only": only_here, "key": question.key}, Path(folder) / f"{rank}.pt")
    finally:
        dist.barrier()
        dist.destroy_process_group()


def test_ranks_plan_by_the_same_measurement(tmp_path: Path) -> None:
    """The first that was posted; what one rank alone asks for makes none wait. Of a layer all ask by the same key,
    though hashes of strings, and with them the order of sets, are drawn anew in each process."""
    found = found_by_each(_plans, tmp_path)
    assert found[0] == found[1] | {"only": None}
    assert {ms for ms, _ in found[0]["both"]} <= {0.0, 1.0}
    assert planning.agreed("in one process", [1.0]) == [1.0]
