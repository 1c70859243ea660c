"""`hotrain bench step` for several subjects at once, each with its own variants, on the GPUs of one machine.

    python benchmarks/steps.py resnet50/b256=exact+compile,hotrain-memory \\
        vit_base_patch16_224/b128=exact+compile,hotrain --steps 30 --seconds 255 --stagger 10 --out FILE

All are prepared in parallel processes and timed one after the other (`hotrain_bench.side_by_side`). `NAME@1=…` runs on
the second GPU; all variants of a subject should run on the same one, and GPUs do not wait for one another. Groups start
`--stagger` seconds apart, since every process first runs one step of the exact model in eager mode, which needs most
memory. Parts that are not ready after `--seconds` are stopped; failures are recorded with their error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from hotrain_bench import side_by_side
from hotrain_bench.conditions import conditions, write


def main() -> int:
    """Run the groups, write the records; return 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("groups", nargs="+", help="SUBJECT[@GPU]=VARIANT,VARIANT,…; started in this order")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of a variant")
    parser.add_argument("--seconds", type=float, help="stop parts that are not ready after this time")
    parser.add_argument("--stagger", type=float, default=0.0, help="seconds between the starts of two groups")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try it without a GPU")
    parser.add_argument("--commit", help="commit of the tree, where git does not report it")
    parser.add_argument("--out", type=Path, help="append the records to this file")
    args = parser.parse_args()
    parts, waits, gpus = [], [], []
    for number, group in enumerate(args.groups):
        subject, _, variants = group.partition("=")
        subject, _, gpu = subject.partition("@")
        for place, variant in enumerate(variants.split(",")):
            parts.append((subject, variant))
            waits.append(args.stagger if number and not place else 0.0)
            gpus.append(int(gpu or 0))
    options = ["--steps", str(args.steps), "--device", args.device, *(["--tiny"] if args.tiny else [])]
    common = conditions(torch.device(args.device), sys.argv, args.commit)
    failed = 0
    for row in side_by_side.together(parts, options, args.seconds, waits, gpus if any(gpus) else None):
        write(args.out, row | common)
        failed += row["error"] is not None
        times = row["error"] or f"{row['median_ms']:.2f} ms, peak {(row['peak_bytes'] or 0) / 2**30:.2f} GiB"
        print(row["subject"], row["variant"], times, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
