"""Tiny real runs for the trainer's tests: scikit-learn's digits, a model of a few thousand parameters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hotrain.train import TrainRun, load_data
from hotrain.train.data import ArrayData

# 32 channels are the least that conversion takes; two blocks on 16 tokens.
TINY_VIT = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 digits to train on and 40 to test on, as an ``.npz`` file."""
    data = load_data("digits")
    assert isinstance(data, ArrayData)
    path = tmp_path_factory.mktemp("data") / "few_digits.npz"
    np.savez(
        path,
        x_train=data.x_train[:160].numpy(),
        y_train=data.y_train[:160].numpy(),
        x_test=data.x_test[:40].numpy(),
        y_test=data.y_test[:40].numpy(),
    )
    return path


@pytest.fixture
def tiny(tmp_path: Path, few_digits: Path) -> Callable[..., TrainRun]:
    """Makes runs of a tiny ViT on 160 digits: 5 updates an epoch, written under the test's own folder."""

    def make(**fields: Any) -> TrainRun:
        defaults: dict[str, Any] = {
            "model": "demo_vit",
            "model_args": TINY_VIT,
            "data": str(few_digits),
            "method": "hot-unbiased",
            "epochs": 2,
            "batch_size": 32,
            "lr": 3e-3,
            "crop_padding": 1,
            "flip": False,
            "audit": False,
            "device": "cpu",
            "out_dir": str(tmp_path / "runs"),
        }
        return TrainRun(**{**defaults, **fields})

    return make


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An image folder of two classes, 6 training and 2 validation PNGs each, 40×40 pixels, bright or dark."""
    root = tmp_path / "images"
    generator = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 2)):
        for label, level in (("bright", 200), ("dark", 20)):
            (root / split / label).mkdir(parents=True)
            for i in range(count):
                pixels = generator.integers(level, level + 40, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / label / f"{i}.png")
    return root
