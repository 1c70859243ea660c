"""benchmarks/curves.py: the losses of every update, and a verdict that can go either way."""

from __future__ import annotations

import contextlib
import importlib
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def curves() -> Iterator[ModuleType]:
    try:
        yield importlib.import_module("curves")
    finally:
        sys.modules.pop("curves", None)


def noisy(seed: int, level: float, updates: int = 200) -> list[float]:
    """A falling loss with noise of 0.1 a update and an offset of its seed."""
    draw = random.Random(seed)
    offset = draw.gauss(0.0, 0.05)
    return [level + offset + 2.0 * 0.99**i + draw.gauss(0.0, 0.1) for i in range(updates)]


def test_curves_of_one_kind_follow_each_other_and_a_shifted_one_does_not(curves: ModuleType) -> None:
    """Eight seeds: the means of equal sets differ by half of the spread on average; a shift of 0.2 is four spreads."""
    definition = [noisy(seed, 0.5) for seed in range(8)]
    alike = curves.verdict(definition, [noisy(seed, 0.5) for seed in range(100, 108)])
    apart = curves.verdict(definition, [noisy(seed, 0.7) for seed in range(100, 108)])
    assert alike["within"]
    assert not apart["within"]
    assert apart["distance"] == pytest.approx(0.2, abs=3 * 0.06 * (2 / 8) ** 0.5)
    # of the seeds' offsets, and of a window's mean of ten updates
    assert alike["spread"] == pytest.approx((0.05**2 + 0.1**2 / 10) ** 0.5, rel=0.5)


def test_what_cannot_be_compared_is_refused(curves: ModuleType) -> None:
    with pytest.raises(ValueError, match="not comparable"):
        curves.verdict([[1.0] * 20], [[1.0] * 20])  # one seed has no spread
    with pytest.raises(ValueError, match="not comparable"):
        curves.verdict([[1.0] * 20] * 2, [[1.0] * 30] * 2)
    with pytest.raises(ValueError, match="not comparable"):
        curves.verdict([[1.0] * 9] * 2, [[1.0] * 9] * 2)


def test_losses_are_of_single_updates_over_epochs(
    curves: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the digits, two epochs: the mean of an epoch's losses is the trainer's own figure for it."""
    from hotrain.cli.prepare import configure
    from hotrain.train import train

    entered: list[str] = []

    @contextlib.contextmanager
    def disabled() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    module: Any = ModuleType("hotrain.kernels")
    module.disabled = disabled
    monkeypatch.setitem(sys.modules, "hotrain.kernels", module)
    settings = ["epochs=2", "batch_size=256", "audit=false", 'model_args={"depth": 1, "embed_dim": 32}']
    run = configure("demo_vit", method="hot", settings=settings, seed=3, device="cpu", out=tmp_path)
    found = curves.losses(run, kernels=False)
    assert entered == ["in", "out"]
    history = train(run, on_progress=lambda progress: None).history
    per_epoch = len(found) // 2
    assert per_epoch > 1
    for epoch, row in enumerate(history):
        # The differences of running float32 means: 2⁻²⁴ of a loss of 2 for each update.
        mean = statistics.fmean(found[epoch * per_epoch : (epoch + 1) * per_epoch])
        assert mean == pytest.approx(row["train_loss"], rel=1e-5)
    assert len(set(found)) == len(found)
    assert curves.losses(run, kernels=True) == found
    assert entered == ["in", "out"]


def test_a_record_has_the_mean_curves(curves: ModuleType) -> None:
    sides = {"definition": [[1.0] * 10, [3.0] * 10], "kernels": [[2.0] * 10, [2.0] * 10]}
    row = curves.record("small_vit", "hot", sides, curves.verdict(sides["definition"], sides["kernels"]))
    assert row["mean_curves"] == {"definition": [2.0], "kernels": [2.0]}
    assert (row["seeds"], row["distance"], row["within"]) == (2, 0.0, True)


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--seeds", "1"], "two seeds at least"), ([], "there is no CUDA device")]
)
def test_the_script_says_what_it_cannot_do(
    curves: ModuleType,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["curves.py", "--data", "cifar10.npz", *arguments])
    with pytest.raises(SystemExit) as stop:
        curves.main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
