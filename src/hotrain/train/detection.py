"""Predicted boxes: the loss that matches them to objects, and average precision.

Predictions are (B, Q, C + 5): logits of C classes and of *no object*, then centre and size (x, y, w, h) from 0 to 1.
Objects are (B, K, 5): label and box; the label is -1 where there is none.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NO_OBJECT = 0.1  # weight of predictions without an object in the cross-entropy
L1, GIOU = 5.0, 2.0  # weights of the boxes' two losses, and of their costs when matched
"""DETR's (Carion et al., ECCV 2020, arXiv 2005.12872), as in YOLOS."""


def corners(boxes: Tensor) -> Tensor:
    """Left, top, right, bottom of boxes given as centre and size, (…, 4)."""
    return torch.cat((boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2), -1)


def overlap(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """IoU and generalized IoU (Rezatofighi et al., CVPR 2019) of boxes as `corners`, (…, 4) each: (…)."""

    def area(box: Tensor) -> Tensor:
        size = (box[..., 2:] - box[..., :2]).clamp(min=0)
        return size[..., 0] * size[..., 1]

    low, high = torch.minimum(first, second), torch.maximum(first, second)
    shared = area(torch.cat((high[..., :2], low[..., 2:]), -1))
    around = area(torch.cat((low[..., :2], high[..., 2:]), -1))
    union = area(first) + area(second) - shared
    iou = shared / union.clamp(min=1e-9)
    return iou, iou - (around - union) / around.clamp(min=1e-9)


@torch.no_grad()
def match(predicted: Tensor, objects: Tensor) -> Tensor:
    """The prediction that each object is matched to, at the least cost over all objects of an image.

    Args:
        predicted: (B, Q, C + 5).
        objects: (B, K, 5).

    Returns:
        Indices of predictions, int64 (B, K); -1 where there is no object, or there are more objects than predictions.
    """
    from scipy.optimize import linear_sum_assignment

    logits, boxes = predicted[..., :-4], predicted[..., -4:]
    label, there = objects[..., 0].long(), objects[..., 0] >= 0
    chance = logits.softmax(-1).gather(2, label.clamp(min=0)[:, None].expand(-1, logits.shape[1], -1))
    pairs = boxes[:, :, None], objects[:, None, :, 1:]
    cost = L1 * (pairs[0] - pairs[1]).abs().sum(-1) - GIOU * overlap(*map(corners, pairs))[1] - chance
    costs, which = cost.nan_to_num(1e6, 1e6, 1e6).cpu().numpy(), there.cpu().numpy()
    found = np.full(which.shape, -1)
    for image, (matrix, real) in enumerate(zip(costs, which, strict=True)):
        rows, columns = linear_sum_assignment(matrix[:, real])
        found[image, np.flatnonzero(real)[columns]] = rows
    return torch.from_numpy(found).to(predicted.device)


def set_loss(predicted: Tensor, objects: Tensor) -> Tensor:
    """The loss of matched predictions: cross-entropy of all of them, L1 and generalized IoU of the boxes of objects."""
    logits, boxes = predicted[..., :-4].float(), predicted[..., -4:].float()
    queries, none = logits.shape[1], logits.shape[2] - 1
    chosen = match(predicted.float(), objects)
    real = chosen >= 0
    # An object without a prediction writes into a column too many.
    labels = torch.full((len(logits), queries + 1), none, device=logits.device)
    labels = labels.scatter(1, chosen.where(real, queries), objects[..., 0].long().clamp(min=0))[:, :queries]
    weight = torch.ones(none + 1, device=logits.device)
    weight[none] = NO_OBJECT
    mine = boxes.gather(1, chosen.clamp(min=0)[..., None].expand(-1, -1, 4))
    wanted = objects[..., 1:]
    distance = (mine - wanted).abs().sum(-1)
    apart = 1 - overlap(corners(mine), corners(wanted))[1]
    count = real.sum().clamp(min=1)
    return (
        F.cross_entropy(logits.transpose(1, 2), labels, weight)
        + L1 * (distance * real).sum() / count
        + GIOU * (apart * real).sum() / count
    )


def judged(predicted: Tensor, objects: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which predictions hit an object: by falling score, the free object of their class of most IoU, from 0.5 on.

    Args:
        predicted: (B, Q, C + 5).
        objects: (B, K, 5).

    Returns:
        Score (the likeliest class's probability), label and whether it hits, (B, Q) each.
    """
    scores, labels = predicted[..., :-4].softmax(-1)[..., :-1].max(-1)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    labels = labels.gather(1, order)
    boxes = predicted[..., -4:].gather(1, order[..., None].expand(-1, -1, 4))
    iou = overlap(corners(boxes)[:, :, None], corners(objects[:, None, :, 1:]))[0]
    iou = iou * (labels[:, :, None] == objects[:, None, :, 0])
    hit = torch.zeros_like(labels, dtype=torch.bool)
    free = torch.ones_like(objects[..., 0])
    for i in range(labels.shape[1]):
        best, at = (iou[:, i] * free).max(1)
        hit[:, i] = best >= 0.5
        free = free.scatter(1, at[:, None], free.gather(1, at[:, None]) * ~hit[:, i, None])
    return scores, labels, hit


def average_precision(scores: Tensor, hits: Tensor, objects: int) -> float:
    """Area under precision over recall of one class, at every recall the best precision from there on.

    Args:
        scores: of the predictions of the class, (N,).
        hits: whether each hits an object, (N,).
        objects: number of objects of the class.
    """
    right = hits[scores.argsort(descending=True, stable=True)].double()
    precision = right.cumsum(0) / torch.arange(1, len(right) + 1, device=right.device)
    best = precision.flip(0).cummax(0).values.flip(0)
    return float((best * right).sum()) / objects


def mean_average_precision(scores: Tensor, labels: Tensor, hits: Tensor, objects: Tensor) -> float:
    """Mean of `average_precision` over the classes that occur.

    Args:
        scores, labels, hits: of all predictions, (N,) each, as `judged` returns them.
        objects: number of objects of each class, (C,).
    """
    found = [
        average_precision(scores[labels == c], hits[labels == c], int(count))
        for c, count in enumerate(objects)
        if count
    ]
    return sum(found) / max(1, len(found))
