"""The studies: which cells answer which claim of the papers, by priority. `hotrain study NAME` runs one."""

from __future__ import annotations

from hotrain.presets import DEFAULT
from hotrain.train.run import TrainRun, replace
from hotrain.train.study import Cell, Study, grid
from hotrain_recipes.registry import load_recipe

METHODS = ("exact", DEFAULT, "hot", "hot-unbiased", "hla", "lbp-wht", "luq", "int4", f"{DEFAULT}@graphs")
"""Of Table 4 of HOT. Every layer is converted, but for ``@graphs``: there the plan leaves exact what loses time."""
PRETRAINED = {"ResNet-18": "short_resnet18", "small ViT": "short_vit"}
LARGER = {"ResNet-50": "short_resnet50", "DeiT-Ti": "short_deit_tiny", "EfficientFormer-L1": "short_efficientformer_l1"}
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}


def prepared(recipe: str) -> TrainRun:
    """The run of a recipe as a study trains it: compiled, images and weights channels last, few evaluations."""
    run = load_recipe(recipe)
    return replace(run, plan="memory", compile=True, channels_last=True, eval_batch_size=1000, evaluate_every=4)


def pretraining() -> Study:
    """Table 4: two models on two data sets with every method, then one seed of three larger models."""
    cells: list[Cell] = []
    for data, seeds in (("cifar10", (0, 1, 2)), ("cifar100", (0, 1))):
        for seed in seeds:
            for model, recipe in PRETRAINED.items():
                group = f"{model}, {NAMES[data]}"
                cells += grid("pretraining", group, prepared(f"{recipe}_{data}"), METHODS, (seed,))
    for model, recipe in LARGER.items():
        group = f"{model}, CIFAR-10"
        cells += grid("pretraining", group, prepared(f"{recipe}_cifar10"), METHODS, (0,))
    return Study("pretraining", "Pre-training from scratch (HOT, Table 4)", tuple(cells))


def studies() -> dict[str, Study]:
    """Return all studies by name."""
    return {study.name: study for study in (pretraining(),)}
