"""Times many variants of the kernels side by side on one GPU; what the constants in `hotrain.kernels` were chosen from.

    python benchmarks/tune.py --out tune.jsonl

Compiles first, in parallel processes that fill Triton's cache, then times each variant by CUDA graphs on random data.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hotrain.kernels import compress as C
from hotrain.kernels import product as P
from hotrain.kernels.definition import kept_rows
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


def of(name: str) -> Layout:
    lead = LAYERS[name][0]
    return layout(lead, 16, 8, 4, "auto", Grid(14, 14, 1) if lead[1] == 197 else None, True)


def graphed(run: Callable[..., object], repeats: int = 20) -> float:
    """Median µs of one call, by replays of a graph of several calls."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    inner = 4
    with torch.cuda.graph(graph):
        for _ in range(inner):
            run()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / inner)
    return sorted(times)[len(times) // 2]


def tilings() -> list[C.Tiling]:
    # Capped at 128 registers the large tiles spill nothing and twice as many programs fit beside each other.
    capped = [(8, 64, 4, 128), (4, 128, 4, 128), (4, 128, 4, 96), (8, 128, 8, 128), (4, 64, 4, 96)]
    shapes = [(8, 64, 4, None), (4, 128, 4, None), *capped]
    return [
        C.Tiling(*shape[:3], loop, stages, registers=shape[3])
        for shape in shapes
        for loop, stages in ((6, 2), (12, 2), (12, 3), (12, 4))
    ]


def label(kind: str, t: C.Tiling) -> str:
    return f"{kind} {t.tiles}x{t.channels}w{t.warps} loop={t.loop} stages={t.stages} registers={t.registers}"


def variants(which: str) -> list[tuple[str, str, Callable[..., object], float]]:
    """(subject, variant, call, bytes or operations)."""
    found: list[tuple[str, str, Callable[..., object], float]] = []
    key, one = torch.tensor(12345, device="cuda"), torch.ones((), device="cuda")
    bf, loop6 = torch.bfloat16, C.Tiling(loop=6)

    def add(subject: str, variant: str, call: Callable[..., object], work: float) -> None:
        found.append((subject, variant, call, work))

    if which in ("ceilings", "all"):
        a, b = (torch.randn(1 << 29, device="cuda", dtype=bf) for _ in range(2))
        add("ceiling", "copy", lambda: torch.neg(b, out=a), 4.0 * 2**29)
        x, y = (torch.randn(8192, 8192, device="cuda", dtype=bf) for _ in range(2))
        add("ceiling", "bf16", lambda: x @ y.t(), 2 * 8192.0**3)
        xq, yq = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn)
        add("ceiling", "fp8", lambda: P.fp8_product(xq, yq, one, one, bf), 2 * 8192.0**3)
        xi, yi = (torch.randint(-127, 128, (8192, 8192), device="cuda", dtype=torch.int8) for _ in range(2))
        for blocks in (P.Blocks(), P.Blocks(128, 256, 128, 8, 3), P.Blocks(128, 128, 128, 8, 4)):
            add(
                "ceiling",
                f"int8 {blocks}",
                lambda blocks=blocks: P.int8_product(xi, yi, one, one, bf, blocks),
                2 * 8192.0**3,
            )
    for name, (lead, outputs, inputs) in LAYERS.items():
        tokens = lead[0] * lead[1]
        lay = of(name)
        rows = kept_rows(lay, key)
        if which in ("g", "all") and name in ("vitb.proj", "vitb.fc1"):
            g = torch.randn(tokens, outputs, device="cuda").to(bf)
            hint = C.Hints(g.device)
            for tiling in tilings():
                add(
                    name,
                    label("g", tiling),
                    lambda t=tiling, g=g, r=rows, lay=lay, h=hint: C.compress(
                        g, lay, r, key, FP8, FP8, sums=True, rotate=False, hint=h, tiling=t
                    ),
                    3.5 * g.numel(),
                )
        if which in ("x2", "all") and name in ("vitb.fc1", "vitb.fc2"):
            x = torch.randn(tokens, inputs, device="cuda").to(bf)
            hint = C.Hints(x.device)
            for tiling in tilings():
                add(
                    name,
                    label("x", tiling),
                    lambda t=tiling, x=x, r=rows, lay=lay, h=hint: C.compress(
                        x, lay, r, key, C.NOTHING, FP8, hint=h, tiling=t
                    ),
                    2.5 * x.numel(),
                )
        if which in ("g", "all") and name == "vitb.fc1":
            g = torch.randn(tokens, outputs, device="cuda").to(bf)
            hint = C.Hints(g.device)
            add(
                name,
                "g rotated",
                lambda g=g, r=rows, lay=lay, h=hint: C.compress(
                    g, lay, r, key, FP8, FP8, sums=True, hint=h, tiling=loop6
                ),
                3.5 * g.numel(),
            )
            add(
                name,
                "g no sums",
                lambda g=g, r=rows, lay=lay, h=hint: C.compress(
                    g, lay, r, key, FP8, FP8, rotate=False, hint=h, tiling=loop6
                ),
                3.5 * g.numel(),
            )
            add(
                name,
                "g cast only",
                lambda g=g, r=rows, lay=lay, h=hint: C.compress(
                    g, lay, r, key, FP8, C.NOTHING, rotate=False, hint=h, tiling=loop6
                ),
                3.0 * g.numel(),
            )
            add(
                name,
                "g int8 token + int8, nearest",
                lambda g=g, r=rows, lay=lay: C.compress(
                    g,
                    lay,
                    r,
                    key,
                    C.Output(C.INT, 127.0, False, 2, True),
                    C.Output(C.INT, 127.0, False, 3),
                    tiling=loop6,
                ),
                3.5 * g.numel(),
            )
            add(
                name,
                "g int4 token + int8, stochastic",
                lambda g=g, r=rows, lay=lay: C.compress(
                    g, lay, r, key, C.Output(C.INT, 7.0, True, 2, True), C.Output(C.INT, 127.0, True, 3), tiling=loop6
                ),
                3.5 * g.numel(),
            )
        if which in ("w", "all") and name in ("vitb.fc1", "vitb.fc2", "llama.up"):
            for dtype in (torch.float32, bf) if name.startswith("vitb") else (bf,):
                w = torch.randn(outputs, inputs, device="cuda").to(dtype)
                hint = C.Hints(w.device)
                for tiling in (
                    C.Tiling(1, 128, 4, 2),
                    C.Tiling(2, 128, 4, 2),
                    C.Tiling(2, 128, 4, 1, 1),
                    C.Tiling(4, 128, 4, 1, 1),
                    C.Tiling(2, 256, 4, 1, 1),
                ):
                    add(
                        name,
                        label(f"w {str(dtype)[6:]}", tiling),
                        lambda t=tiling, w=w, h=hint: C.compress_weight(w, key, FP8, h, False, t),
                        w.numel() * (w.itemsize + 1.0),
                    )
        if which in ("mm", "all"):
            r16 = C.padded(lay.rows)
            e4 = torch.float8_e4m3fn
            gx_a, gx_b = (
                torch.randn(tokens, outputs, device="cuda").to(e4),
                torch.randn(inputs, outputs, device="cuda").to(e4),
            )
            gw_a, gw_b = torch.randn(outputs, r16, device="cuda").to(e4), torch.randn(inputs, r16, device="cuda").to(e4)
            gb, xb, wb = (
                torch.randn(tokens, outputs, device="cuda").to(bf),
                torch.randn(tokens, inputs, device="cuda").to(bf),
                torch.randn(outputs, inputs, device="cuda").to(bf),
            )
            ox, ow = 2.0 * tokens * outputs * inputs, 2.0 * r16 * outputs * inputs
            add(name, "mm gx bf16", lambda a=gb, b=wb: a @ b, ox)
            add(name, "mm gw bf16", lambda a=gb, b=xb: a.t() @ b, ox)
            for fast in (False, True):
                add(
                    name,
                    f"mm gx fp8 tensor fast={fast}",
                    lambda a=gx_a, b=gx_b, f=fast: torch._scaled_mm(a, b.t(), one, one, out_dtype=bf, use_fast_accum=f),
                    ox,
                )
                add(
                    name,
                    f"mm gw fp8 tensor fast={fast}",
                    lambda a=gw_a, b=gw_b, f=fast: torch._scaled_mm(a, b.t(), one, one, out_dtype=bf, use_fast_accum=f),
                    ow,
                )
            sa, sb = torch.ones(tokens, 1, device="cuda"), torch.ones(1, inputs, device="cuda")
            add(
                name,
                "mm gx fp8 rowwise",
                lambda a=gx_a, b=gx_b, sa=sa, sb=sb: torch._scaled_mm(
                    a, b.t(), sa, sb, out_dtype=bf, use_fast_accum=False
                ),
                ox,
            )
            add(
                name,
                "mm gx fp8 rowwise fast",
                lambda a=gx_a, b=gx_b, sa=sa, sb=sb: torch._scaled_mm(
                    a, b.t(), sa, sb, out_dtype=bf, use_fast_accum=True
                ),
                ox,
            )
            add(
                name,
                "mm gw fp8 float32 out",
                lambda a=gw_a, b=gw_b: torch._scaled_mm(
                    a, b.t(), one, one, out_dtype=torch.float32, use_fast_accum=False
                ),
                ow,
            )
            for blocks in (P.Blocks(), P.Blocks(128, 256, 128, 8, 3), P.Blocks(128, 128, 128, 4, 3)):
                for split in (1, None) if name.startswith("vitb") else (None,):
                    size = f"{blocks.m}x{blocks.n}x{blocks.k}w{blocks.warps}s{blocks.stages}"
                    add(
                        name,
                        f"mm gw triton fp8 {size} split={split}",
                        lambda a=gw_a, b=gw_b, bl=blocks, s=split: P.int8_product(a, b, one, one, bf, bl, s),
                        ow,
                    )
            codes = [torch.randint(-7, 8, t.shape, device="cuda", dtype=torch.int8) for t in (gx_a, gx_b, gw_a, gw_b)]
            st = torch.ones(tokens, device="cuda")
            for blocks in (P.Blocks(), P.Blocks(128, 256, 128, 8, 3)):
                add(
                    name,
                    f"mm gx int8 {blocks.m}x{blocks.n}x{blocks.k}",
                    lambda a=codes[0], b=codes[1], bl=blocks, st=st: P.int8_product(a, b, st, one, bf, bl),
                    ox,
                )
                add(
                    name,
                    f"mm gw int8 {blocks.m}x{blocks.n}x{blocks.k}",
                    lambda a=codes[2], b=codes[3], bl=blocks: P.int8_product(a, b, one, one, bf, bl),
                    ow,
                )
    return found


