"""DDP and FSDP2 against one process on the whole batch, sharded checkpoints, and examples/distributed.py.

Two processes on gloo start once for all tests. `python -m pytest tests/test_distributed_whole.py -m gpu` runs them
on two GPUs with NCCL.
"""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from two_processes import found_by_each, process_group

import hotrain

GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")]
WIDTH, ODD, SAMPLES = 64, 51, 8  # ODD is no multiple of the two shards, nor of 16
METHOD = "int4"  # rounds to nearest: nothing is drawn
SEEDS = 32


class Block(nn.Module):
    """A residual MLP with an odd width inside; its activations are recomputed where asked."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, ODD), nn.Linear(ODD, WIDTH)
        self.recomputed = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False) if self.recomputed else self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def batch() -> Tensor:
    return torch.randn(SAMPLES, 48, WIDTH, generator=torch.Generator().manual_seed(3))


def halves(count: int) -> list[Tensor]:
    """The micro-batches of both ranks, in order: `count` of each."""
    return list(batch().chunk(2 * count))


def loss_of(net: nn.Module, x: Tensor, count: int) -> Tensor:
    return net(x).float().square().mean() / count


CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {},
    "ddp accumulated": {"count": 2},
    "fsdp accumulated": {"count": 2},
    "ddp recomputed": {"recomputed": True},
    "fsdp recomputed": {"recomputed": True},
    "fsdp bf16": {"dtype": torch.bfloat16},
    "fsdp frozen": {"frozen": True},
}
if importlib.util.find_spec("peft") is not None:
    CASES |= {"ddp lora": {"lora": True}, "fsdp lora": {"lora": True}}


def with_adapters(net: nn.Module) -> nn.Module:
    """LoRA on both layers of each block, as PEFT puts it."""
    from hotrain.train.torchvision_shim import ensure_torchvision

    ensure_torchvision()
    from peft import LoraConfig, get_peft_model

    return get_peft_model(net, LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False))


def blocks_of(net: nn.Module) -> Any:
    return net.get_base_model() if hasattr(net, "get_base_model") else net  # type: ignore[operator]


def converted(
    device: torch.device, method: Any, recomputed: bool = False, frozen: bool = False, lora: bool = False
) -> nn.Module:
    net: nn.Module = model().to(device)
    net = with_adapters(net).to(device) if lora else net
    for block in blocks_of(net):
        block.recomputed = recomputed
        if frozen:  # as under LoRA: the layers pass gradients on, and have none
            for layer in (block.up, block.down):
                layer.requires_grad_(False)
    hotrain.convert(net, method, memory="linear", plan="memory", filter_fn=lambda name, layer: True)
    return net


def sharded(net: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    for part in (*blocks_of(net), net):
        fully_shard(part, mp_policy=policy)
    return net


def gradients(net: nn.Module) -> list[Tensor]:
    """Whole, on the host; every rank has to ask."""
    found = [p.grad for p in net.parameters() if p.requires_grad]
    return [(g.full_tensor() if hasattr(g, "full_tensor") else g).float().cpu() for g in found]  # type: ignore[union-attr]


def on_two(way: str, device: torch.device, method: Any, count: int = 1, dtype: Any = None, **of: Any) -> dict[str, Any]:
    """Loss and gradients of a step in which each rank has its half of the batch, in `count` micro-batches."""
    net = converted(device, method, **of)
    wrapped = sharded(net, dtype) if way == "fsdp" else DistributedDataParallel(net)
    whole = torch.zeros((), device=device)
    for n in range(count):
        waits = n + 1 < count
        if way == "fsdp":
            net.set_requires_gradient_sync(not waits)  # type: ignore[operator]
        with wrapped.no_sync() if waits and way == "ddp" else contextlib.nullcontext():  # type: ignore[operator]
            loss = loss_of(wrapped, halves(count)[dist.get_rank() * count + n].to(device), count)
            loss.backward()
        whole += loss.detach() / 2
    dist.all_reduce(whole)
    return {"loss": whole.item(), "gradients": gradients(net)}


def on_one(device: torch.device, method: Any, count: int = 1, dtype: Any = None, **of: Any) -> dict[str, Any]:
    """The same in one process: what each rank accumulates, and the mean of both."""
    loss, each = 0.0, []
    for rank in range(2):
        net = converted(device, method, **of).to(dtype or torch.float32)
        for x in halves(count)[rank * count : (rank + 1) * count]:
            own = loss_of(net, x.to(device, dtype or torch.float32), count)
            own.backward()
            loss += own.item() / 2
        each.append(gradients(net))
    return {"loss": loss, "gradients": [(a + b) / 2 for a, b in zip(*each, strict=True)]}


def spread(device: torch.device) -> dict[str, Any]:
    """Distances from the exact gradients of the whole batch: of DDP and FSDP2 with a method that draws, and of one
    process that draws anew for each half."""
    truth = torch.cat([g.flatten() for g in on_one(device, "exact")["gradients"]])

    def distance(found: list[Tensor]) -> float:
        return float((torch.cat([g.flatten() for g in found]) - truth).norm())

    found: dict[str, Any] = {"alone": []}
    for seed in range(SEEDS):
        hotrain.manual_seed(1000 + seed)
        net = converted(device, "hot-unbiased")
        for x in halves(1):
            loss_of(net, x.to(device), 2).backward()
        found["alone"].append(distance(gradients(net)))
    hotrain.manual_seed(0)
    return found | {way: distance(on_two(way, device, "hot-unbiased")["gradients"]) for way in ("ddp", "fsdp")}


def checkpoints(device: torch.device, folder: str) -> dict[str, bool]:
    """Sharded and converted → exact in one process → sharded and converted, by torch.distributed.checkpoint."""
    net = sharded(converted(device, "hq8"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loss_of(net, batch().to(device), 1).backward()
    optimizer.step()
    dcp.save({"model": get_model_state_dict(net)}, checkpoint_id=f"{folder}/sharded")
    exact = model().to(device)
    dcp.load({"model": exact.state_dict()}, checkpoint_id=f"{folder}/sharded")
    whole = [p.full_tensor() for p in net.parameters()]  # type: ignore[union-attr]
    found = {"keys": list(get_model_state_dict(net)) == list(exact.state_dict())}
    found["to exact"] = all(torch.equal(a, b) for a, b in zip(whole, exact.parameters(), strict=True))
    with torch.no_grad():
        found["inference"] = torch.equal(net.eval()(batch().to(device)), exact.eval()(batch().to(device)))
        for p in exact.parameters():
            p.add_(1)
    dcp.save({"model": exact.state_dict()}, checkpoint_id=f"{folder}/whole")
    state = {"model": get_model_state_dict(net)}
    dcp.load(state, checkpoint_id=f"{folder}/whole")
    set_model_state_dict(net, state["model"])
    whole = [p.full_tensor() for p in net.parameters()]  # type: ignore[union-attr]
    found["to sharded"] = all(torch.equal(a, b) for a, b in zip(whole, exact.parameters(), strict=True))
    return found


def resumed(device: torch.device, folder: str) -> dict[str, Any]:
    """Two AdamW steps; and one, saved with the optimizer's state, loaded into another model and optimizer, and the
    second: a sharded converted one, and a sharded exact one, which need the same state."""

    def made(method: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = sharded(converted(device, method))
        return net, torch.optim.AdamW(net.parameters(), lr=1e-2)

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        loss_of(net, halves(1)[dist.get_rank()].to(device), 1).backward()
        optimizer.step()
        optimizer.zero_grad()
        return [p.full_tensor() for p in net.parameters()]  # type: ignore[union-attr]

    first = made(METHOD)
    step(*first)
    saved = dict(zip(("model", "optimizer"), get_state_dict(*first), strict=True))
    dcp.save(saved, checkpoint_id=f"{folder}/resumed")
    wanted, found = step(*first), {}
    for method in (METHOD, "exact"):
        other = made(method)
        state = dict(zip(("model", "optimizer"), get_state_dict(*other), strict=True))
        dcp.load(state, checkpoint_id=f"{folder}/resumed")
        set_state_dict(*other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        moments = [value["exp_avg"].full_tensor() for value in other[1].state.values()]
        found[method] = {"weights": step(*other), "moments": sum(float(m.abs().sum()) for m in moments)}
    return {"wanted": wanted, **found}


def of_the_example(folder: str) -> dict[str, Any]:
    from integrations.test_examples import example

    found = {}
    for way in ("ddp", "fsdp"):
        trained, exact = example("distributed").main(way, folder=f"{folder}/{way}")
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trained.parameters()]
        found[way] = {
            "calls": [state.calls for _, _, state in hotrain.converted_layers(trained)],
            "exact": [state.fallback for _, _, state in hotrain.converted_layers(trained)],  # as planned, on a GPU
            "equal": all(torch.equal(a, b) for a, b in zip(whole, exact.parameters(), strict=True)),
            "digest": sum(float(p.double().sum()) for p in exact.parameters()),
        }
    return found


def _worker(rank: int, port: int, folder: str, kind: str) -> None:
    with process_group(rank, port, kind) as device:
        found: dict[str, Any] = {}
        for name, case in CASES.items():
            two = on_two(name.split()[0], device, METHOD, **case)
            found[name] = {"two": two, "one": on_one(device, METHOD, **case)}
        found["spread"] = spread(device)
        found["checkpoints"] = checkpoints(device, folder)
        found["resumed"] = resumed(device, folder)
        with device:
            found["example"] = of_the_example(folder)
        torch.save(found, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=GPUS)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found: they start once for all tests."""
    return found_by_each(_worker, tmp_path_factory.mktemp("ranks"), request.param)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_one_process(ranks: list[dict[str, Any]], case: str) -> None:
    """int4 to nearest draws nothing: each rank's gradients are those of its half, and their mean is one addition and
    a division by two, so that gradients agree to the bit on both ranks; the mean loss to float32's rounding (1e-6).
    Widths are uneven in the shards."""
    for found in (rank[case] for rank in ranks):
        assert found["two"]["loss"] == pytest.approx(found["one"]["loss"], rel=1e-6)
        for got, want in zip(found["two"]["gradients"], found["one"]["gradients"], strict=True):
            assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_method_that_draws_stays_within_its_spread(ranks: list[dict[str, Any]], way: str) -> None:
    """The distance from the exact gradient of the whole batch is one of those that one process draws: within five of
    their deviations (for normal distances, by Student's t with 31 degrees of freedom, once in 37,000 seeds)."""
    alone = torch.tensor(ranks[0]["spread"]["alone"])
    assert abs(ranks[0]["spread"][way] - alone.mean()) < 5 * alone.std()
    assert ranks[0]["spread"][way] == ranks[1]["spread"][way]


