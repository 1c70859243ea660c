"""What `hotrain.convert` does is what is trained and timed: the layers' own records, side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hotrain
from hotrain.train import TrainRun, build, replace, silent, train

RUN = TrainRun(model="demo_vit", steps=2, batch_size=64, device="cpu", audit=False)


@pytest.mark.parametrize("method", ["hq8", "hot-unbiased", "hot", "exact"])
def test_the_trainer_converts_as_convert_does(method: str, tmp_path: Path) -> None:
    run = replace(RUN, method=method, out_dir=str(tmp_path))
    trained = train(run, on_progress=silent)
    setup = build(replace(run, method="exact"))
    images, labels = setup.example()
    if method == "exact":
        assert trained.layers is None
        return
    report = hotrain.convert(setup.model, method)
    torch.nn.functional.cross_entropy(setup.model.train()(images), labels).backward()
    assert trained.layers == report.ran()
    assert sum(group["layers"] for group in report.ran() if group["g_x"] != "exact") == len(report.converted) > 0


def test_recipes_train_the_librarys_default() -> None:
    import hotrain_recipes

    from hotrain.presets import DEFAULT

    methods = {name: recipe.run().method for name, recipe in hotrain_recipes.all().items()}
    assert {name for name, method in methods.items() if method != DEFAULT} == set()
