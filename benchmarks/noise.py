"""Effect of noise in g_w on a small ViT with exact g_x, for several ranks, rates and batches: loss and attention.

    python benchmarks/noise.py --data cifar10.npz [--steps 1200] [--at-once 10] [--out FILE]

Every configuration of `CONFIGURATIONS` trains from the same weights. Recorded are the mean training loss of every 200
updates and, for 32 images at the end, by block, the range of the attention logits within a row and the entropy of the
rows in nats: ln 64 = 4.16 for uniform attention to all 64 tokens, 0.7 for attention to two.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from hotrain_bench.conditions import conditions, parser_of, write
from torch import Tensor, nn

import hotrain
from hotrain.cli.prepare import configure
from hotrain.train.distributed import processes
from hotrain.train.setup import build
from hotrain.train.training import Training

RECIPE = "small_vit_cifar10"
WINDOW = 200  # updates that a recorded loss averages
IMAGES = 32


@dataclass(frozen=True)
class Configuration:
    """A configuration to train.

    Args:
        name: name in the records.
        rows: (rank, drawn) of g_w; None for exact products.
        layers: pattern of the names of converted layers.
        settings: fields of the run.
    """

    name: str
    rows: tuple[int, int] | None = None
    layers: str = r"^(?!head)"
    settings: dict[str, Any] = field(default_factory=dict)


LOW = (8, 4)
CONFIGURATIONS = (
    Configuration("exact"),
    Configuration("4+4", LOW),
    Configuration("8 fixed", (8, 0)),
    Configuration("6+2", (8, 2)),
    Configuration("4+8", (12, 8)),
    Configuration("4+4, qkv alone", LOW, "qkv"),
    Configuration("4+4, proj alone", LOW, r"attn\.proj"),
    Configuration("4+4, fc1 and fc2 alone", LOW, "mlp"),
    Configuration("4+4, patches alone", LOW, "patch_embed"),
    Configuration("exact, clipped at 1", settings={"clip": 1.0}),
    Configuration("4+4, clipped at 1", LOW, settings={"clip": 1.0}),
    Configuration("exact, half the rate", settings={"lr": 5e-4}),
    Configuration("4+4, half the rate", LOW, settings={"lr": 5e-4}),
    Configuration("exact, half the batch", settings={"batch_size": 64}),
    Configuration("exact, a quarter of the batch", settings={"batch_size": 32}),
)


def main() -> int:
    """Train the configurations, write and print the records."""
    parser = parser_of(__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--only", default=".", help="pattern of the configurations' names")
    parser.add_argument("--set", action="append", default=["epochs=20", "warmup_epochs=2", "lr=1e-3"])
    parser.add_argument("--at-once", type=int, default=10, help="runs in parallel")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    chosen = [c for c in CONFIGURATIONS if re.search(args.only, c.name)]
    devices = [f"cuda:{i % gpus}" if gpus else "cpu" for i in range(len(chosen))]
    common = conditions(device, sys.argv, args.commit)
    with ProcessPoolExecutor(args.at_once, mp_context=get_context("spawn")) as pool:
        for what, row in zip(chosen, pool.map(measure, chosen, devices, [args] * len(chosen)), strict=True):
            write(args.out, row | common)
            print(what.name, row["losses"], "entropy", row["entropy"])
    return 0


def measure(what: Configuration, device: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one configuration and return its record."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # NaN from large logits (docs/limitations.md)
    with tempfile.TemporaryDirectory() as folder, processes(device) as ranks:
        settings = ["audit=false", f"device={device}", *args.set]
        run = configure(RECIPE, method="exact", data=args.data, settings=settings, seed=0, out=Path(folder))
        run = replace(run, **what.settings)
        setup = build(run, ranks)
        if what.rows is not None:
            pattern = re.compile(what.layers)
            method = hotrain.preset("hot-unbiased", grad_input_bits=None, rank=what.rows[0], sampled=what.rows[1])
            hotrain.convert(
                setup.model, method, number="int", plan="memory", filter_fn=lambda _, name: bool(pattern.search(name))
            )
        training = Training(setup, ranks)
        losses: list[float] = []
        while training.update < args.steps:
            epoch = training.update // training.updates_per_epoch
            training.start_epoch(epoch)
            for batches in setup.feed.updates(epoch):
                training.step(batches)
                if training.update % WINDOW == 0:
                    losses.append(round(float(training.loss_sum) / training.loss_count, 4))
                    training.loss_sum.zero_()
                    training.loss_count = 0
                if training.update == args.steps:
                    break
        with torch.no_grad(), setup.autocast():
            spread, entropy = attention(setup.model, setup.example()[0][:IMAGES])
    empty = dict.fromkeys(("median_ms", "spread_ms", "peak_bytes", "activation_bytes"))
    meta = {"bench": "noise", "subject": f"{RECIPE}/{args.steps} updates", "variant": what.name}
    return {**empty, **meta, "window": WINDOW, "losses": losses, "logit_spread": spread, "entropy": entropy}


def attention(model: nn.Module, images: Tensor) -> tuple[list[float], list[float]]:
    """Return, for each block, the mean range of a row's logits (largest minus smallest) and a row's mean entropy."""
    seen: list[Tensor] = []
    heads = model.blocks[0].attn.num_heads  # type: ignore[union-attr,index]
    hooks = [b.attn.qkv.register_forward_hook(lambda _m, _i, y: seen.append(y.float())) for b in model.blocks]  # type: ignore[union-attr]
    was_training = model.training
    model.eval()(images)
    model.train(was_training)
    for hook in hooks:
        hook.remove()
    spreads, entropies = [], []
    for y in seen:
        q, k, _ = y.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        p = logits.softmax(-1)
        spreads.append(round(float((logits.amax(-1) - logits.amin(-1)).mean()), 1))
        entropies.append(round(float(-(p * p.clamp_min(1e-9).log()).sum(-1).mean()), 2))
    return spreads, entropies


if __name__ == "__main__":
    sys.exit(main())