@pytest.mark.slow
def test_sharded_checkpoints_go_both_ways(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["checkpoints"] == dict.fromkeys(["keys", "to exact", "inference", "to sharded"], True)


@pytest.mark.slow
def test_the_optimizer_goes_on_from_a_sharded_checkpoint(ranks: list[dict[str, Any]]) -> None:
    """The next step of what was loaded is that of what was saved, to the bit; an exact model takes the same optimizer
    state, and another step, since its gradients are others."""
    for rank in ranks:
        wanted, found, exact = (rank["resumed"][name] for name in ("wanted", METHOD, "exact"))
        assert all(torch.equal(a, b) for a, b in zip(found["weights"], wanted, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(exact["weights"], wanted, strict=True))
        assert found["moments"] == exact["moments"] > 0


@pytest.mark.slow
def test_the_example(ranks: list[dict[str, Any]]) -> None:
    """By both ways every layer ran converted, or exact with a reason on a GPU that gains no time by it; the checkpoint
    is the same on both ranks."""
    for rank in ranks:
        for found in rank["example"].values():
            assert found["equal"]
            assert len(found["calls"]) == 25
            assert all(calls >= 1 or why for calls, why in zip(found["calls"], found["exact"], strict=True))
            assert torch.cuda.is_available() or not any(found["exact"])
    assert ranks[0]["example"] == ranks[1]["example"]
