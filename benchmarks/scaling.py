"""Time and memory of a step on one GPU, under DDP and under FSDP2, exact and converted, at the same batch on each GPU.

    torchrun --standalone --nproc_per_node 2 benchmarks/scaling.py --subjects vit_base_patch16_224/b128 --out FILE

Every process takes part in every cell; under ``one`` they do not communicate. Models are compiled: whole for ``one``
and DDP, which can run as CUDA graphs (``--graphs``), block by block for FSDP2, which cannot. Exact and converted models
are timed in turns. A cell's time and peak are those of the slowest and of the fullest process; ``scaling`` is the
images a second of all processes over those of ``one``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from hotrain_bench.conditions import conditions, parser_of, write
from hotrain_bench.step import clean_up
from hotrain_bench.tasks import Task, build
from hotrain_bench.timing import CudaEvents, WallClock
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hotrain
from hotrain.compress.checkpointing import blocks

WAYS = ("one", "ddp", "fsdp2")
VARIANTS = ("exact", "hotrain-default")
WARM_UP = 6  # steps: compiling, the plan's measurements, the optimizer's state


def wrapped(task: Task, way: str, device: torch.device, backend: str, graphs: bool, bucket_mb: float) -> nn.Module:
    """Return the task's model, compiled and as ``way`` trains it; DDP's buckets are also where it cuts the graph."""
    if way == "fsdp2":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in blocks(task.model).values():
            block.compile(backend=backend)
            fully_shard(block, mesh=mesh)
        fully_shard(task.model, mesh=mesh)
        return task.model
    task.model.compile(**({"mode": "reduce-overhead"} if graphs else {"backend": backend}))
    if way != "ddp":
        return task.model
    return nn.parallel.DistributedDataParallel(task.model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)


class Cell:
    """One variant of a model, trained one way: built, compiled and warmed up.

    Args:
        args: of the command line.
        subject, way, variant: of the record.
        device: of this process.
        graphs: whether it runs as CUDA graphs.

    Attributes:
        peaks: allocated and reserved bytes of a step, less what other cells hold; 0 where CUDA graphs share a pool
            with those of another cell.
        seconds: of the first steps: compiling, the plan's measurements.
    """

    def __init__(
        self, args: argparse.Namespace, subject: str, way: str, variant: str, device: torch.device, graphs: bool
    ) -> None:
        others = _allocated(device)
        self.task = task = build(subject, device, args.tiny)
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        with torch.no_grad():  # Llama's inputs have gradients
            for batch in task.batches:  # images of its own on every process
                for tensor in batch if isinstance(batch, tuple) else (batch,):
                    if tensor.is_floating_point():
                        tensor.copy_(torch.randn(tensor.shape, generator=generator, device=device))
        self.report = None
        if variant == "hotrain-default":
            self.report = hotrain.convert(task.model, plan="graphs" if graphs else "speed")
        began = time.perf_counter()
        self.device, self.graphs = device, graphs
        self.model = wrapped(task, way, device, args.backend, graphs, args.bucket_mb)
        self.optimizer = task.optimizer() or torch.optim.SGD(task.model.parameters(), lr=1e-4)
        self.losses: list[Tensor] = []
        self.medians: list[float] = []
        for _ in range(WARM_UP):
            self.step()
        _allocated(device)  # waits
        self.seconds = time.perf_counter() - began
        self.step()
        self.peaks = (0, 0)
        if device.type == "cuda" and not (graphs and others[0] > 1 << 20):
            now = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            self.peaks = now[0] - others[0], now[1] - others[1]

    def step(self) -> None:
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        batch = self.task.batches[len(self.losses) % len(self.task.batches)]
        loss = self.task.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach().clone())

    def time(self, steps: int) -> None:
        """Time some updates, with all processes."""
        clock = CudaEvents() if self.device.type == "cuda" else WallClock()
        self.step()
        dist.barrier()
        marks = [clock.mark()]
        for _ in range(steps):
            self.step()
            marks.append(clock.mark())
        clock.wait()
        self.medians.append(statistics.median(clock.ms(a, b) for a, b in itertools.pairwise(marks)))

    def record(self) -> dict[str, Any]:
        """Milliseconds (median of the rounds, half of their range), bytes of the worst process, the first and the last
        loss (means over processes), and what the layers ran."""
        ms, spread = statistics.median(self.medians), (max(self.medians) - min(self.medians)) / 2
        worst = torch.tensor([ms, spread, *self.peaks], dtype=torch.float64, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        ends = torch.stack((self.losses[0], self.losses[-1])).double()
        dist.all_reduce(ends)
        first, last = (ends / dist.get_world_size()).tolist()
        return {
            "median_ms": worst[0].item(), "spread_ms": worst[1].item(), "peak_bytes": int(worst[2]) or None,
            "reserved_bytes": int(worst[3]) or None, "first_loss": first, "last_loss": last,
            "warm_up_seconds": round(self.seconds, 1), "layers": None if self.report is None else self.report.ran(),
        }  # fmt: skip


def _allocated(device: torch.device) -> tuple[int, int]:
    """Bytes that are allocated and reserved now, once all work is done; peaks are counted from here."""
    if device.type != "cuda":
        return 0, 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)


def compared(
    args: argparse.Namespace, subject: str, way: str, device: torch.device, graphs: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The variants and their records. They are timed in turns, since the host's speed changes."""
    cells: dict[str, Cell | str] = {}
    for variant in args.variants.split(","):
        try:
            cells[variant] = Cell(args, subject, way, variant, device, graphs)
        except (RuntimeError, ValueError) as error:
            cells[variant] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    for _ in range(args.rounds):
        for cell in cells.values():
            if isinstance(cell, Cell):
                cell.time(args.steps)
    for variant, cell in cells.items():
        yield variant, cell.record() if isinstance(cell, Cell) else {"error": cell}


def main() -> int:
    """Measure all cells, write and print their records; 1 if one failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--subjects", default="vit_base_patch16_224/b128", help="comma-separated, as of bench step")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--graphs", action="store_true", help="one and ddp as CUDA graphs (GPU only)")
    parser.add_argument("--rounds", type=int, default=4, help="turns in which the variants are timed")
    parser.add_argument("--steps", type=int, default=8, help="of a turn, after one that is not timed")
    parser.add_argument("--tiny", action="store_true", help="small shapes: whether it runs, not how fast")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="MiB of gradients that DDP reduces at once")
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
                for variant, found in compared(args, subject, way, device, graphs):
                    row: dict[str, Any] = {"bench": "scaling", "subject": subject, "way": way, "variant": variant}
                    row |= {"graphs": graphs, "processes": processes, "error": None, "median_ms": None}
                    row |= {"bucket_mb": args.bucket_mb if way == "ddp" else None}
                    row |= {"spread_ms": None, "peak_bytes": None, "activation_bytes": None}
                    row |= {"scaling": None, "time_of_exact": None, **found}
                    failed, ms = failed or row["error"] is not None, row["median_ms"]
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
