"""A recipe made ready to be looked at: its run with the command line's options, and a model with a batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotrain.presets import DEFAULT

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hotrain.train import Setup, TrainRun

SHAPES = {"cifar10": (10, 3, 32), "cifar100": (100, 3, 32)}
"""Classes, channels and side in pixels of data that a look at shapes need not download."""


def configure(
    recipe: str,
    *,
    method: str | None = None,
    data: str | None = None,
    settings: Sequence[str] | None = None,
    seed: int | None = None,
    device: str | None = None,
    out: Path | None = None,
) -> TrainRun:
    """The recipe's run with the command line's options; named options win over ``--set``.

    Raises ``ValueError`` for an unknown recipe, field or method (with the nearest known one) or a bad value.
    """
    from hotrain_recipes import load_recipe

    from hotrain.train import parse_method, replace, with_settings

    run = with_settings(load_recipe(recipe), settings or ())
    changes: dict[str, Any] = {"data": data, "seed": seed, "device": device}
    changes["out_dir"] = None if out is None else str(out)
    changes = {name: value for name, value in changes.items() if value is not None}
    if method is not None:
        changes["method"], changes["method_overrides"] = parse_method(method)
    return replace(run, **changes)


def shown(run: TrainRun, method: str | None) -> TrainRun:
    """``run`` with `convert`'s own method where it would show exact though the user named no method."""
    from hotrain.train import replace

    return run if method is not None or run.method != "exact" else replace(run, method=DEFAULT, method_overrides={})


def converted(run: TrainRun, weights: Path | None = None) -> Setup:
    """The parts of ``run``, its layers converted.

    weights: a checkpoint of the trainer or the folder of its run; None: as initialised, or pretrained.

    Raises ``ValueError`` for data, a model, a device or a checkpoint that is not there or does not fit.
    """
    from hotrain.train import build, checkpoint, replace

    setup = build(run if weights is None else replace(run, pretrained=False))
    if weights is not None:
        state = checkpoint.load(weights)["model"]
        checkpoint.check_same_keys(setup.model, state)
        setup.model.load_state_dict(state)
    setup.model.train()
    return setup


def exact_with_images(run: TrainRun, classes: int | None, batch_size: int | None) -> tuple[nn.Module, Tensor]:
    """``run``'s model, exact, and random images for it: enough where only shapes count.

    classes: their number; None: as the data have it. Neither data nor weights are downloaded.

    Raises ``ValueError`` when the data are not there (and ``classes`` is not given), and as `converted`.
    """
    import torch

    from hotrain.train import load_data
    from hotrain.train.models import add_lora, create_model, default_image_size, resolve_device

    if run.data in SHAPES or classes is not None:
        own, channels, side = SHAPES.get(run.data, (0, 3, 224))
        classes = classes or own
    else:
        try:
            data = load_data(run.data)
        except ValueError as error:
            raise ValueError(f"{error}. To look at shapes without data, give --classes N") from error
        classes, channels, side = len(data.classes), data.channels, data.image_size
    device = resolve_device(run.device)
    size = run.image_size or default_image_size(run.model, side)
    torch.manual_seed(run.seed)
    model = create_model(run.model, classes=classes, channels=channels, image_size=size, args=run.model_args)
    if run.lora is not None:
        model = add_lora(model, run.lora)
    images = torch.randn(batch_size or run.batch_size, channels, size, size)
    return model.to(device).train(), images.to(device)
