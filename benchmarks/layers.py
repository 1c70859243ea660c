"""Backward time and saved bytes of exact and converted layers on a CPU, measured in one run.

    python benchmarks/layers.py [--out FILE] [--repeats N] [--batch B] [--shared]

`--shared`, for a machine with other load: one thread, and its CPU time instead of wall time.

Subjects: the four Linear layers of a ViT-S block at 197 tokens, with the model's own token grid, and 3×3 convolutions
of ResNet-18, in float32 and bfloat16, on random data. Every variant's gradients are checked against exact before it
is timed; repeats are interleaved, so a ratio compares measurements close in time. One JSON object per line.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hotrain
from hotrain.train.record import commit, device_name

Clock = Callable[[], float]

VARIANTS = ("exact", "hla", "hot", "hot-unbiased", "hq4")
# Largest relative error of (g_x, g_w) on white noise, where the low-pass keeps half of the energy: a gate, not a claim.
BOUND = {"exact": (0.02, 0.02), "hla": (0.02, 0.8), "hot": (0.3, 0.8), "hot-unbiased": (0.3, 1.5), "hq4": (0.3, 0.25)}
VIT_S = {"qkv": (384, 1152), "proj": (384, 384), "fc1": (384, 1536), "fc2": (1536, 384)}
RESNET = {"layer1.conv": (64, 64, 56), "layer3.conv": (256, 256, 14)}


def layer(kind: str, shape: tuple[int, ...], variant: str, dtype: torch.dtype) -> nn.Module:
    """Create a converted layer, with the same weights for every variant."""
    torch.manual_seed(0)
    module = nn.Linear(shape[0], shape[1]) if kind == "linear" else nn.Conv2d(shape[0], shape[1], 3, padding=1)
    module = module.to(dtype)
    hotrain.convert(
        module,
        variant,
        filter_fn=lambda m, n: True,
        grid=(14, 14) if kind == "linear" else None,
        prefix_tokens=int(kind == "linear"),
    )
    return module


def gradients(module: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Compute the gradients of x and the parameters for the output gradient g."""
    return torch.autograd.grad(module(x), (x, *module.parameters()), g)


def relative(a: Tensor, b: Tensor) -> float:
    """Return ‖a − b‖ / ‖b‖."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def measure(
    subject: str, kind: str, shape: tuple[int, ...], x: Tensor, repeats: int, clock: Clock, common: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return one record per variant: backward and forward (including the pack) in ms, saved bytes."""
    x = x.requires_grad_()
    modules = {v: layer(kind, shape, v, x.dtype) for v in VARIANTS}
    g = torch.randn_like(modules["exact"](x))
    truth = gradients(modules["exact"], x, g)
    outputs = {}
    for variant, module in modules.items():
        found = gradients(module, x, g)
        for name, got, want, bound in zip(("g_x", "g_w"), found, truth, BOUND[variant], strict=False):
            if not relative(got, want) <= bound:
                sys.exit(
                    f"{subject} {variant}: {name} is off by {relative(got, want):.3f}, allowed is {bound}; no times"
                )
        outputs[variant] = module(x)
    backward: dict[str, list[float]] = {v: [] for v in VARIANTS}
    forward: dict[str, list[float]] = {v: [] for v in VARIANTS}
    for _ in range(repeats):
        for variant, module in modules.items():
            start = clock()
            torch.autograd.grad(outputs[variant], (x, *module.parameters()), g, retain_graph=True)
            middle = clock()
            module(x)
            backward[variant].append((middle - start) * 1e3)
            forward[variant].append((clock() - middle) * 1e3)
    rows = []
    for variant, module in modules.items():
        times = sorted(backward[variant])
        rows.append(
            {
                "subject": subject,
                "variant": variant,
                "median_ms": statistics.median(times),
                "spread_ms": times[int(0.8 * len(times))] - times[int(0.2 * len(times))],
                "forward_ms": statistics.median(forward[variant]),
                "peak_bytes": None,
                "activation_bytes": hotrain.saved_bytes(module, x).total,
                **common,
            }
        )
    return rows


def main() -> None:
    """Measure all subjects, write and print the records."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, help="append the records to this file")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--shared", action="store_true", help="one thread, CPU time")
    args = parser.parse_args()
    clock: Clock = time.perf_counter
    if args.shared:
        torch.set_num_threads(1)
        clock = time.thread_time
    common = {
        "run_id": secrets.token_hex(4),
        "device": device_name(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit(),
        "command": f"python benchmarks/layers.py --repeats {args.repeats} --batch {args.batch}"
        + (" --shared" if args.shared else ""),
    }
    records: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16):
        kind = str(dtype).removeprefix("torch.")
        common |= ceilings(dtype, clock)
        for name, shape in VIT_S.items():
            x = torch.randn(args.batch, 197, shape[0], dtype=dtype)
            subject = f"vit_small/{name}/b{args.batch}/{kind}"
            records += measure(subject, "linear", shape, x, args.repeats, clock, common)
        for name, (inputs, outputs, side) in RESNET.items():
            x = torch.randn(args.batch, inputs, side, side, dtype=dtype)
            subject = f"resnet18/{name}/b{args.batch}/{kind}"
            records += measure(subject, "conv", (inputs, outputs), x, args.repeats, clock, common)
        for group, members in (("vit_small", VIT_S), ("resnet18", RESNET)):
            records += totals(
                f"{group}/all/b{args.batch}/{kind}", records, [f"{group}/{m}/b{args.batch}/{kind}" for m in members]
            )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    table(records)


def ceilings(dtype: torch.dtype, clock: Clock) -> dict[str, float]:
    """Measure copy bandwidth (bytes read and written) and product rate, with tensors well beyond the L2 cache."""
    source, target = torch.randn(1 << 24).to(dtype), torch.empty(1 << 24, dtype=dtype)
    a, b = torch.randn(6304, 1536).to(dtype), torch.randn(1536, 384).to(dtype)

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(10):
            start = clock()
            work()
            times.append(clock() - start)
        return min(times)

    return {
        "copy_gb_s": 2 * source.nbytes / best(lambda: target.copy_(source)) / 1e9,
        "product_gflop_s": 2 * a.numel() * b.shape[1] / best(lambda: a @ b) / 1e9,
    }


def totals(subject: str, records: list[dict[str, Any]], members: list[str]) -> list[dict[str, Any]]:
    """Sum the members' times and bytes: one record per variant."""
    rows = []
    for variant in VARIANTS:
        parts = [r for r in records if r["variant"] == variant and r["subject"] in members]
        sums = {k: sum(r[k] for r in parts) for k in ("median_ms", "spread_ms", "forward_ms", "activation_bytes")}
        rows.append({**parts[0], "subject": subject, **sums})
    return rows


def table(records: list[dict[str, Any]]) -> None:
    """Print the records, with ratios to exact."""
    exact = {r["subject"]: r for r in records if r["variant"] == "exact"}
    columns = f"{'backward ms':>12} {'÷ exact':>8} {'forward ms':>11} {'÷ exact':>8} {'bytes ÷ exact':>14}"
    print(f"{'subject':<34} {'variant':<14} {columns}")
    for r in records:
        base = exact[r["subject"]]
        print(
            f"{r['subject']:<34} {r['variant']:<14} {r['median_ms']:>12.2f} {r['median_ms'] / base['median_ms']:>8.2f} "
            f"{r['forward_ms']:>11.2f} {r['forward_ms'] / base['forward_ms']:>8.2f} "
            f"{r['activation_bytes'] / base['activation_bytes']:>14.3f}"
        )


if __name__ == "__main__":
    main()
