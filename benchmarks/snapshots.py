"""Weights of a recipe's network after some updates of exact training, for `benchmarks/variance.py`.

python benchmarks/snapshots.py small_vit_cifar10 --data cifar10.npz --updates 200,500,1000 --folder runs/snapshots
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from hotrain.cli.prepare import configure
from hotrain.train.distributed import processes
from hotrain.train.setup import build
from hotrain.train.training import Training


def main() -> None:
    """Train and save ``FOLDER/RECIPE_UPDATES.pt``: the settings and the state dict."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("recipe")
    parser.add_argument("--data", required=True)
    parser.add_argument("--updates", default="200,500,1000")
    parser.add_argument("--set", action="append", default=[], help="field=value of the run; repeatable")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    moments = [int(text) for text in args.updates.split(",")]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as out, processes(device) as ranks:
        settings = ["audit=false", f"device={device}", *args.set]
        run = configure(args.recipe, method="exact", data=args.data, settings=settings, seed=0, out=Path(out))
        training = Training(build(run, ranks), ranks)
        while training.update < moments[-1]:
            epoch = training.update // training.updates_per_epoch
            training.start_epoch(epoch)
            for batches in training.setup.feed.updates(epoch):
                training.step(batches)
                if training.update in moments:
                    loss = float(training.loss_sum) / training.loss_count
                    training.loss_sum.zero_()
                    training.loss_count = 0
                    value = {
                        "update": training.update,
                        "set": args.set,
                        "loss": loss,
                        "model": training.model.state_dict(),
                    }
                    torch.save(value, args.folder / f"{args.recipe}_{training.update}.pt")
                    print(args.recipe, training.update, f"mean loss since the last {loss:.3f}", flush=True)
                if training.update == moments[-1]:
                    break


if __name__ == "__main__":
    main()
