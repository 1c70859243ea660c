"""Completion of values in a shell: recipes, models, methods, fields and the words that an option accepts.

`hotrain --install-completion` installs it. Names come from the library, which takes as long as importing it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Completer = Callable[[str], list[str]]


def words(*accepted: str) -> Completer:
    """Return a completer of fixed words."""
    return lambda incomplete: _starting(accepted, incomplete)


def recipe_names(incomplete: str) -> list[str]:
    """Complete the name of a recipe."""
    import hotrain_recipes

    return _starting(list(hotrain_recipes.all()), incomplete)


def model_names(incomplete: str) -> list[str]:
    """Complete the name of a recipe or, from the first letter on, of a timm model."""
    found = recipe_names(incomplete)
    if incomplete:
        import timm

        found += timm.list_models(f"{incomplete}*")
    return found


def methods(incomplete: str) -> list[str]:
    """Complete a preset, also the last one of a list with commas."""
    from hotrain.presets import presets

    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in _starting(list(presets()), last)]


def fields(incomplete: str) -> list[str]:
    """Complete the field in ``field=value``."""
    import dataclasses

    from hotrain.train import TrainRun

    return _starting([f"{field.name}=" for field in dataclasses.fields(TrainRun)], incomplete)


def _starting(names: Sequence[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
