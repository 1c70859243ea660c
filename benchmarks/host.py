"""Host time of a layer's forward and backward in eager mode, exact and converted: what a GPU waits for.

    python benchmarks/host.py --out FILE

A step is issued without waiting for the GPU; the time until Python is free again is the host's. Each variant is a layer
of its own, in turns with the others, since the host's speed changes. The launches of one step are counted by the
profiler. On a CPU (``--device cpu``) the time has the work itself in it: whether it runs, not how fast.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from hotrain_bench.conditions import conditions, device_named, parser_of, write
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import hotrain
from hotrain.planning import clock
from hotrain.train import parse_method

VARIANTS = ("exact", "hq8", "hq8:number=int", "hot-unbiased", "hot-importance")
STEPS = 10  # issued in a row: few enough for the GPU's queue


def built(variant: str, outputs: int, inputs: int, device: torch.device) -> nn.Module:
    """A layer that follows the method (`parse_method`), or an exact one."""
    name, overrides = parse_method(variant)
    layer = nn.Linear(inputs, outputs, device=device, dtype=torch.bfloat16)
    if name != "exact":
        method = hotrain.preset(name, **overrides)
        hotrain.convert(layer, method, plan="memory", memory="linear", filter_fn=lambda *_: True)
    return layer


def step(layer: nn.Module, x: torch.Tensor, g: torch.Tensor) -> None:
    """Forward and backward."""
    torch.autograd.grad(layer(x), (x, *layer.parameters()), g)


def launches(layer: nn.Module, x: torch.Tensor, g: torch.Tensor) -> int | None:
    """Kernels and copies that one step puts on the GPU; None on a CPU."""
    if x.device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step(layer, x, g)
        torch.cuda.synchronize(x.device)
    # The host's own calls (cudaLaunchKernel, …) are events too.
    return sum(event.device_type == DeviceType.CUDA for event in found.events())


def main() -> int:
    """Measure, write and print the records."""
    parser = parser_of(__doc__)
    for name, default in (("tokens", 25216), ("outputs", 768), ("inputs", 768), ("rounds", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--device")
    args = parser.parse_args()
    device = device_named(args.device)
    x = torch.randn(args.tokens, args.inputs, device=device, dtype=torch.bfloat16)[None].requires_grad_()
    g = torch.randn(1, args.tokens, args.outputs, device=device, dtype=torch.bfloat16)
    layers = {variant: built(variant, args.outputs, args.inputs, device) for variant in args.variants.split(",")}
    times: dict[str, list[float]] = {variant: [] for variant in layers}
    for number in range(args.rounds + 1):
        for variant, layer in layers.items():
            began = clock(device)
            for _ in range(STEPS):
                step(layer, x, g)
            ms = (time.perf_counter() - began) * 1e3 / STEPS
            clock(device)
            if number:  # the first compiles and finds scales
                times[variant].append(ms)
    common = conditions(device, sys.argv, args.commit)
    for variant, found in times.items():
        row: dict[str, Any] = {"bench": "host", "subject": f"linear/{args.tokens}x{args.outputs}x{args.inputs}"}
        row |= {"variant": variant, "median_ms": statistics.median(found), "spread_ms": statistics.pstdev(found)}
        row |= {"peak_bytes": None, "activation_bytes": None, "launches": launches(layers[variant], x, g)}
        write(args.out, row | common)
        print(f"{variant:<20}{row['median_ms']:7.3f} ± {row['spread_ms']:.3f} ms  {row['launches']} launches")
    return 0


if __name__ == "__main__":
    sys.exit(main())
