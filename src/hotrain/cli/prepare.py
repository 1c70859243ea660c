"""A recipe or a timm model made ready to be looked at: its run with the command line's options, a model, a batch."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotrain.presets import DEFAULT

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hotrain.train import Setup, TrainRun

SHAPES = {"cifar10": (10, 3, 32), "cifar100": (100, 3, 32)}
"""Classes, channels and side in pixels of data that a look at shapes need not download."""

CLASSES, BATCH = 1000, 8
"""Of a timm model, where nothing is said."""


def configure(
    recipe: str | None,
    *,
    resume: Path | None = None,
    method: str | None = None,
    data: str | None = None,
    settings: Sequence[str] | None = None,
    seed: int | None = None,
    device: str | None = None,
    out: Path | None = None,
) -> TrainRun:
    """The recipe's run, or without one that of the checkpoint ``resume``, with the command line's options.

    Named options win over ``--set``. Raises ``ValueError`` for an unknown recipe, field or method (with the nearest
    known one), a bad value, and a checkpoint that cannot be read.
    """
    from hotrain_recipes import load_recipe

    from hotrain.train import saved_run

    if recipe is not None:
        base = load_recipe(recipe)
    elif resume is not None:
        base = saved_run(resume)
    else:
        raise ValueError("no RECIPE is given; `hotrain recipes` lists them. To go on with a run give --resume FOLDER")
    return _with_options(base, method=method, data=data, settings=settings, seed=seed, device=device, out=out)


def look(name: str, **options: Any) -> TrainRun:
    """The run that a look at ``name`` is about: a recipe's, or one of a timm model at that model's own image size.

    options: as in `configure`. Where no method is named and the recipe is exact, it is the one `hotrain.convert` takes.

    Raises ``ValueError`` for what is neither.
    """
    from hotrain_recipes import all as all_recipes

    from hotrain.train import TrainRun, replace
    from hotrain.train.models import SMALL

    recipes = all_recipes()
    if name in recipes:
        run = configure(name, **options)
    else:
        import timm

        if name not in SMALL and not timm.is_model(name):
            near = difflib.get_close_matches(name, [*recipes, *timm.list_models()], n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; `hotrain recipes` lists the recipes"
            raise ValueError(f"{name!r} is neither a recipe nor a timm model{hint}")
        size = None if name in SMALL else (timm.get_pretrained_cfg_value(name, "input_size") or (224,))[-1]
        run = _with_options(TrainRun(name=name, model=name, image_size=size, batch_size=BATCH), **options)
    if options.get("method") is None and run.method == "exact":
        run = replace(run, method=DEFAULT)
    return run


def labels(run: TrainRun, methods: Sequence[str]) -> list[str]:
    """The labels of methods as named on the command line. ``ValueError`` for an unknown one, or a bad override."""
    from hotrain.train import parse_method, replace

    named = [parse_method(text) for text in methods]
    return [replace(run, method=name, method_overrides=overrides).method_label for name, overrides in named]


def is_recipe(name: str) -> bool:
    """Whether ``name`` is a recipe's."""
    from hotrain_recipes import all as all_recipes

    return name in all_recipes()


def _with_options(
    run: TrainRun,
    *,
    method: str | None = None,
    data: str | None = None,
    settings: Sequence[str] | None = None,
    seed: int | None = None,
    device: str | None = None,
    out: Path | None = None,
) -> TrainRun:
    from hotrain.train import parse_method, replace, with_settings

    changes: dict[str, Any] = {"data": data, "seed": seed, "device": device}
    changes["out_dir"] = None if out is None else str(out)
    changes = {name: value for name, value in changes.items() if value is not None}
    if method is not None:
        changes["method"], changes["method_overrides"] = parse_method(method)
    return replace(with_settings(run, settings or ()), **changes)


def converted(run: TrainRun, weights: Path | None = None) -> Setup:
    """The parts of ``run``, its layers converted.

    weights: a checkpoint of the trainer or the folder of its run; None: as initialised, or pretrained.

    Raises ``ValueError`` for data, a model, a device or a checkpoint that is not there or does not fit.
    """
    from hotrain.train import build, checkpoint, replace

    setup = build(run if weights is None else replace(run, pretrained=False))
    if weights is not None:
        state = checkpoint.load(weights)["model"]
        checkpoint.check_same_weights(setup.model, state)
        setup.model.load_state_dict(state)
    setup.model.train()
    return setup


def exact_with_images(run: TrainRun, classes: int | None, batch_size: int | None) -> tuple[nn.Module, Tensor]:
    """``run``'s model as it trains, but exact, and random images for it: enough where only shapes count.

    classes: their number; None: as the data have it. Neither data nor weights are downloaded.

    Raises ``ValueError`` when the data are not there (and ``classes`` is not given), and as `converted`.
    """
    import torch

    from hotrain.train import load_data
    from hotrain.train.models import default_image_size, resolve_device
    from hotrain.train.setup import create

    if run.data in SHAPES or classes is not None:
        own, channels, side = SHAPES.get(run.data, (0, 3, 224))
        classes = classes or own
    else:
        try:
            data = load_data(run.data, data_dir=run.data_dir, corrupt=run.corrupt)
        except ValueError as error:
            raise ValueError(f"{error}. To look at shapes without data, give --classes N") from error
        classes, channels, side = len(data.classes), data.channels, data.image_size
    device = resolve_device(run.device)
    size = run.image_size or default_image_size(run.model, side)
    torch.manual_seed(run.seed)
    model = create(run, classes=classes, channels=channels, image_size=size, device=device, pretrained=False)
    images = torch.randn(batch_size or run.batch_size, channels, size, size, device=device)
    return model.train(), images
