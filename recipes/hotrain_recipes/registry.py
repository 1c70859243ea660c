"""Registry of the recipes."""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotrain.train.run import TrainRun, replace

MakeRun = Callable[..., TrainRun]

# Names of data sets in recipes, and where a run looks for them. The image folders have train/ and val/.
CIFAR = {"cifar10": "cifar10", "cifar100": "cifar100"}
FOLDERS = {
    "imagenet": "data/imagenet",
    "imagenet100": "data/imagenet100",
    "tiny_imagenet": "data/tiny-imagenet-200",
}


@dataclass(frozen=True)
class Recipe:
    """A registered recipe.

    Args:
        name: its name for ``hotrain train``.
        family: the group it is listed in.
        function: returns the run when called with ``arguments``; its docstring gives the sources of the numbers.
        arguments: the values that distinguish it from other recipes of the same function.
    """

    name: str
    family: str
    function: MakeRun
    arguments: Mapping[str, str]

    @property
    def description(self) -> str:
        """The first line of the function's docstring with this recipe's arguments filled in."""
        return self.document.strip().splitlines()[0].format(**self.arguments)

    @property
    def document(self) -> str:
        """The function's docstring: command, sources and measurements."""
        return inspect.getdoc(self.function) or ""

    def run(self) -> TrainRun:
        """Return the complete run, named after the recipe."""
        return replace(self.function(**self.arguments), name=self.name)


_TABLE: dict[str, Recipe] = {}


def recipe(name: str, family: str, **choices: Sequence[str]) -> Callable[[MakeRun], MakeRun]:
    """Decorator that registers a function as recipes, one for every combination of ``choices``.

    ``@recipe("{model}_{data}", "resnet", model=("resnet18", "resnet34"), data=CIFAR)`` makes four recipes; the
    function gets ``model`` and ``data``.

    Args:
        name: name of the recipes, with the arguments in braces.
        family: the group they are listed in.
        **choices: values of each argument of the function.

    Raises:
        ValueError: a name that is registered already.
    """

    def register(function: MakeRun) -> MakeRun:
        for values in itertools.product(*choices.values()):
            arguments = dict(zip(choices, values, strict=True))
            full = name.format(**arguments)
            if full in _TABLE:
                raise ValueError(f"recipe {full!r} exists already, in {_TABLE[full].function.__module__}")
            _TABLE[full] = Recipe(full, family, function, arguments)
        return function

    return register


def all() -> dict[str, Recipe]:
    """Return every recipe by name, in the order of the files."""
    return dict(_TABLE)


def load_recipe(name: str, **overrides: Any) -> TrainRun:
    """Return the run of a recipe, with some fields replaced.

    Args:
        name: the recipe.
        **overrides: fields of the run.

    Raises:
        ValueError: an unknown recipe (with the nearest names), an unknown field or a bad value.
    """
    if name not in _TABLE:
        near = difflib.get_close_matches(name, _TABLE, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; `hotrain recipes` lists them"
        raise ValueError(f"unknown recipe {name!r}{hint}")
    return replace(_TABLE[name].run(), **overrides)
