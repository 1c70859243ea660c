"""The HTML page of the studies: the findings first, then each study's figures and tables, every cell of them.

One file, no script, no request to anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from hotrain_study.cells import FINISHED, Study, lines, read_rows
from hotrain_study.figures import draw_choices, draw_errors, draw_gaps, draw_surface
from hotrain_study.studies import studies
from hotrain_study.tables import head, ran_on, tables

REPORT = "report.html"
LQS_THRESHOLD = 0.5


def records_in(folder: Path) -> list[Path]:
    """Files of a folder that `hotrain study` writes, by their names."""
    return sorted(file for file in folder.glob("*.jsonl") if file.stem in studies())


def write(files: Sequence[Path], folder: Path) -> Path:
    """Write the page of all studies to report.html of ``folder``; tables have every cell, also those not recorded."""
    rows = read_rows(files)
    page = render("What the studies say of the papers", head(studies(), rows, DEFAULT), studies().values(), rows)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / REPORT, page)
    return folder / REPORT


def render(title: str, findings: Sequence[str], shown: Iterable[Study], rows: Sequence[Mapping[str, Any]]) -> str:
    """The page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["plain"] = lambda text: text.replace("`", "")
    sections = [
        {"title": s.title, "conditions": ran_on(s, rows), "tables": tables(s, rows), "figures": figures(s, rows)}
        for s in shown
    ]
    style = STYLE.replace("/*light*/", css_variables("light")).replace("/*dark*/", css_variables("dark"))
    return environment.from_string(PAGE).render(title=title, findings=findings, sections=sections, style=style)


def figures(study: Study, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """SVGs of what the records hold: gaps and curves of trainings, errors, energy, LQS and surfaces of gradients."""
    finished = [row for row in study.last(rows).values() if row["status"] == FINISHED]
    trained = [row for row in finished if row["kind"] == "train"]
    look_of = looks([row["method"] for row in trained])
    found = lines(study, rows)
    drawn = []
    for group in dict.fromkeys(row["group"] for row in trained):
        mine = [row for row in trained if row["group"] == group]
        metric = mine[0].get("metric", "accuracy")
        if gaps := {line.method: line.gaps for line in found if line.group == group and line.gaps}:
            drawn.append(draw_gaps(gaps, look_of, group, metric))
        curves = [curve(row["history"], method=row["method"]) for row in mine]
        if any(len(each["epoch"]) > 1 for each in curves):
            drawn.append(draw_curves(curves, "accuracy", look_of, f"{group}: {metric}", metric))
    return drawn + [figure for row in finished if row["kind"] == "gradients" for figure in _of_gradients(row)]


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
{% for line in findings %}<li>{{ line|plain }}</li>
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
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell|plain }}</td>{% endfor %}</tr>
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
