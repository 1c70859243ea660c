"""``hotrain recipes``, ``presets`` and ``report``: lists of recipes and methods, and the report of saved records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotrain.cli.options import JsonOption, print_json
from hotrain.cli.terminal import working

if TYPE_CHECKING:
    from hotrain_recipes import Recipe


def recipes(
    name: Annotated[str | None, typer.Argument(help="One recipe, with all its fields.", show_default=False)] = None,
    family: Annotated[str | None, typer.Option("--family", help="Only the recipes of this family.")] = None,
    json: JsonOption = False,
) -> None:
    """List the recipes by family, or one with all its fields."""
    with working("reading the recipes"):
        import hotrain_recipes

    found = hotrain_recipes.all()
    if name is not None:
        _one(name, json)
        return
    families = list(dict.fromkeys(recipe.family for recipe in found.values()))
    if family is not None and family not in families:
        raise ValueError(f"--family: got {family!r}, families are {', '.join(sorted(families))}")
    chosen = {name: recipe for name, recipe in found.items() if family in (None, recipe.family)}
    if json:
        print_json([{"name": n, "family": r.family, "description": r.description} for n, r in chosen.items()])
        return
    for title in dict.fromkeys(recipe.family for recipe in chosen.values()):
        typer.echo(f"{title}\n{_family([recipe for recipe in chosen.values() if recipe.family == title])}\n")
    typer.echo(_methods(list(chosen.values())))


def _one(name: str, json: bool) -> None:
    """Print a recipe's document and fields."""
    import hotrain_recipes

    run = hotrain_recipes.load_recipe(name)
    recipe = hotrain_recipes.all()[name]
    if json:
        print_json({"name": name, "family": recipe.family, "description": recipe.description, "run": run.to_dict()})
        return
    typer.echo(f"{recipe.document}\n\nFields, for --set FIELD=VALUE:\n")
    for field, value in vars(run).items():
        typer.echo(f"  {field:<20}{value!r}")


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


def _methods(members: list[Recipe]) -> str:
    """A sentence on the methods of the recipes, which marks the library's default."""
    from hotrain.presets import DEFAULT

    names: dict[str, list[str]] = {}
    for recipe in members:
        names.setdefault(recipe.run().method_label, []).append(recipe.name)
    parts = []
    for label, of in names.items():
        default = ", the library's default" if label == DEFAULT else ""
        which = "all" if len(names) == 1 else ", ".join(of) if len(of) < 4 else f"{len(of)} of them"
        parts.append(f"{which} train with {label}{default}")
    return f"{len(members)} recipes: {'; '.join(parts)}"


def presets(
    name: Annotated[str | None, typer.Argument(help="One preset, in full.", show_default=False)] = None,
    json: JsonOption = False,
) -> None:
    """List the methods, or describe one: its source, what it saves and what it loses."""
    import hotrain
    from hotrain.presets import DEFAULT, describe
    from hotrain.tables import table

    def entry(each: str) -> dict[str, Any]:
        what = " ".join(describe(each).split("\n\n")[0].split())
        return {"method": str(hotrain.preset(each)), "what": what, "default": each == DEFAULT}

    if name is not None:
        if json:
            print_json({"name": name, **entry(name), "description": describe(name)})
        else:
            typer.echo(f"{hotrain.preset(name)}\n\n{describe(name)}")
        return
    methods = {each: entry(each) for each in hotrain.presets()}
    if json:
        print_json(methods)
        return
    rows = [[each + " (default)" * entry["default"], entry["what"]] for each, entry in methods.items()]
    typer.echo(table(["preset", "what"], rows))
    typer.echo("\n`hotrain presets NAME` shows what one computes, its source and what it loses.")


def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder with summary.json (and records.json), or with records of studies.")
    ] = Path("runs/demo"),
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Of studies: the page. Default: in FOLDER.")] = None,
) -> None:
    """Draw report.html from the records of a demo, a comparison or the studies. Trains and measures nothing."""
    from hotrain.plotting.report import write_report

    files = [] if (folder / "summary.json").is_file() else sorted(folder.glob("*.jsonl"))
    typer.echo(f"wrote {_studies(files, out or folder / 'report.html') if files else write_report(folder)}")


def _studies(files: list[Path], path: Path) -> Path:
    """Draw the page of all studies; their tables have every cell, also those that the records lack."""
    from dataclasses import asdict

    import hotrain_recipes.studies as known

    from hotrain.plotting.studies import Section, write_studies
    from hotrain.presets import DEFAULT
    from hotrain.train.study import read_rows
    from hotrain.train.study_tables import head, ran_on, tables

    rows, studies = read_rows(files), known.studies()
    sections = []
    for study in studies.values():
        shown = [{**asdict(table), "rows": [_plain(row) for row in table.rows]} for table in tables(study, rows)]
        sections.append(Section(study.title, ran_on(study, rows), shown, list(study.last(rows).values())))
    findings = _plain(head(studies, rows, DEFAULT))
    return write_studies(path, "What the studies say of the papers", findings, sections)


def _plain(texts: list[str]) -> list[str]:
    return [text.replace("`", "") for text in texts]
