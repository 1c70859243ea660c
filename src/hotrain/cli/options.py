"""Options that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hotrain.cli import completion


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
    """Base class of all commands. Its help is wrapped to the terminal's width, paragraph by paragraph."""

    def __init__(self, *arguments: Any, help: str | None = None, **options: Any) -> None:
        paragraphs = (help or "").split("\n\n")
        super().__init__(*arguments, help="\n\n".join(" ".join(text.split()) for text in paragraphs), **options)


def _device_is_here(name: str | None) -> str | None:
    """Check that a CUDA device is available before anything is built or trained."""
    if name is not None and name.startswith("cuda"):
        from hotrain.train.models import resolve_device

        resolve_device(name)
    return name


_RECIPE = "A recipe's name (`hotrain recipes`)"
RecipeOrResume = Annotated[
    str | None,
    typer.Argument(help=f"{_RECIPE}; not with --resume.", show_default=False, autocompletion=completion.recipe_names),
]
Model = Annotated[
    str,
    typer.Argument(
        help=f"{_RECIPE} or a timm model: vit_base_patch16_224.",
        show_default=False,
        autocompletion=completion.model_names,
    ),
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        help="A preset (`hotrain presets`), or one with overrides: hot:rank=4+scale=token.",
        autocompletion=completion.methods,
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data",
        "-d",
        help="cifar10, cifar100, digits, a folder of images or .npz.",
        autocompletion=completion.words("cifar10", "cifar100", "digits"),
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A field of the run, as lr=1e-3; repeatable. `hotrain recipes RECIPE` lists them.",
        autocompletion=completion.fields,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        callback=_device_is_here,
        help="auto, cpu, cuda or cuda:N.",
        autocompletion=completion.words("auto", "cpu", "cuda"),
    ),
]
AmpOption = Annotated[
    str | None,
    typer.Option(
        "--amp",
        help="bf16, fp16 or none; default: as the recipe says.",
        autocompletion=completion.words("bf16", "fp16", "none"),
    ),
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of all random numbers.")]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="Folder for the records. Default: runs.")]
LogOption = Annotated[
    str | None,
    typer.Option(
        "--log",
        help="tensorboard or trackio, beside the records.",
        autocompletion=completion.words("tensorboard", "trackio"),
    ),
]
BatchOption = Annotated[
    int | None, typer.Option("--batch-size", "--batch", "-b", min=1, help="Images in the batch; default: the recipe's.")
]
ClassesOption = Annotated[
    int | None, typer.Option("--classes", min=1, help="Number of classes: use random images, without data.")
]
CheckpointOption = Annotated[
    Path | None, typer.Option("--checkpoint", help="Weights of a run: its folder or checkpoint file.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


def split_names(text: str, option: str) -> list[str]:
    """Split a comma-separated option into its distinct names, in order; none is a ValueError."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise ValueError(f"{option}: got {text!r}, give at least one, separated by commas")
    return names


def split_seeds(text: str) -> list[int]:
    """Parse seeds such as ``0,1,2``; what is no whole number from 0 is a ValueError."""
    seeds = split_names(text, "--seeds")
    for seed in seeds:
        if not seed.isdecimal():
            raise ValueError(f"--seeds: got {seed!r}, accepted are whole numbers from 0, as in 0,1,2")
    return [int(seed) for seed in seeds]


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON."""
    typer.echo(json.dumps(value, indent=1, default=str))


def show(as_json: bool, value: Any, text: str) -> None:
    """Print ``value`` as JSON where that is asked for, else ``text``."""
    if as_json:
        print_json(value)
    else:
        typer.echo(text)
