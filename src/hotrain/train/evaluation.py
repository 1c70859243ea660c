"""Accuracy of a model on the test images, of a backbone's features, and of masks and boxes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hotrain.train import contrastive, detection
from hotrain.train.batches import Batch
from hotrain.train.distributed import Processes
from hotrain.train.meters import finite
from hotrain.train.setup import Setup


def _outputs(model: nn.Module, setup: Setup, batches: Iterable[Batch]) -> Iterator[Batch]:
    """The model's output in eval mode, float32, and the target of each batch."""
    was_training = model.training
    model.eval()
    for x, target in batches:
        with setup.autocast():
            output = model(x).float()
        yield output, target
    model.train(was_training)


@torch.no_grad()
def evaluate(model: nn.Module, setup: Setup, ranks: Processes) -> tuple[float | None, float]:
    """Return mean cross-entropy and accuracy in percent over the test images of all processes."""
    sums = torch.zeros(3, dtype=torch.float64, device=setup.device)
    for output, y in _outputs(model, setup, setup.feed.test_batches()):
        sums[0] += nn.functional.cross_entropy(output, y, reduction="sum")
        sums[1] += (output.argmax(1) == y).sum()
        sums[2] += len(y)
    loss, correct, count = ranks.total(sums).tolist()
    return finite(loss / count), 100.0 * correct / count


@torch.no_grad()
def evaluate_dense(model: nn.Module, setup: Setup, ranks: Processes) -> dict[str, Any]:
    """Judge masks or boxes on the test images of all processes.

    Returns:
        ``test_loss``, and in percent ``accuracy``: of masks the mean over classes of IoU, of boxes that of average
        precision at IoU 0.5, and of masks also ``pixel_accuracy``.
    """
    classes = len(setup.data.classes)
    table = torch.zeros(classes, classes, dtype=torch.float64, device=setup.device)  # true class × predicted class
    objects = torch.zeros(classes, dtype=torch.float64, device=setup.device)
    found: list[Tensor] = []
    sums = torch.zeros(2, dtype=torch.float64, device=setup.device)
    for output, target in _outputs(model, setup, setup.feed.test_batches()):
        if setup.run.task == "segmentation":
            seen = target >= 0
            pairs = target[seen] * classes + output.argmax(1)[seen]
            table += pairs.bincount(minlength=classes**2).view(classes, classes)
            weight = seen.sum()
        else:
            label = target[..., 0].long()
            objects += label[label >= 0].bincount(minlength=classes)
            found.append(torch.stack([part.double() for part in detection.judged(output, target)]).flatten(1).cpu())
            weight = torch.tensor(len(target), device=setup.device)
        if weight:
            sums += torch.stack((setup.loss(output, target).double() * weight, weight.double()))
    loss, count = ranks.total(sums).tolist()
    row: dict[str, Any] = {"test_loss": finite(loss / max(1, count))}
    if setup.run.task == "segmentation":
        return row | mask_accuracies(ranks.total(table))
    scores, labels, hits = torch.cat(ranks.gather(torch.cat(found, 1)), 1)
    mean = detection.mean_average_precision(scores, labels, hits, ranks.total(objects))
    return row | {"accuracy": 100.0 * mean}


def mask_accuracies(table: Tensor) -> dict[str, float]:
    """Mean IoU of the classes that occur, and share of pixels that are right, in percent, of true × predicted class."""
    right = table.diagonal()
    union = table.sum(0) + table.sum(1) - right
    occurs = union > 0
    return {
        "accuracy": 100.0 * float((right[occurs] / union[occurs]).mean()),
        "pixel_accuracy": 100.0 * float(right.sum() / table.sum()),
    }


@torch.no_grad()
def probe(learner: contrastive.TwoViews, setup: Setup, ranks: Processes) -> tuple[float | None, float, float]:
    """Judge the features of the backbone, on each process by its part of the images.

    Returns:
        Cross-entropy and accuracy (percent) of a linear probe, and the accuracy by 20 nearest neighbours.
    """
    feed, classes = setup.feed, len(setup.data.classes)
    (x, labels), (seen, truth) = (
        [torch.cat(part) for part in zip(*_outputs(learner.backbone, setup, batches), strict=True)]
        for batches in (feed.train_batches(), feed.test_batches())
    )
    logits = contrastive.linear_probe(x, labels, seen, classes)
    near = contrastive.nearest_neighbours(x, labels, seen, classes)
    right = [logits.argmax(1) == truth, near == truth]
    sums = torch.stack([nn.functional.cross_entropy(logits, truth, reduction="sum"), *(r.sum() for r in right)])
    loss, probed, nearby, count = ranks.total(torch.cat((sums.double(), sums.new_tensor([len(truth)])))).tolist()
    return finite(loss / count), 100.0 * probed / count, 100.0 * nearby / count
