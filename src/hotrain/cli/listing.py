"""``hotrain recipes`` and ``hotrain presets``: what there is."""

from __future__ import annotations

from typing import Annotated

import typer

from hotrain.cli.options import JsonOption, print_json


def recipes(
    family: Annotated[str | None, typer.Option("--family", help="Only the recipes of this family.")] = None,
    json: JsonOption = False,
) -> None:
    """List the recipes by family."""
    import hotrain_recipes

    from hotrain.tables import table

    found = hotrain_recipes.all()
    families = sorted({recipe.family for recipe in found.values()})
    if family is not None and family not in families:
        raise ValueError(f"--family: got {family!r}, families are {', '.join(families)}")
    chosen = {name: recipe for name, recipe in found.items() if family in (None, recipe.family)}
    if json:
        print_json([{"name": n, "family": r.family, "description": r.description} for n, r in chosen.items()])
        return
    rows = [[name, recipe.family, recipe.description] for name, recipe in chosen.items()]
    typer.echo(table(["recipe", "family", "what"], rows))


def presets(
    name: Annotated[str | None, typer.Argument(help="One preset, in full.", show_default=False)] = None,
    json: JsonOption = False,
) -> None:
    """List the methods, or describe one: its source, what it saves and what it loses."""
    import hotrain
    from hotrain.presets import describe

    if name is not None:
        typer.echo(f"{hotrain.preset(name)}\n\n{describe(name)}")
        return
    methods = {each: str(hotrain.preset(each)) for each in hotrain.presets()}
    if json:
        print_json(methods)
        return
    for text in methods.values():
        typer.echo(text)
