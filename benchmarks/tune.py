"""Timing of many variants of the kernels on one GPU, from which the constants in `hotrain.kernels` were chosen.

    python benchmarks/tune.py --out tune.jsonl

Compiles first, in parallel processes that fill Triton's cache, then times each variant by CUDA graphs that cycle
through several random inputs, together larger than the L2 cache: with an input in that cache a small kernel is a third
faster.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotrain.kernels import dispatch
from hotrain.kernels import gemm as P
from hotrain.kernels import quantize_kernels as C
from hotrain.kernels.reference import kept_rows
from hotrain.layer_record import AmaxHistory
from hotrain.transform.tokens import Grid, Layout, layout

LAYERS = {  # tokens, grid, outputs, inputs
    "vitb.qkv": ((128, 197), 2304, 768),
    "vitb.proj": ((128, 197), 768, 768),
    "vitb.fc1": ((128, 197), 3072, 768),
    "vitb.fc2": ((128, 197), 768, 3072),
    "llama.q": ((4, 2048), 4096, 4096),
    "llama.up": ((4, 2048), 14336, 4096),
    "llama.down": ((4, 2048), 4096, 14336),
}
FP8 = C.Output(C.E4M3, 448.0)
DEVICE = torch.device("cuda")
SETS = 128 << 20  # bytes of the inputs of one variant: more than twice an H200's cache


def of(name: str) -> Layout:
    """Return the tiles of a layer's tokens."""
    lead = LAYERS[name][0]
    return layout(lead, 16, 8, 4, "auto", Grid(14, 14, 1) if lead[1] == 197 else None, True)


@dataclass
class Variant:
    """A kernel call to time.

    Args:
        subject, name: names in the records.
        work: bytes or operations of a call.
        call: the call.
        inputs: arguments that the calls cycle through, so that none is in the L2 cache.
    """

    subject: str
    name: str
    work: float
    call: Callable[[Tensor], object]
    inputs: list[Tensor] = field(default_factory=lambda: [torch.empty(0)])


