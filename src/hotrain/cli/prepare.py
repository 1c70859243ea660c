"""Preparation for the commands: run of a recipe or timm model with the options applied, its model and a batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotrain.presets import DEFAULT

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hotrain.train import Setup, TrainRun

SHAPES = {"cifar10": (10, 3, 32), "cifar100": (100, 3, 32)}
"""Classes, channels and side in pixels of data that are not downloaded where only shapes count."""

CLASSES, BATCH = 1000, 8
"""Defaults for a timm model."""


def configure(recipe: str | None, *, resume: Path | None = None, **options: Any) -> TrainRun:
    """Return the run of a recipe, else of a checkpoint or the folder of a run, with the options of `with_options`.

    Raises:
        ValueError: an unknown recipe, field or method (with the nearest known one), a bad value, or a checkpoint that
            cannot be read.
    """
    from hotrain_recipes import load_recipe

    from hotrain.train import saved_run

    if recipe is not None:
        base = load_recipe(recipe)
    elif resume is not None:
        base = saved_run(resume)
    else:
        raise ValueError("no RECIPE is given; `hotrain recipes` lists them. To resume a run give --resume FOLDER")
    return with_options(base, **options)


def look(name: str, **options: Any) -> TrainRun:
    """Return the run to measure for a name: a recipe's, or that of a timm model at its own image size.

    Options are those of `with_options`. Without a method, an exact recipe gets the default one.

    Raises:
        ValueError: neither a recipe nor a timm model, and as `configure`.
    """
    from hotrain_recipes import all as all_recipes

    from hotrain.train import TrainRun, replace
    from hotrain.train.models import SMALL, nearest

    recipes = all_recipes()
    if name in recipes:
        run = configure(name, **options)
    else:
        import timm

        if name not in SMALL and not timm.is_model(name):
            near = nearest(name, [*recipes, *timm.list_models()])
            hint = f"; did you mean {' or '.join(near)}?" if near else "; `hotrain recipes` lists the recipes"
            raise ValueError(f"{name!r} is neither a recipe nor a timm model{hint}")
        size = None if name in SMALL else (timm.get_pretrained_cfg_value(name, "input_size") or (224,))[-1]
        run = with_options(TrainRun(name=name, model=name, image_size=size, batch_size=BATCH), **options)
    if options.get("method") is None and run.method == "exact":
        run = replace(run, method=DEFAULT)
    return run


def labels(run: TrainRun, methods: Sequence[str]) -> list[str]:
    """Return the labels of methods as named on the command line; an unknown one or a bad override is a ValueError."""
    from hotrain.train import with_preset

    return [with_preset(run, text).method_label for text in methods]


def with_options(
    run: TrainRun,
    *,
    method: str | None = None,
    settings: Sequence[str] | None = None,
    out: Path | None = None,
    **fields: object,
) -> TrainRun:
    """Return the run with the command line's options.

    Args:
        **fields: other options that are fields of the run; None: not given. They take precedence over ``settings``.
    """
    from hotrain.train import with_preset, with_settings

    there = next((path for path in (out, *out.parents) if path.exists()), None) if out else None
    if there is not None and not there.is_dir():
        raise ValueError(f"--out: {there} is no folder")
    given = {**fields, "out_dir": out}
    options = [f"{name}={value}" for name, value in given.items() if value is not None]
    run = with_settings(run, [*(settings or ()), *options])
    return run if method is None else with_preset(run, method)


def converted(run: TrainRun, weights: Path | None = None) -> Setup:
    """Build the parts of a run, with converted layers, and the weights of a checkpoint (or the folder of its run).

    Raises:
        ValueError: data, model, device or checkpoint that are not available, or a checkpoint that does not fit.
    """
    from hotrain.train import build, checkpoint, replace

    setup = build(run if weights is None else replace(run, pretrained=False))
    if weights is not None:
        state = checkpoint.load(weights)["model"]
        checkpoint.check_same_weights(setup.model, state)
        setup.model.load_state_dict(state)
    setup.model.train()
    return setup


def with_images(
    name: str, classes: int | None, batch_size: int | None, **options: Any
) -> tuple[TrainRun, nn.Module, Tensor]:
    """Return the run of `look`, its exact model, in training mode, and random images (B, C, H, W) on its device.

    Neither data nor weights are downloaded.

    Args:
        classes: number of classes; None: that of the data, for a timm model without data `CLASSES`.
        batch_size: number of images; None: the run's.
        **options: as for `look`.

    Raises:
        ValueError: the data are not available and ``classes`` is not given, and as `look` and `converted`.
    """
    import torch
    from hotrain_recipes import all as all_recipes

    from hotrain.train import load_data, replace
    from hotrain.train.models import default_image_size, resolve_device
    from hotrain.train.run import INT64
    from hotrain.train.setup import create, seen_by

    run = look(name, **options)
    batch_size = batch_size or run.batch_size
    if batch_size > INT64:
        raise ValueError(f"batch size: got {batch_size}, the largest is {INT64}")
    if options["data"] is None and name not in all_recipes():
        classes = classes or CLASSES
    if run.data in SHAPES or classes is not None:
        own, channels, side = SHAPES.get(run.data, (0, 3, 224))
        classes = classes or own + (run.task == "segmentation")  # scenes have a background
    else:
        try:
            data = seen_by(run, load_data(run.data, data_dir=run.data_dir))
        except ValueError as error:
            raise ValueError(f"{error}. To use random images without data, give --classes N") from error
        classes, channels, side = len(data.classes), data.channels, data.image_size
    device = resolve_device(run.device)
    size = run.image_size or default_image_size(run.model, side)
    torch.manual_seed(run.seed)
    exact = replace(run, pretrained=False)
    model = create(exact, classes=classes, channels=channels, image_size=size, device=device)
    images = torch.randn(batch_size, channels, size, size, device=device)
    return run, model.train(), images
