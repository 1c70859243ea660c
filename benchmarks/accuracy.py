"""Accuracy of several methods on one data set, with many runs in parallel on the GPUs of one machine.

    python benchmarks/accuracy.py --data cifar10.npz --recipes small_vit_cifar10 --methods exact,hot-unbiased \\
        --seeds 0,1,2 --epochs 12 --at-once 6 --seconds 500 --out FILE

Every cell (recipe, seed, method) is a `hotrain train` process; cells start in this order. A cell that has not finished
after `--seconds` is stopped and left out, with a line that says how many epochs it had finished. FILE gets the rows of
finished cells, as they finish, in `hotrain compare`'s summary format, for ``benchmarks/results``. Step times of runs
that share a GPU are not comparable and are not recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hotrain.train.record import METRICS, RUNS, read


def main() -> None:
    """Run the cells, write and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--data", required=True)
    parser.add_argument("--recipes", required=True, help="comma-separated, each with an optional :epochs")
    parser.add_argument("--methods", required=True, help="comma-separated, each with an optional @plan")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--at-once", type=int, default=4, help="runs on one GPU")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--set", action="append", default=[], help="field=value of the runs; repeatable")
    parser.add_argument("--commit", help="commit of the tree, where git does not report it")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    gpus = max(1, torch.cuda.device_count())
    cells = []
    for recipe in args.recipes.split(","):
        name, _, epochs = recipe.partition(":")
        cells += [
            (name, int(epochs or args.epochs), method, int(seed))
            for seed in args.seeds.split(",")
            for method in args.methods.split(",")
        ]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for records in run_cells(cells, args, gpus, time.monotonic() + args.seconds, Path(folder)):
            rows = [summary_row(record) for record in records]
            write(rows, records[0] if records else {}, cells, gpus, args)
    for row in sorted(rows, key=lambda r: (r["model"], r["method"], r["seed"])):
        print(row["model"], row["method"], row["seed"], f"{row['accuracy']:.2f}", row["saved_bytes"])


def write(
    rows: list[dict[str, Any]],
    first: dict[str, Any],
    cells: list[tuple[str, int, str, int]],
    gpus: int,
    args: argparse.Namespace,
) -> None:
    """Write the rows finished so far, so that they are kept if this process is stopped."""
    meta = {key: first[key] for key in ("versions", "device", "commit") if key in first}
    meta["commit"] = args.commit or meta.get("commit")
    meta |= {
        "command": "python benchmarks/accuracy.py "
        f"--recipes {args.recipes} --methods {args.methods} --seeds {args.seeds} --epochs {args.epochs}"
        + "".join(f" --set {setting}" for setting in args.set),
        "data": Path(args.data).name,
        "gpus": gpus,
        "cells": f"{len(rows)} of {len(cells)} finished",
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**meta, "rows": rows}, indent=1) + "\n")


def run_cells(
    cells: list[tuple[str, int, str, int]], args: argparse.Namespace, gpus: int, deadline: float, folder: Path
) -> Iterator[list[dict[str, Any]]]:
    """Run the cells, at most `at_once` per GPU, until all are done or the deadline is reached.

    Args:
        cells: (recipe, epochs, method, seed).
        args: the command line.
        gpus: number of GPUs.
        deadline: in the time of `time.monotonic`.
        folder: for records and logs of the cells.

    Yields:
        The records of all finished cells, whenever a cell has finished, and at the end.
    """
    waiting = list(enumerate(cells))
    running: dict[int, tuple[subprocess.Popen[bytes], int]] = {}
    load = [0] * gpus
    while (waiting or running) and time.monotonic() < deadline:
        for number, (process, gpu) in list(running.items()):
            if process.poll() is not None:
                load[gpu] -= 1
                del running[number]
                if process.returncode:
                    print((folder / f"{number}.log").read_text()[-600:], file=sys.stderr)
                else:
                    yield finished(cells, folder)
        while waiting and min(load) < args.at_once:
            number, cell = waiting.pop(0)
            gpu = load.index(min(load))
            running[number] = (start(cell, args, gpu, folder, number), gpu)
            load[gpu] += 1
        time.sleep(0.2)
    for number, (process, _) in running.items():
        process.kill()
        process.wait()
        recipe, epochs, method, seed = cells[number]
        done = sum(len(read(path)) for path in (folder / str(number)).glob(f"*/{METRICS}"))
        print(f"stopped: {recipe} {method} seed {seed} after {done} of {epochs} epochs", file=sys.stderr)
    yield finished(cells, folder)


def finished(cells: list[tuple[str, int, str, int]], folder: Path) -> list[dict[str, Any]]:
    """Return the records of the finished cells, in the cells' order."""
    records = [record for number in range(len(cells)) for record in read(folder / str(number) / RUNS)]
    return [record for record in records if record["status"] == "finished"]


def start(
    cell: tuple[str, int, str, int], args: argparse.Namespace, gpu: int, folder: Path, number: int
) -> subprocess.Popen[bytes]:
    """Start the process of a cell on a GPU."""
    recipe, epochs, method, seed = cell
    method, _, plan = method.partition("@")
    command = [sys.executable, "-m", "hotrain.cli.main", "train", recipe, "--method", method, "--seed", str(seed)]
    command += ["--data", args.data, "--set", f"epochs={epochs}", "--out", str(folder / str(number)), "--quiet"]
    command += [part for setting in args.set for part in ("--set", setting)]
    command += ["--set", f"plan={plan}"] if plan else []
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": "1"}
    with (folder / f"{number}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def summary_row(record: dict[str, Any]) -> dict[str, Any]:
    """Make a row from the record of a finished run."""
    keys = ("model", "method", "seed", "accuracy", "saved_bytes", "bit_ops", "layers")
    losses = [row["train_loss"] for row in record["history"]]
    plan = record["config"]["plan"]
    row = {**{key: record[key] for key in keys}, "plan": plan, "step_ms": None}
    if plan == "memory":
        row["method"] += "@memory"  # every layer is converted, even where that is slower
    return {**row, "epochs": len(losses), "train_loss": losses[-1]}


if __name__ == "__main__":
    main()