def graphed(variant: Variant, repeats: int = 25) -> float:
    """Return the median µs of one call, by replays of a graph that cycles through the inputs."""
    for t in variant.inputs:
        variant.call(t)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    each = variant.inputs * (4 if len(variant.inputs) == 1 else 1)
    with torch.cuda.graph(graph):
        made = [variant.call(t) for t in each]
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(made))
    return sorted(times)[len(times) // 2]


def sets(rows: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
    """Return random matrices, together more than twice the L2 cache."""
    count = min(24, max(2, -(-SETS // (rows * columns * dtype.itemsize))))
    return [torch.randn(rows, columns, device=DEVICE).to(dtype) for _ in range(count)]


def label(kind: str, t: C.Tiling) -> str:
    """Return the name of a variant."""
    cut = f"{kind} {t.tiles}x{t.channels}w{t.warps} loop={t.loop} stages={t.stages} group={t.group}"
    return cut if t.registers is None else f"{cut} registers={t.registers}"


X, G, W = dispatch._tilings(torch.bfloat16, few_rows=True)  # those in use, in fp8
G_TILINGS = [
    *(replace(G, loop=loop, stages=stages) for loop in (1, 2, 3, 4, 6, 12) for stages in (3, 4)),
    *(replace(G, group=group) for group in (2, 4, 16, 32)),
    *(replace(G, registers=registers) for registers in (96, 128)),
    *(C.Tiling(*shape, loop, 3) for shape in ((4, 128, 4), (4, 64, 4), (8, 128, 8), (8, 32, 4)) for loop in (2, 4)),
]
X_TILINGS = [
    *(replace(X, loop=loop, stages=stages) for loop in (3, 6, 14, 28) for stages in (3, 4)),
    *(C.Tiling(*shape, 28, 3) for shape in ((8, 64, 4), (4, 64, 2), (2, 128, 4))),
]
W_TILINGS = [*(replace(W, loop=loop) for loop in (1, 2, 4, 8)), C.Tiling(1, 128, 4, 8, 3), C.Tiling(4, 64, 4, 8, 3)]


def codes_of(which: str, name: str, key: Tensor) -> Iterator[Variant]:
    """Yield the quantizing kernels of one layer: for g_y, x and w."""
    lead, outputs, inputs = LAYERS[name]
    tokens, lay = lead[0] * lead[1], of(name)
    rows, bf, nothing = kept_rows(lay, key), torch.bfloat16, C.NOTHING

    def variant(
        kind: str, t: list[Tensor], share: float, tiling: C.Tiling, *outputs: C.Output, **options: Any
    ) -> Variant:
        history = AmaxHistory.on(DEVICE)

        def call(t: Tensor) -> object:
            return C.compress(t, lay, rows, key, *outputs, history=history, tiling=tiling, **options)

        return Variant(name, label(kind, tiling), share * t[0].numel(), call, t)

    if which in ("g", "all"):
        g = sets(tokens, outputs, bf)
        for tiling in G_TILINGS:
            yield variant("g", g, 3.5, tiling, FP8, FP8, rotate=False)
        for loop in (4, 12):
            tiling = replace(G, loop=loop)
            yield variant("g with sums", g, 3.5, tiling, FP8, FP8, rotate=False, sums=True)
            yield variant("g rotated", g, 3.5, tiling, FP8, FP8)
            yield variant("g cast only", g, 3.0, tiling, FP8, nothing, rotate=False)
            int4, int8 = C.Output(C.INT, 7.0, True, 2, True), C.Output(C.INT, 127.0, False, 2, True)
            yield variant("g int4 a token and int8, stochastic", g, 3.5, tiling, int4, C.Output(C.INT, 127.0, True, 3))
            yield variant("g int8 a token and int8, nearest", g, 3.5, tiling, int8, C.Output(C.INT, 127.0, False, 3))
    if which in ("x", "all"):
        x = sets(tokens, inputs, bf)
        for tiling in X_TILINGS:
            yield variant("x", x, 2.5, tiling, nothing, FP8, draw=True)
        yield variant("x of given rows", x, 2.5, X, nothing, FP8)
        yield variant("x int8", x, 2.5, replace(X, loop=6), nothing, C.Output(C.INT, 127.0), draw=True)
    if which in ("w", "all"):
        for dtype in (bf, torch.float32):
            w = sets(outputs, inputs, dtype)
            for tiling in W_TILINGS:
                history = AmaxHistory.on(DEVICE)

                def call(w: Tensor, tiling: C.Tiling = tiling, history: AmaxHistory = history) -> object:
                    return C.compress_weight(w, key, FP8, history, False, tiling)

                yield Variant(
                    name, label(f"w {str(dtype)[6:]}", tiling), w[0].numel() * (dtype.itemsize + 1.0), call, w
                )


def ceilings(one: Tensor) -> list[Variant]:
    """Return the ceilings: a copy and large products."""
    bf = torch.bfloat16
    found: list[Variant] = []

    def add(variant: str, call: Callable[..., object], work: float) -> None:
        found.append(Variant("ceiling", variant, work, call))

    a, b = (torch.randn(1 << 29, device=DEVICE, dtype=bf) for _ in range(2))
    add("copy", lambda _: torch.neg(b, out=a), 4.0 * 2**29)
    x, y = (torch.randn(8192, 8192, device=DEVICE, dtype=bf) for _ in range(2))
    add("bf16", lambda _: x @ y.t(), 2 * 8192.0**3)
    xq, yq = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn)
    add("fp8", lambda _: P.fp8_product(xq, yq, one, one, bf), 2 * 8192.0**3)
    xi, yi = (torch.randint(-127, 128, (8192, 8192), device=DEVICE, dtype=torch.int8) for _ in range(2))
    for blocks in (P.Blocks(), P.Blocks(128, 256, 128, 8, 3), P.Blocks(128, 128, 128, 8, 4)):
        add(
            f"int8 {blocks}",
            lambda _, blocks=blocks: P.int8_product(xi, yi, one, one, bf, blocks),
            2 * 8192.0**3,
        )
    return found


def products_of(name: str, one: Tensor, bf: torch.dtype) -> list[Variant]:
    """Return one layer's products, each of one set of operands."""
    lead, outputs, inputs = LAYERS[name]
    tokens, lay = lead[0] * lead[1], of(name)
    found: list[Variant] = []

    def add(variant: str, call: Callable[..., object], work: float) -> None:
        found.append(Variant(name, variant, work, call))

    r16 = C.padded(lay.rows)
    e4 = torch.float8_e4m3fn
    gx_a, gx_b = (
        torch.randn(tokens, outputs, device=DEVICE).to(e4),
        torch.randn(inputs, outputs, device=DEVICE).to(e4),
    )
    gw_a, gw_b = torch.randn(outputs, r16, device=DEVICE).to(e4), torch.randn(inputs, r16, device=DEVICE).to(e4)
    gb, xb, wb = (
        torch.randn(tokens, outputs, device=DEVICE).to(bf),
        torch.randn(tokens, inputs, device=DEVICE).to(bf),
        torch.randn(outputs, inputs, device=DEVICE).to(bf),
    )
    ox, ow = 2.0 * tokens * outputs * inputs, 2.0 * r16 * outputs * inputs
    add("mm gx bf16", lambda _, a=gb, b=wb: a @ b, ox)
    add("mm gw bf16", lambda _, a=gb, b=xb: a.t() @ b, ox)
    for fast in (False, True):
        add(
            f"mm gx fp8 tensor fast={fast}",
            lambda _, a=gx_a, b=gx_b, f=fast: torch._scaled_mm(a, b.t(), one, one, out_dtype=bf, use_fast_accum=f),
            ox,
        )
        add(
            f"mm gw fp8 tensor fast={fast}",
            lambda _, a=gw_a, b=gw_b, f=fast: torch._scaled_mm(a, b.t(), one, one, out_dtype=bf, use_fast_accum=f),
            ow,
        )
    sa, sb = torch.ones(tokens, 1, device=DEVICE), torch.ones(1, inputs, device=DEVICE)
    add(
        "mm gx fp8 rowwise",
        lambda _, a=gx_a, b=gx_b, sa=sa, sb=sb: torch._scaled_mm(a, b.t(), sa, sb, out_dtype=bf, use_fast_accum=False),
        ox,
    )
    add(
        "mm gx fp8 rowwise fast",
        lambda _, a=gx_a, b=gx_b, sa=sa, sb=sb: torch._scaled_mm(a, b.t(), sa, sb, out_dtype=bf, use_fast_accum=True),
        ox,
    )
    add(
        "mm gw fp8 float32 out",
        lambda _, a=gw_a, b=gw_b: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=False),
        ow,
    )
    for blocks in (P.Blocks(), P.Blocks(128, 256, 128, 8, 3), P.Blocks(128, 128, 128, 4, 3)):
        for split in (1, None) if name.startswith("vitb") else (None,):
            size = f"{blocks.m}x{blocks.n}x{blocks.k}w{blocks.warps}s{blocks.stages}"
            add(
                f"mm gw triton fp8 {size} split={split}",
                lambda _, a=gw_a, b=gw_b, bl=blocks, s=split: P.int8_product(a, b, one, one, bf, bl, s),
                ow,
            )
    codes = [torch.randint(-7, 8, t.shape, device=DEVICE, dtype=torch.int8) for t in (gx_a, gx_b, gw_a, gw_b)]
    st = torch.ones(tokens, device=DEVICE)
    for blocks in (P.Blocks(), P.Blocks(128, 256, 128, 8, 3)):
        add(
            f"mm gx int8 {blocks.m}x{blocks.n}x{blocks.k}",
            lambda _, a=codes[0], b=codes[1], bl=blocks, st=st: P.int8_product(a, b, st, one, bf, bl),
            ox,
        )
        add(
            f"mm gw int8 {blocks.m}x{blocks.n}x{blocks.k}",
            lambda _, a=codes[2], b=codes[3], bl=blocks: P.int8_product(a, b, one, one, bf, bl),
            ow,
        )
    return found


def variants(which: str) -> Iterator[Variant]:
    """Yield the variants of a part: ceilings, g, x, w, mm (products) or all. Inputs are made when they are needed."""
    key, one, bf = torch.tensor(12345, device=DEVICE), torch.ones((), device=DEVICE), torch.bfloat16
    if which in ("ceilings", "all"):
        yield from ceilings(one)
    for name in LAYERS:
        yield from codes_of(which, name, key)
        if which in ("mm", "all"):
            yield from products_of(name, one, bf)


def accumulation() -> list[dict[str, object]]:
    """Measure the relative error of fp8 products, with and without fast accumulation, at long contractions."""
    found = []
    one = torch.ones((), device="cuda")
    for k in (768, 4096, 12928):
        a, b = (torch.randn(512, k, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
        exact = a.double() @ b.double().t()
        for fast in (False, True):
            got = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast)
            error = ((got - exact).norm() / exact.norm()).item()
            found.append({"subject": f"accumulation/{k}", "variant": f"fast={fast}", "relative_error": error})
            print(found[-1], flush=True)
        got = P.int8_product(a, b, one, one, torch.float32, P.Blocks(128, 128, 128, 4, 3), 1)
        print("triton", k, ((got - exact).norm() / exact.norm()).item(), flush=True)
    return found


def breakdown() -> None:
    """Print each kernel's time within one call, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    for variant in (v for part in "gx" for v in variants(part) if v.name in (label("g", G), label("x", X))):
        variant.call(variant.inputs[0])
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            for t in variant.inputs:
                variant.call(t)
            torch.cuda.synchronize()
        for event in found.key_averages():
            if event.self_device_time_total > 0:
                print(
                    variant.subject,
                    variant.name,
                    event.key[:60],
                    f"{event.self_device_time_total / event.count:.1f} µs",
                    flush=True,
                )


def main() -> None:
    """Compile in parallel, then time the variants, write and print the records."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--which", default="all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--warm", help="i/n: compile every n-th variant and stop")
    parser.add_argument("--workers", type=int, default=14)
    args = parser.parse_args()
    if args.warm:
        i, n = map(int, args.warm.split("/"))
        for variant in itertools.islice((v for part in args.which.split(",") for v in variants(part)), i, None, n):
            if variant.name.startswith(("g ", "x ", "w ")) or "triton" in variant.name or "int8" in variant.name:
                try:
                    variant.call(variant.inputs[0])
                except Exception:
                    continue  # the timing run, which calls it again, prints why
        return
    start = time.time()
    command = [sys.executable, __file__, "--which", args.which]
    workers = [
        subprocess.Popen([*command, "--warm", f"{i}/{args.workers}"], env=os.environ) for i in range(args.workers)
    ]
    for worker in workers:
        worker.wait()
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    rows = accumulation() if "all" in args.which or "mm" in args.which else []
    for variant in (v for part in args.which.split(",") for v in variants(part)):
        subject, name = variant.subject, variant.name
        try:
            us = graphed(variant)
        except Exception as error:
            print(subject, name, type(error).__name__, str(error).splitlines()[0][:150], flush=True)
            continue
        rows.append({"subject": subject, "variant": name, "us": us, "per_s": variant.work / us * 1e6})
        print(f"{subject:11} {name:56} {us:8.1f} µs  {variant.work / us / 1e6:8.2f} T/s", flush=True)
    if "g" in args.which:
        breakdown()
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
