"""Recipes: complete training configurations (:class:`hotrain.train.TrainRun`), by name.

``hotrain recipes`` lists them, ``hotrain train NAME`` runs one. A variant replaces a field::

    run = hotrain_recipes.load_recipe("small_vit_cifar10", epochs=12, method="hot")

A new recipe is a function in one of these files (or a new file named below) under :func:`registry.recipe`.
"""

from hotrain_recipes import demo, efficient, lora, resnet, short, small, vit
from hotrain_recipes.registry import Recipe, all, load_recipe

__all__ = ["Recipe", "all", "demo", "efficient", "load_recipe", "lora", "resnet", "short", "small", "vit"]
