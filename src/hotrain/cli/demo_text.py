"""Texts of the demo's report: its models and the limits of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hotrain.cli.demo_records import WARM_UP, pictured

if TYPE_CHECKING:
    from hotrain.train import TrainRun

LABELS = {"demo_vit": "small ViT", "demo_resnet": "small ResNet"}


def models(runs: Sequence[TrainRun]) -> dict[str, dict[str, Any]]:
    """Return label, description and number of parameters of every model."""
    from hotrain.train import build, replace

    described = {}
    for run in runs:
        setup = build(replace(run, method="exact", method_overrides={}))
        count = sum(parameter.numel() for parameter in setup.model.parameters())
        images = setup.example()[0]
        length = f"{run.steps} updates" if run.steps is not None else f"{run.epochs} epochs"
        described[run.model] = {
            "label": LABELS.get(run.model, run.model),
            "description": f"{count:,} parameters, {images.shape[-2]}×{images.shape[-1]} pixels, "
            f"batches of {run.batch_size}, {length}",
            "parameters": count,
        }
    return described


def notes(runs: Sequence[TrainRun], methods: Sequence[str], jobs: int) -> list[str]:
    """Return the notes on what the demo's numbers show and do not show, one or two sentences each."""
    from hotrain.train import build

    feed = build(runs[0]).feed
    train, test = feed.data.train_size, sum(len(labels) for _, labels in feed.test_batches())
    together = f"{jobs} runs at a time, with one thread each" if jobs > 1 else "one run at a time, with one thread"
    said = [
        f"Real images, but few: {train:,} for training and {test} for the test. One test image is {100 / test:.2f} "
        "points. `hotrain demo --seeds 0,1,2` measures the noise.",
        "Accuracy is that of the last epoch. All methods start from the same weights and see the same batches.",
        f"The step times are no claim of speed: plain PyTorch without fused kernels, {together}.",
    ]
    if pictured(runs[0], methods):
        said.append(
            "Energy by sequency is of one training batch with the weights after exact training. LQS and |g_y| are of "
            f"training batches after {WARM_UP} exact updates: LQS chooses at the start."
        )
    if any(method.startswith("lbp-wht") for method in methods):
        said.append(
            "The ViT's 4×4 grid of tokens is smaller than the 8×8 tiles of lbp-wht, which therefore does not project "
            "its tokens: there lbp-wht's gradients are exact and it saves nothing."
        )
    return said
