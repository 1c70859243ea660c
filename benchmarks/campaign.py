"""Campaigns against the library, with the counts of cases tried: ``soak``, ``faults`` and ``fuzz``.

    python benchmarks/campaign.py fuzz [--cases 200] [--seed 0] [--kinds "lines;settings"] [--out FILE]
    python benchmarks/campaign.py soak --cases 3000  # steps of each subject
    python benchmarks/campaign.py faults --cases 30  # as root: a disk that is full is a small file system in memory

Each prints what it finds at once, appends a record of each kind of case to FILE, and exits 1 if there was a finding.
What is tried, and what counts as a finding, is in the modules of ``benchmarks/hotrain_campaign``.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hotrain_bench.conditions import conditions, parser_of, write
from hotrain_campaign.cases import Tally, tried

import hotrain
import hotrain.train  # noqa: F401 (first: it lets timm load beside a CPU-only PyTorch)


def fuzz(args: argparse.Namespace, folder: Path, done: Callable[..., None]) -> None:
    """Random command lines and damaged files."""
    from hotrain_campaign import fuzz as campaign

    campaign.preload()
    good = campaign.good_files(folder)
    for kind in args.kinds.split(";") if args.kinds else campaign.KINDS:
        begun = time.monotonic()
        cases = list(campaign.KINDS[kind](good, args.cases, random.Random(f"{kind} {args.seed}")))
        tallies = tried(cases, folder / f"scratch {kind}", print)
        for name, tally in tallies.items():
            done(name, tally, (time.monotonic() - begun) / len(tallies))


def soak(args: argparse.Namespace, folder: Path, done: Callable[..., None]) -> None:
    """Thousands of training steps with flat memory."""
    from hotrain_campaign.soak import soaked

    begun = time.monotonic()
    names = args.kinds.split(";") if args.kinds else None
    for name, tally, found in soaked(args.cases, folder, print, names):
        done(name, tally, time.monotonic() - begun, **found)
        begun = time.monotonic()


def faults(args: argparse.Namespace, folder: Path, done: Callable[..., None]) -> None:
    """Faults of machines and of numbers."""
    from hotrain_campaign import faults as campaign
    from hotrain_campaign import fuzz

    fuzz.preload()
    good = fuzz.good_files(folder)
    begun = time.monotonic()
    names = args.kinds.split(";") if args.kinds else None
    for name, tally in campaign.tried(good.npz, folder, args.cases, args.seed, print, names):
        done(name, tally, time.monotonic() - begun)
        begun = time.monotonic()


CAMPAIGNS = {"soak": soak, "faults": faults, "fuzz": fuzz}


def main() -> None:
    """Run a campaign and append its records."""
    parser = parser_of(__doc__)
    parser.add_argument("campaign", choices=CAMPAIGNS)
    parser.add_argument("--cases", type=int, default=200, help="of each kind, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", help="some of them, separated by semicolons")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    common = conditions(torch.device("cpu"), sys.argv, args.commit)
    empty = dict.fromkeys(("median_ms", "spread_ms", "peak_bytes", "activation_bytes"))
    findings = 0

    def done(kind: str, tally: Tally, seconds: float, **found: Any) -> None:
        nonlocal findings
        findings += len(tally.findings)
        counts = {"cases": tally.cases, **tally.outcomes}
        print(f"{args.campaign}: {kind}: {counts}, {seconds:.0f} s", flush=True)
        row: dict[str, Any] = {"bench": "campaign", "subject": args.campaign, "variant": kind, "seed": args.seed}
        row |= {"cases": tally.cases, "outcomes": dict(tally.outcomes), "findings": tally.findings, "seconds": seconds}
        write(args.out, {**row, **found, **empty, **common})

    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        CAMPAIGNS[args.campaign](args, Path(folder), done)
    print(f"{findings} findings")
    raise SystemExit(1 if findings else 0)


if __name__ == "__main__":
    main()
