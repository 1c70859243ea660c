"""``hotrain recipes``, ``presets`` and ``report``: lists of recipes and methods, and the report of saved records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotrain.cli import clone, completion
from hotrain.cli.options import JsonOption, print_json, show
from hotrain.cli.terminal import print_lines, working
from hotrain.presets import DEFAULT

if TYPE_CHECKING:
    from hotrain_recipes import Recipe


RECIPES = """Examples:
  hotrain recipes
  hotrain recipes demo_vit"""
REPORT = """Examples:
  hotrain report runs/demo
  hotrain report runs/compare-demo_vit runs/demo_vit-hq8-s0-… --out runs/report"""
PRESETS = """Examples:
  hotrain presets
  hotrain presets hot"""


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            help="One recipe, with all its fields.", show_default=False, autocompletion=completion.recipe_names
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the recipes by family, or one with all its fields."""
    with working("reading the recipes"):
        import hotrain_recipes

    found = hotrain_recipes.all()
    if name is not None:
        run = hotrain_recipes.load_recipe(name)
        recipe = found[name]
        if json:
            about = {"name": name, "family": recipe.family, "description": recipe.description}
            print_json({**about, "run": run.to_dict()})
            return
        typer.echo(f"{recipe.document}\n\nFields, for --set FIELD=VALUE:\n")
        for field, value in vars(run).items():
            typer.echo(f"  {field:<20}{value!r}")
        return
    if json:
        print_json([{"name": n, "family": r.family, "description": r.description} for n, r in found.items()])
        return
    for title in dict.fromkeys(recipe.family for recipe in found.values()):
        typer.echo(f"{title}\n{_family([recipe for recipe in found.values() if recipe.family == title])}\n")
    typer.echo(
        f"{len(found)} recipes; they train with {DEFAULT}, the library's default, unless --method says otherwise"
    )


def _family(members: list[Recipe]) -> str:
    """A table with one row per pattern of names, with the choices in braces, and its description."""
    from hotrain.tables import table

    rows = []
    for function in dict.fromkeys(recipe.function for recipe in members):
        mine = [recipe for recipe in members if recipe.function is function]
        pattern, what = mine[0].name, mine[0].description
        for key, value in mine[0].arguments.items():
            values = list(dict.fromkeys(recipe.arguments[key] for recipe in mine))
            if len(values) > 1:
                pattern = pattern.replace(value, "{" + ", ".join(values) + "}", 1)
                what = re.sub(rf"\b{re.escape(value)}\b", key.upper(), what)
        rows.append([pattern, what])
    return table(["recipe", "what"], rows)


def presets(
    name: Annotated[
        str | None, typer.Argument(help="One preset, in full.", show_default=False, autocompletion=completion.methods)
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the methods, or describe one: its source, what it saves and what it loses."""
    import hotrain
    from hotrain.presets import describe
    from hotrain.tables import table

    def entry(each: str) -> dict[str, Any]:
        what = " ".join(describe(each).split("\n\n")[0].split())
        return {"method": str(hotrain.preset(each)), "what": what, "default": each == DEFAULT}

    if name is not None:
        answer = {"name": name, **entry(name), "description": describe(name)}
        show(json, answer, f"{hotrain.preset(name)}\n\n{describe(name)}")
        return
    methods = {each: entry(each) for each in hotrain.presets()}
    rows = [[each + " (default)" * entry["default"], entry["what"]] for each, entry in methods.items()]
    more = "`hotrain presets NAME` shows what one computes, its source and what it loses."
    show(json, methods, f"{table(['preset', 'what'], rows)}\n\n{more}")


def report(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help="A demo, a comparison, runs, folders of runs, or of records of studies. Default: runs/demo.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the report of several; default: runs/report.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Draw report.html from records: of a demo or a comparison, of finished runs beside each other, or (in a clone) of
    the studies.

    Runs that differ in more than method and seed get a table of their own, named by what differs. Trains and measures
    nothing.
    """
    from hotrain.cli.run_records import gathered
    from hotrain.plotting.records import SUMMARY, load_records
    from hotrain.plotting.report import write_report

    folders = folders or [Path("runs/demo")]
    if clone.FOUND and len(folders) == 1:
        from hotrain_study import page as studies

        if files := studies.records_in(folders[0]):
            path = studies.write(files, out or folders[0])
            show(json, {"records": files, "report": path}, f"wrote {path}")
            return
    whole = len(folders) == 1 and out is None and (folders[0] / SUMMARY).is_file()
    folder = folders[0] if whole else out or Path("runs/report")
    records = load_records(folder) if whole else gathered(folders)
    if not whole:
        records.save(folder)
    page = write_report(folder)
    if json:
        print_json({"rows": records.rows, "folder": folder, "report": page})
        return
    if not whole:
        print_lines(records)
    typer.echo(f"wrote {page}")
