"""The trainer under a user's default device; `tests/test_default_device.py` says why it is meta."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hotrain.train import TrainRun, build, load_data, train
from hotrain.train.batches import Feed
from hotrain.train.meters import DelayedRead

Make = Callable[..., TrainRun]


def same(run: Callable[[], list[Any]]) -> None:
    want = run()
    with torch.device("meta"):
        got = run()
    assert len(got) == len(want) > 0
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(got, want, strict=True))


def drawn(feed: Feed) -> Iterator[Tensor]:
    for x, y in (*itertools.chain(*feed.updates(0)), *feed.test_batches(), *feed.train_batches()):
        yield from (x, y)


@pytest.mark.parametrize(
    "fields", [{"flip": True}, {"task": "simclr", "crop_padding": 0}, {"task": "byol", "crop_padding": 0}], ids=str
)
def test_weights_and_batches_are_the_same(tiny: Make, fields: dict[str, Any]) -> None:
    def run() -> list[Any]:
        setup = build(tiny(**fields))
        return [*setup.model.parameters(), *drawn(setup.feed)]

    same(run)


@pytest.mark.parametrize("workers", [0, 1])
def test_images_of_a_folder_are_the_same(folder: Path, workers: int) -> None:
    run = TrainRun(batch_size=5, num_workers=workers, flip=True)
    same(lambda: list(drawn(Feed(run, load_data(str(folder)), image_size=16))))


def test_statistics_that_are_given(tiny: Make) -> None:
    run = tiny()
    data = load_data(run.data)
    same(lambda: list(drawn(Feed(run, data, image_size=8, normalization=([0.5], [0.25])))))


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "hot", "audit": True, "calibrate_batches": 2, "calibrate_at": 0},
        {"mixup": 0.2, "ema": 0.9, "random_erase": 0.5},
        {"task": "byol", "crop_padding": 0},
    ],
    ids=str,
)
def test_a_run_is_the_same(tiny: Make, fields: dict[str, Any]) -> None:
    """With SGD: PyTorch makes the step of Adam on the default device."""

    def run() -> list[Any]:
        found = train(tiny(optimizer="sgd", epochs=1, **fields))
        assert found.model is not None
        return [
            *found.model.parameters(),
            found.history[-1]["train_loss"],
            found.saved_bytes,
            found.bit_ops,
            found.layers,
        ]

    same(run)


def test_a_delayed_read() -> None:
    same(lambda: DelayedRead(torch.device("cpu")).look(*torch.tensor([1.0, 2.0], device="cpu")))
