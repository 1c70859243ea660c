"""Accuracy of a model on the test images, and of a backbone's features."""

from __future__ import annotations

import torch
from torch import nn

from hotrain.train import contrastive
from hotrain.train.distributed import Processes
from hotrain.train.meters import finite
from hotrain.train.run import TrainRun
from hotrain.train.setup import Setup, autocast


@torch.no_grad()
def evaluate(model: nn.Module, run: TrainRun, setup: Setup, ranks: Processes) -> tuple[float | None, float]:
    """Return mean cross-entropy and accuracy in percent over the test images of all processes."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=setup.device)
    for x, y in setup.feed.test_batches():
        with autocast(run, setup.device):
            output = model(x).float()
        sums[0] += nn.functional.cross_entropy(output, y, reduction="sum")
        sums[1] += (output.argmax(1) == y).sum()
        sums[2] += len(y)
    model.train(was_training)
    loss, correct, count = ranks.total(sums).tolist()
    return finite(loss / count), 100.0 * correct / count


@torch.no_grad()
def probe(
    learner: contrastive.TwoViews, run: TrainRun, setup: Setup, ranks: Processes
) -> tuple[float | None, float, float]:
    """Judge the features of the backbone, on each process by its part of the images.

    Returns:
        Cross-entropy and accuracy (percent) of a linear probe, and the accuracy by 20 nearest neighbours.
    """
    feed, classes = setup.feed, len(setup.data.classes)
    was_training = learner.training
    learner.eval()
    with autocast(run, setup.device):
        train, test = (
            [(learner.backbone(x).float(), y) for x, y in b] for b in (feed.train_batches(), feed.test_batches())
        )
    learner.train(was_training)
    (x, labels), (seen, truth) = ([torch.cat(part) for part in zip(*pairs, strict=True)] for pairs in (train, test))
    logits = contrastive.linear_probe(x, labels, seen, classes)
    near = contrastive.nearest_neighbours(x, labels, seen, classes)
    right = [logits.argmax(1) == truth, near == truth]
    sums = torch.stack([nn.functional.cross_entropy(logits, truth, reduction="sum"), *(r.sum() for r in right)])
    loss, probed, nearby, count = ranks.total(torch.cat((sums.double(), sums.new_tensor([len(truth)])))).tolist()
    return finite(loss / count), 100.0 * probed / count, 100.0 * nearby / count
