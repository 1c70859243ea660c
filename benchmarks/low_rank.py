"""Accuracy and training loss of low ranks of g_w: importance in backward, ranks by layer, and what they compare with.

    python benchmarks/low_rank.py small_vit_cifar10 --data cifar10.npz --epochs 20 --seeds 0,1,2,3 --out FILE

Ranks by layer are chosen before every epoch on the first training batches, and before the first one, when gradients say
nothing yet, all rows are kept. g_x is that of the method; ``exact g_x`` in a name leaves g_w as the only difference.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from hotrain_bench.conditions import conditions, parser_of, write

import hotrain
from hotrain.cli.prepare import configure
from hotrain.ranks import calibrate_ranks
from hotrain.train.distributed import processes
from hotrain.train.evaluation import evaluate
from hotrain.train.setup import build, training_batches
from hotrain.train.training import Training


@dataclass(frozen=True)
class Configuration:
    """A configuration to train.

    Args:
        name: name in the records.
        preset: of the method; None for exact products.
        overrides: of the preset.
        budget: mean rank of ranks by layer.
    """

    name: str
    preset: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    budget: float | None = None


FLOAT: dict[str, Any] = {"grad_input_bits": None}
CONFIGURATIONS = (
    Configuration("exact"),
    Configuration("hot-importance, exact g_x", "hot-importance", FLOAT),
    Configuration("ranks by layer, mean 8, exact g_x", "hot-unbiased", FLOAT, 8.0),
    Configuration("4+4, exact g_x", "hot-unbiased", FLOAT),
    Configuration("half by importance, x int8, exact g_x", "hq", {**FLOAT, "share": 0.5}),
    Configuration("a quarter by importance, exact g_x", "hot-importance", {**FLOAT, "share": 0.25}),
    Configuration("all rows, x int4, exact g_x", "hq4", FLOAT),
    Configuration("hot-importance, g_x int8", "hot-importance", {"grad_input_bits": 8}),
    Configuration("ranks by layer, mean 8, g_x int8", "hot-unbiased", {"grad_input_bits": 8}, 8.0),
    Configuration("hot-importance", "hot-importance", {"number": "int"}),
    Configuration("hot-importance, x int8, g_x int8", "hot-importance", {"saved_bits": 8, "grad_input_bits": 8}),
    Configuration(
        "hot-importance to nearest, g_x int8", "hot-importance", {"rounding": "nearest", "grad_input_bits": 8}
    ),
    Configuration("hot-importance, g_y in fp8", "hot-importance", {"number": "e4m3"}),
    Configuration("shares by layer, half on the mean, g_y in fp8", "hot-importance", {"number": "e4m3"}, 8.0),
    Configuration("all rows, x int4, g_y in fp8", "hq4", {"number": "e4m3"}),
    Configuration("all rows, everything in fp8", "hq", {"number": "e4m3"}),
    Configuration("the default", "hq8"),
)


def main() -> int:
    """Train the configurations with every seed, write and print the records."""
    parser = parser_of(__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--only", default=".", help="pattern of the configurations' names")
    parser.add_argument("--set", action="append", default=[], help="field=value of the runs; repeatable")
    parser.add_argument("--at-once", type=int, default=8, help="runs in parallel")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    cells = [(c, int(seed)) for seed in args.seeds.split(",") for c in CONFIGURATIONS if re.search(args.only, c.name)]
    devices = [f"cuda:{i % gpus}" if gpus else "cpu" for i in range(len(cells))]
    common = conditions(device, sys.argv, args.commit)
    with ProcessPoolExecutor(args.at_once, mp_context=get_context("spawn")) as pool:
        for row in pool.map(measure, cells, devices, [args] * len(cells)):
            write(args.out, row | common)
            print(row["variant"], row["seed"], row["accuracy"], flush=True)
    return 0


def measure(cell: tuple[Configuration, int], device: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one configuration with one seed and return its record."""
    what, seed = cell
    torch.backends.cuda.enable_cudnn_sdp(False)  # NaN from large logits (docs/limitations.md)
    chosen: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, processes(device) as ranks:
        settings = ["audit=false", f"device={device}", f"epochs={args.epochs}", *args.set]
        run = configure(args.recipe, method="exact", data=args.data, settings=settings, seed=seed, out=Path(folder))
        setup = build(run, ranks)
        if what.preset is not None:
            hotrain.convert(setup.model, hotrain.preset(what.preset, **what.overrides), plan="memory")
        training = Training(setup, ranks)
        for epoch in range(args.epochs):
            training.start_epoch(epoch)
            if what.budget is not None:
                batches = [(x, y) for x, y in training_batches(setup, 2)]
                budget = what.budget if epoch else 16.0
                with setup.autocast():
                    found = calibrate_ranks(setup.model, batches, budget=budget)
                found.apply(setup.model)
                chosen.append({"v": round(found.ratio, 4), "ranks": {n: c.rank for n, c in found.layers.items()}})
            for batches in setup.feed.updates(epoch):
                training.step(batches)
            loss = training.mean_loss()
            training.loss_sum.zero_()
            training.loss_count = 0
        _, accuracy = evaluate(setup.model, setup, ranks)
    empty = dict.fromkeys(("median_ms", "spread_ms", "peak_bytes", "activation_bytes"))
    subject = f"{args.recipe}/{args.epochs} epochs"
    return {
        **empty, "bench": "low-rank", "subject": subject, "variant": what.name, "seed": seed, "accuracy": accuracy,
        "train_loss": round(loss, 5), "ranks": chosen,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
