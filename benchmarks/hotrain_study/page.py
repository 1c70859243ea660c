"""The HTML page of the studies: the findings first, then each study's figures and tables, every cell of them.

One file, no script, no request to anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from hotrain.files import write_text
from hotrain.plotting.curves import draw_curves
from hotrain.plotting.page import STYLE
from hotrain.plotting.records import curve
from hotrain.plotting.spectrum import draw_spectrum
from hotrain.plotting.style import css_variables, looks
from hotrain.presets import DEFAULT
from hotrain_study.cells import read_rows
from hotrain_study.figures import draw_choices, draw_errors, draw_gaps, draw_surface
from hotrain_study.studies import studies
from hotrain_study.tables import Table, head, ran_on, tables

REPORT = "report.html"
LQS_THRESHOLD = 0.5


@dataclass(frozen=True)
class Section:
    """One study.

    Args:
        title: what it asks.
        conditions: a line for each device and commit.
        tables: of its cells.
        rows: the records that count, of which figures are drawn.
    """

    title: str
    conditions: Sequence[str]
    tables: Sequence[Table]
    rows: Sequence[Mapping[str, Any]] = field(default_factory=list)


def records_in(folder: Path) -> list[Path]:
    """Files of a folder that `hotrain study` writes, by their names."""
    return sorted(file for file in folder.glob("*.jsonl") if file.stem in studies())


def write(files: Sequence[Path], folder: Path) -> Path:
    """Write the page of all studies to report.html of ``folder``; tables have every cell, also those not recorded."""
    rows, sections = read_rows(files), []
    for study in studies().values():
        shown = [replace(table, rows=[_plain(row) for row in table.rows]) for table in tables(study, rows)]
        sections.append(Section(study.title, ran_on(study, rows), shown, list(study.last(rows).values())))
    page = render("What the studies say of the papers", _plain(head(studies(), rows, DEFAULT)), sections)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / REPORT, page)
    return folder / REPORT


def _plain(texts: Sequence[str]) -> list[str]:
    return [text.replace("`", "") for text in texts]


def render(title: str, findings: Sequence[str], sections: Sequence[Section]) -> str:
    """The page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    shown = [
        {"title": each.title, "conditions": each.conditions, "tables": each.tables, "figures": figures(each.rows)}
        for each in sections
    ]
    style = STYLE.replace("/*light*/", css_variables("light")).replace("/*dark*/", css_variables("dark"))
    return environment.from_string(PAGE).render(title=title, findings=findings, sections=shown, style=style)


def figures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """SVGs of what the records hold: gaps and curves of trainings, errors, energy, LQS and surfaces of gradients."""
    trained = [row for row in rows if row["kind"] == "train" and row["status"] == "finished"]
    look_of = looks([row["method"] for row in trained])
    drawn = []
    for group in dict.fromkeys(row["group"] for row in trained):
        mine = [row for row in trained if row["group"] == group]
        gaps, metric = _gaps(mine), mine[0].get("metric", "accuracy")
        if gaps:
            drawn.append(draw_gaps(gaps, look_of, group, metric))
        curves = [curve(row["history"], method=row["method"]) for row in mine]
        if any(len(each["epoch"]) > 1 for each in curves):
            drawn.append(draw_curves(curves, "accuracy", look_of, f"{group}: {metric}", metric))
    for row in rows:
        if row["kind"] == "gradients" and row["status"] == "finished":
            drawn += _of_gradients(row)
    return drawn


def _gaps(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Method → points above exact with the same seed."""
    exact = {row["seed"]: row["accuracy"] for row in rows if row["method"] == "exact"}
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["method"] != "exact" and row["seed"] in exact:
            found.setdefault(row["method"], []).append(row["accuracy"] - exact[row["seed"]])
    return found


def _of_gradients(row: Mapping[str, Any]) -> list[str]:
    mine, group = row["figures"], row["group"]
    drawn = [draw_errors(mine["moments"], path, f"{group}: error of {path}") for path in ("g_x", "g_w")]
    last = mine["moments"][-1]
    spectra = [
        {"layer": layer, "tensor": tensor, "energy": entry[tensor]}
        for layer, entry in last["energy"].items()
        for tensor in ("g_y", "x")
    ]
    drawn.append(draw_spectrum(spectra, f"{group}: energy at the end"))
    if last["lqs"]:
        layers = [{"layer": name, "choice": each[0], "ratio": each[1]} for name, each in last["lqs"].items()]
        drawn.append(draw_choices(layers, LQS_THRESHOLD, f"{group}: what LQS chooses at the end"))
    return drawn + [draw_surface(surface, f"{group}: |g_y| of {surface['layer']}") for surface in mine["surfaces"]]


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{{ title }}</title>
<style>{{ style|safe }}</style>
</head>
<body>
<main>
<p class="eyebrow">hotrain</p>
<h1>{{ title }}</h1>
<ul>
{% for line in findings %}<li>{{ line }}</li>
{% endfor %}
</ul>
{% for section in sections %}
<h2>{{ section.title }}</h2>
{% if section.figures %}<div class="panels">
{% for figure in section.figures %}<figure>{{ figure|safe }}</figure>
{% endfor %}</div>{% endif %}
{% for table in section.tables %}
<div class="wide"><table><caption>{{ table.title }}</caption>
<thead><tr>{% for name in table.headers %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table></div>
{% if table.note %}<p class="muted">{{ table.note }}</p>{% endif %}
{% endfor %}
<ul class="muted">{% for line in section.conditions %}<li>{{ line }}</li>
{% endfor %}</ul>
{% endfor %}
</main>
</body>
</html>
"""
