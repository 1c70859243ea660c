"""SimCLR and BYOL: the losses, the views, what is trained, and how features are judged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hotrain.train import TrainRun, build, train
from hotrain.train.contrastive import (
    TwoViews,
    info_nce,
    linear_probe,
    nearest_neighbours,
    two_views,
)
from hotrain.train.distributed import Processes
from hotrain.train.training import Training

Make = Callable[..., TrainRun]


def test_info_nce_is_the_sum_over_pairs() -> None:
    first, second = (nn.functional.normalize(torch.randn(3, 5), dim=1) for _ in range(2))
    both = torch.cat((first, second))
    losses = []
    for i in range(6):
        terms = [math.exp(float(both[i] @ both[j]) / 0.5) for j in range(6)]
        losses.append(-math.log(terms[(i + 3) % 6] / (sum(terms) - terms[i])))
    assert float(info_nce(first, second, 0.5)) == pytest.approx(sum(losses) / 6, rel=1e-5)


def test_views_are_of_the_same_image_and_differ() -> None:
    ramp = torch.linspace(0, 1, 16).expand(8, 3, 16, 16).clone()
    views = two_views(ramp, torch.Generator().manual_seed(1))
    assert views.shape == (16, 3, 16, 16)
    assert 0 <= float(views.min()) <= float(views.max()) <= 1
    assert not torch.equal(views[:8], views[8:])
    assert torch.equal(views, two_views(ramp, torch.Generator().manual_seed(1)))
    slope = (views[:, 0, :, -1] - views[:, 0, :, 0]).mean(1).sign()
    assert set(slope.tolist()) == {-1.0, 1.0}, "some are flipped"
    white = two_views(torch.full((64, 3, 4, 4), 0.5), torch.Generator().manual_seed(2))
    assert float((white - white.mean((1, 2, 3), keepdim=True)).abs().max()) < 1e-5, "grey stays grey"
    coloured = two_views(torch.rand(64, 3, 1, 1).expand(64, 3, 4, 4), torch.Generator().manual_seed(3))
    grey = (coloured - coloured.mean(1, keepdim=True)).abs().amax((1, 2, 3)) < 1e-5
    # 128 draws of probability 0.2: 25.6 ± 4.5; six deviations
    assert 0 < int(grey.sum()) < 53


@pytest.mark.parametrize("task", ["simclr", "byol"])
def test_everything_that_should_is_trained(task: str, tiny: Make) -> None:
    run = tiny(task=task, method="hla")
    setup = build(run)
    learner = setup.model
    assert isinstance(learner, TwoViews)
    training = Training(setup, Processes())
    before = {name: value.clone() for name, value in learner.state_dict().items()}
    training.start_epoch(0)
    for batches in setup.feed.updates(0):
        assert len(batches[0][0]) == 64, "two views of 32 images"
        training.step(batches)
        break
    trained = {name for name, p in learner.named_parameters() if p.requires_grad}
    assert any(name.startswith("predictor") for name in trained) == (task == "byol")
    still = {name for name in trained if torch.equal(before[name], learner.state_dict()[name])}
    assert still == set(), "BYOL's predictor and projector, too"
    if task == "byol":
        assert learner.target is not None
        assert all(p.grad is None and not p.requires_grad for p in learner.target.parameters())
        name = "projector.0.weight"
        old, now = before[name], learner.state_dict()[name]
        moved = learner.state_dict()["target.1.0.weight"]
        momentum = 1 - 0.01 * (math.cos(math.pi / training.updates) + 1) / 2
        torch.testing.assert_close(moved, momentum * old + (1 - momentum) * now)


def test_byol_s_loss_is_a_distance_of_directions() -> None:
    learner = TwoViews("byol", _Flat())
    learner.target = learner.exact_target()
    x = torch.rand(8, 1, 4, 4)
    assert learner.target is not None
    goal = learner.target(x)
    first, second = goal.chunk(2)
    assert float(learner.loss(torch.cat((second, first)), x)) == pytest.approx(0.0, abs=1e-5)
    assert float(learner.loss(-torch.cat((second, first)), x)) == pytest.approx(8.0, abs=1e-5)


class _Flat(nn.Flatten):
    num_features = 16


def test_probes_of_separable_features() -> None:
    labels = torch.arange(60) % 3
    x = nn.functional.one_hot(labels, 3).float() + 0.1 * torch.randn(60, 3)
    assert torch.equal(linear_probe(x[:40], labels[:40], x[40:], 3).argmax(1), labels[40:])
    assert torch.equal(nearest_neighbours(x[:40], labels[:40], x[40:], 3), labels[40:])
    assert (nearest_neighbours(x[:40], 0 * labels[:40], x[40:], 3) == 0).all()


def test_a_run_resumes_and_its_features_are_judged(tiny: Make) -> None:
    run = tiny(task="byol", method="hla", epochs=2)
    whole = train(run)
    part = train(run, stop_after=3)
    again = train(run, resume=part.checkpoint_path)
    for name in ("train_loss", "accuracy", "knn"):
        assert again.history[-1][name] == whole.history[-1][name]
    # 40 digits of ten classes; a guess is right in 10 %
    assert whole.accuracy is not None
    assert whole.accuracy > 40


@pytest.mark.parametrize("fields", [{"mixup": 0.2}, {"ema": 0.9}, {"smoothing": 0.1}, {"calibrate_batches": 1}])
def test_what_needs_labels_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not for task='simclr'"):
        TrainRun(task="simclr", **fields)
