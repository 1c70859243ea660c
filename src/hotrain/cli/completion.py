"""Completion of values in a shell: recipes, models, methods, fields and the words that an option accepts.

`hotrain --install-completion` installs it. Names come from the library, which takes as long as importing it; of those
that a function returns, typer shows the ones that begin as the word to be completed does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def words(*accepted: str) -> Callable[[], Sequence[str]]:
    """Return a completer of fixed words."""
    return lambda: accepted


def recipe_names() -> list[str]:
    """The names of the recipes."""
    import hotrain_recipes

    return list(hotrain_recipes.all())


def model_names(incomplete: str) -> list[str]:
    """The names of the recipes and, from the first letter on, of timm's models."""
    if not incomplete:
        return recipe_names()
    import hotrain.train  # noqa: F401 (first: it lets timm load beside a CPU-only PyTorch)

    try:
        import timm
    except ModuleNotFoundError:  # a traceback would land in the line that is being typed
        return recipe_names()
    return recipe_names() + timm.list_models(f"{incomplete}*")


def methods(incomplete: str) -> list[str]:
    """The presets, each after what a list with commas has before its last one."""
    from hotrain.presets import presets

    before, comma, _ = incomplete.rpartition(",")
    return [before + comma + name for name in presets()]


def fields() -> list[str]:
    """The fields in ``field=value``."""
    import dataclasses

    from hotrain.train import TrainRun

    return [f"{field.name}=" for field in dataclasses.fields(TrainRun)]
