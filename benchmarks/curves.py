"""Convergence of training with the kernels against the reference: distance of mean loss curves over seeds.

    python benchmarks/curves.py --data cifar10.npz [--recipes small_vit_cifar10,small_resnet18_cifar10] [--out FILE]

Every recipe is trained for `--steps` updates with each seed, with the kernels and with `hotrain.kernels.disabled`, from
the same weights and batches; `--at-once` runs in parallel processes, spread over the machine's GPUs. The verdict
compares the distance of the two mean curves with the spread over seeds. Needs a CUDA device: elsewhere there are no
kernels to compare.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from hotrain_bench.conditions import conditions, parser_of, write

from hotrain.cli.prepare import configure
from hotrain.train import Progress, TrainRun, train

PATHS = ("definition", "kernels")
WINDOW = 10  # updates that a point of a curve averages


def main() -> int:
    """Train, write the records, print the verdicts; return 1 if a distance exceeds the spread."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", required=True, help="an .npz file, or a name that hotrain.train.load_data knows")
    parser.add_argument("--recipes", default="small_vit_cifar10,small_resnet18_cifar10", help="comma-separated")
    parser.add_argument("--method", default="hot-unbiased")
    parser.add_argument("--seeds", type=int, default=3, help="how many; two at least")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--set", action="append", default=["warmup_epochs=0.1"], help="field=value of the runs")
    parser.add_argument("--at-once", type=int, default=4, help="runs in parallel")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds: a spread takes two seeds at least")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device, so there are no kernels to compare")
    common = conditions(torch.device("cuda"), sys.argv, args.commit)
    followed, cells = True, []
    for recipe in args.recipes.split(","):
        for seed in range(args.seeds):
            for path in PATHS:
                cells.append((recipe, seed, path, f"cuda:{len(cells) % torch.cuda.device_count()}"))
    # Spawned: a process that has forked beside CUDA cannot use it.
    with ProcessPoolExecutor(args.at_once, mp_context=get_context("spawn")) as pool:
        found = dict(zip(cells, pool.map(curve_of, cells, [args] * len(cells)), strict=True))
    for recipe in args.recipes.split(","):
        curves = {path: [c for cell, c in found.items() if cell[0] == recipe and cell[2] == path] for path in PATHS}
        answer = verdict(curves["definition"], curves["kernels"])
        followed &= answer["within"]
        write(args.out, record(f"{recipe}/{args.steps} updates", args.method, curves, answer) | common)
        print(f"{recipe} {args.method}: {answer}")
    return 0 if followed else 1


def curve_of(cell: tuple[str, int, str, str], args: argparse.Namespace) -> list[float]:
    """Return `losses` of one cell: recipe, seed, ``definition`` (the reference) or ``kernels``, device."""
    recipe, seed, path, device = cell
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"steps={args.steps}", "audit=false", f"device={device}", *args.set]
        run = configure(recipe, method=args.method, data=args.data, settings=settings, seed=seed, out=Path(folder))
        return losses(run, kernels=path == "kernels")


def losses(run: TrainRun, kernels: bool) -> list[float]:
    """Return the training loss of every update, with the kernels or with the reference."""
    curve: list[float] = []
    total, epoch, count = 0.0, 0, 0

    def note(progress: Progress) -> None:
        nonlocal total, epoch, count
        if progress.accuracy is not None:
            return
        if progress.epoch != epoch:
            total, epoch, count = 0.0, progress.epoch, 0
        # The reported loss is the mean of the epoch so far.
        count += 1
        curve.append(progress.loss * count - total)
        total = progress.loss * count

    without = contextlib.nullcontext() if kernels else importlib.import_module("hotrain.kernels").disabled()
    with without:
        train(run, on_progress=note)
    return curve


def windows(curve: list[float]) -> list[float]:
    """Return the means of `WINDOW` updates each, without an incomplete last window."""
    return [statistics.fmean(curve[i : i + WINDOW]) for i in range(0, len(curve) - WINDOW + 1, WINDOW)]


def verdict(definition: list[list[float]], kernels: list[list[float]]) -> dict[str, Any]:
    """Compare two sets of curves.

    Args:
        definition: curves of the reference, one per seed.
        kernels: curves of the kernels, one per seed.

    Returns:
        ``distance``, the mean over windows of the absolute difference of the mean curves; ``spread``, the mean over
        windows of the standard deviation of the reference's curves over seeds; ``within``, distance ≤ spread.

    Raises:
        ValueError: curves of different lengths or shorter than `WINDOW` updates, or fewer than two seeds.
    """
    smooth = [[windows(curve) for curve in side] for side in (definition, kernels)]
    lengths = {len(curve) for side in smooth for curve in side}
    if len(lengths) != 1 or 0 in lengths or min(map(len, smooth)) < 2:
        raise ValueError(f"curves of {sorted(lengths)} windows, {[len(side) for side in smooth]} seeds: not comparable")
    first, second = ([statistics.fmean(points) for points in zip(*side, strict=True)] for side in smooth)
    distance = statistics.fmean(abs(a - b) for a, b in zip(first, second, strict=True))
    spread = statistics.fmean(statistics.stdev(points) for points in zip(*smooth[0], strict=True))
    return {"distance": distance, "spread": spread, "within": distance <= spread}


def record(subject: str, method: str, curves: dict[str, list[list[float]]], answer: dict[str, Any]) -> dict[str, Any]:
    """Make the record: the verdict and the mean curves."""
    empty = dict.fromkeys(("median_ms", "spread_ms", "peak_bytes", "activation_bytes"))
    means = {
        path: [round(statistics.fmean(p), 5) for p in zip(*map(windows, side), strict=True)]
        for path, side in curves.items()
    }
    meta = {"bench": "curves", "subject": subject, "variant": method, "seeds": len(curves["kernels"])}
    return {**empty, **meta, **answer, "window": WINDOW, "mean_curves": means}


if __name__ == "__main__":
    sys.exit(main())
