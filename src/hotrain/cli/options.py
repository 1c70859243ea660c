"""Options that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


class PlainFlags:
    """Mixin for commands: their help shows no ``<bool>`` after options that take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, without a metavar for flags (also for typer's ``--help``)."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(PlainFlags, TyperCommand):
    """Base class of all commands."""


def _device_is_here(name: str | None) -> str | None:
    """Check that a CUDA device is available before anything is imported, built or trained."""
    if name is not None and name.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            raise ValueError(
                f"--device: got {name!r}, but this PyTorch ({torch.__version__}) finds no CUDA device; use cpu"
            )
    return name


_RECIPE = "A recipe's name (`hotrain recipes`)"
Recipe = Annotated[str, typer.Argument(help=f"{_RECIPE}.", show_default=False)]
RecipeOrResume = Annotated[str | None, typer.Argument(help=f"{_RECIPE}; not with --resume.", show_default=False)]
Model = Annotated[str, typer.Argument(help=f"{_RECIPE} or a timm model: vit_base_patch16_224.", show_default=False)]
MethodOption = Annotated[
    str | None,
    typer.Option("--method", "-m", help="A preset, or one with overrides: hot:rank=4+scale=token."),
]
DataOption = Annotated[
    str | None,
    typer.Option("--data", "-d", help="cifar10, cifar100, digits, a folder of images or .npz."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="A field of the run, as lr=1e-3; repeatable. `hotrain recipes RECIPE` lists them."),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", callback=_device_is_here, help="auto, cpu, cuda or cuda:N.")
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of all random numbers.")]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the records.")]
BatchOption = Annotated[
    int | None, typer.Option("--batch-size", "--batch", "-b", min=1, help="Images in the batch; default: the recipe's.")
]
ClassesOption = Annotated[
    int | None,
    typer.Option("--classes", min=1, help="Number of classes: use random images, without data."),
]
CheckpointOption = Annotated[
    Path | None, typer.Option("--checkpoint", help="Weights of a run: its folder or checkpoint file.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]


def split_names(text: str, option: str) -> list[str]:
    """Split a comma-separated option into its distinct names, in order.

    Args:
        text: the option's value.
        option: its name, for the message.

    Raises:
        ValueError: no name.
    """
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise ValueError(f"{option}: got {text!r}, give at least one, separated by commas")
    return names


def split_seeds(text: str) -> list[int]:
    """Parse seeds such as ``0,1,2``.

    Raises:
        ValueError: a part that is not a whole number from 0.
    """
    seeds = split_names(text, "--seeds")
    for seed in seeds:
        if not seed.isdecimal():
            raise ValueError(f"--seeds: got {seed!r}, accepted are whole numbers from 0, as in 0,1,2")
    return [int(seed) for seed in seeds]


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON."""
    typer.echo(json.dumps(value, indent=1, default=str))
