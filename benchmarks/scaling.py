"""Time and memory of a step on one GPU, under DDP and under FSDP2, exact and converted, at the same batch on each GPU.

    torchrun --standalone --nproc_per_node 2 benchmarks/scaling.py --subjects vit_base_patch16_224/b128 --out FILE

Every process takes part in every cell; under ``one`` they do not communicate. Models are compiled: whole for ``one``
and DDP, which can run as CUDA graphs (``--graphs``), block by block for FSDP2, which cannot. A cell's time and peak are those of the slowest and of the fullest process;
``scaling`` is the images a second of all processes over those of ``one``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hotrain_bench.conditions import conditions, write
from hotrain_bench.step import clean_up
from hotrain_bench.tasks import Task, build
from hotrain_bench.timing import CudaEvents, WallClock
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hotrain
from hotrain.compress.checkpointing import blocks

WAYS = ("one", "ddp", "fsdp2")
VARIANTS = ("exact", "hotrain-default")
WARM_UP = 6  # steps: compiling, the plan's measurements, the optimizer's state


def wrapped(task: Task, way: str, device: torch.device, backend: str, graphs: bool) -> nn.Module:
    """Return the task's model, compiled and as ``way`` trains it."""
    if way == "fsdp2":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in blocks(task.model).values():
            block.compile(backend=backend)
            fully_shard(block, mesh=mesh)
        fully_shard(task.model, mesh=mesh)
        return task.model
    task.model.compile(**({"mode": "reduce-overhead"} if graphs else {"backend": backend}))
    return nn.parallel.DistributedDataParallel(task.model) if way == "ddp" else task.model


def measure(
    subject: str, way: str, variant: str, device: torch.device, steps: int, tiny: bool, backend: str, graphs: bool
) -> dict[str, Any]:
    """Time ``steps`` updates of one cell.

    Returns:
        Median milliseconds, peak allocated and reserved bytes of the worst process, the first and the last loss (means
        over processes), seconds of the first steps (compiling, the plan's measurements), and what the layers ran.
    """
    task = build(subject, device, tiny)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    for batch in task.batches:  # images of its own on every process
        for tensor in batch if isinstance(batch, tuple) else (batch,):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator, device=device))
    report = None
    if variant == "hotrain-default":
        report = hotrain.convert(task.model, plan="graphs" if graphs else "speed")
    began = time.perf_counter()
    model = wrapped(task, way, device, backend, graphs)
    optimizer = task.optimizer() or torch.optim.SGD(task.model.parameters(), lr=1e-4)
    clock = CudaEvents() if device.type == "cuda" else WallClock()
    losses = []

    def step(number: int) -> None:
        if graphs:
            torch.compiler.cudagraph_mark_step_begin()
        loss = task.loss(model, task.batches[number % len(task.batches)])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())

    for number in range(WARM_UP):
        step(number)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    seconds = time.perf_counter() - began
    dist.barrier()
    marks = [clock.mark()]
    for number in range(steps):
        step(number)
        marks.append(clock.mark())
    clock.wait()
    ms = statistics.median(clock.ms(a, b) for a, b in itertools.pairwise(marks))
    peaks = (0, 0)
    if device.type == "cuda":
        peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    worst = torch.tensor([ms, *peaks], dtype=torch.float64, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    ends = torch.stack((losses[0], losses[-1])).double()
    dist.all_reduce(ends)
    first, last = (ends / dist.get_world_size()).tolist()
    return {
        "median_ms": worst[0].item(), "peak_bytes": int(worst[1]) or None, "reserved_bytes": int(worst[2]) or None,
        "first_loss": first, "last_loss": last, "warm_up_seconds": round(seconds, 1),
        "layers": None if report is None else report.ran(),
    }  # fmt: skip


def main() -> int:
    """Measure all cells, write and print their records; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--subjects", default="vit_base_patch16_224/b128", help="comma-separated, as of bench step")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--graphs", action="store_true", help="one and ddp as CUDA graphs (GPU only)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="small shapes: whether it runs, not how fast")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--commit", help="commit of the tree, where git does not report it")
    parser.add_argument("--out", type=Path, help="append the records to this file")
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # NVLink multicast belongs to the host, whose GPUs others may share.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group(device_id=device if device.type == "cuda" else None)
    processes, failed = dist.get_world_size(), False
    common = conditions(device, sys.argv, args.commit)
    try:
        for subject in args.subjects.split(","):
            alone: dict[str, float] = {}
            for way in args.ways.split(","):
                exact, graphs = None, args.graphs and way != "fsdp2"
                for variant in args.variants.split(","):
                    row: dict[str, Any] = {"bench": "scaling", "subject": subject, "way": way, "variant": variant}
                    row |= {"graphs": graphs, "processes": processes, "error": None, "median_ms": None, "spread_ms": None}
                    row |= {"peak_bytes": None, "activation_bytes": None, "scaling": None, "time_of_exact": None}
                    try:
                        row |= measure(subject, way, variant, device, args.steps, args.tiny, args.backend, graphs)
                    except (RuntimeError, ValueError) as error:
                        row["error"], failed = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", True
                    ms = row["median_ms"]
                    if ms is not None:
                        alone |= {variant: ms} if way == "one" else {}
                        exact = ms if variant == "exact" else exact
                        row["scaling"] = round(processes * alone[variant] / ms, 3) if variant in alone else None
                        row["time_of_exact"] = round(ms / exact, 3) if exact else None
                    if dist.get_rank() == 0:
                        write(args.out, row | common)
                        print(
                            *(f"{name}={row.get(name)}" for name in row if name not in ("bench", "layers")), flush=True
                        )
                    clean_up(device)
    finally:
        dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