def accumulation() -> list[dict[str, object]]:
    """Relative error of the fp8 products' sums themselves, with and without fast accumulation, at long contractions."""
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
    """Each kernel's own time within one call, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    calls = [
        v for v in variants("g") + variants("x") if v[1] in (label("g", C.Tiling(loop=6)), label("x", C.Tiling(loop=6)))
    ]
    for subject, variant, call, _ in calls:
        call()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            for _ in range(5):
                call()
            torch.cuda.synchronize()
        for event in found.key_averages():
            if event.self_device_time_total > 0:
                print(
                    subject, variant, event.key[:60], f"{event.self_device_time_total / event.count:.1f} µs", flush=True
                )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--which", default="all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--warm", help="i/n: compile every n-th variant and stop")
    parser.add_argument("--workers", type=int, default=14)
    args = parser.parse_args()
    if args.warm:
        i, n = map(int, args.warm.split("/"))
        for _, variant, call, _ in [v for part in args.which.split(",") for v in variants(part)][i::n]:
            if variant.startswith(("g ", "x ", "w ", "rows")) or "triton" in variant or "int8" in variant:
                try:
                    call()
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
    for subject, variant, call, work in (v for part in args.which.split(",") for v in variants(part)):
        try:
            us = graphed(call)
        except Exception as error:
            print(subject, variant, type(error).__name__, str(error).splitlines()[0][:150], flush=True)
            continue
        rows.append({"subject": subject, "variant": variant, "us": us, "per_s": work / us * 1e6})
        print(f"{subject:11} {variant:48} {us:8.1f} µs  {work / us / 1e6:8.2f} T/s", flush=True)
    if "g" in args.which:
        breakdown()
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
