"""The HTML report of one folder of records: one file, no script, no request to anywhere."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from hotrain.plotting import lines
from hotrain.plotting.curves import draw_curves
from hotrain.plotting.memory import draw_bytes
from hotrain.plotting.page import FORMULA, PAGE, STYLE
from hotrain.plotting.records import Records, load_records
from hotrain.plotting.spectrum import draw_spectrum
from hotrain.plotting.style import css_name, css_variables, look
from hotrain.plotting.surface import draw_choices, draw_surface

REPORT = "report.html"
COMPARED = "hot-unbiased"
"""The method whose bytes are drawn beside exact's (when it was run)."""


def write_report(folder: Path | str) -> Path:
    """Draw the records of ``folder`` into its report.html and return the path. Raises as `load_records`."""
    folder = Path(folder)
    page = render(load_records(folder))
    draft = folder / (REPORT + ".draft")
    draft.write_text(page, encoding="utf-8")
    os.replace(draft, folder / REPORT)
    return folder / REPORT


def render(records: Records) -> str:
    """The page as text. Sections without records are left out."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        bytes=lines.bytes_text,
        operations=lines.operations_text,
        milliseconds=lines.milliseconds_text,
        ratio=lines.ratio_text,
        css=css_name,
        signed=lines.signed_text,
        code=_code,
    )
    style = STYLE.replace("/*light*/", css_variables("light")).replace("/*dark*/", css_variables("dark"))
    return environment.from_string(PAGE).render(
        style=style,
        formula=FORMULA,
        swatch=_swatch,
        meta=records.meta,
        title=records.meta.get("title", "hotrain report"),
        findings=findings(records),
        models=[{"name": name, "label": records.label(name), **_model(records, name)} for name in records.models()],
        methods=[{"name": name} for name in records.methods()],
        table=lines.summarize(records.rows),
        curves=_curves(records),
        memory=_memory(records),
        spectra=_spectra(records),
        choices=_choices(records),
        surfaces=_surfaces(records),
        conditions=conditions(records.meta),
    )


def findings(records: Records) -> list[str]:
    """What the rows say about hot-unbiased against exact, a sentence a model."""
    sentences = []
    for line in lines.summarize(records.rows):
        if line.method != COMPARED or line.gap is None or line.saved_ratio is None:
            continue
        noise = lines.noise(records.rows, line.model)
        runs = f"mean of {line.seeds} seeds" if line.seeds > 1 else "one seed"
        sentence = (
            f"{records.label(line.model)}: {line.method} keeps {line.saved_ratio:.2f} × the bytes of exact "
            f"and ends {_points(line.gap)} ({runs}"
        )
        sentence += f"; exact itself varies by ±{noise:.2f} between seeds)." if noise is not None else ")."
        sentences.append(sentence)
    return sentences


def conditions(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The measurement's conditions as (name, value), in the order a reader asks for them."""
    names = {
        "command": "command", "device": "device", "threads": "threads", "jobs": "runs at a time", "seeds": "seeds",
        "epochs": "epochs", "steps": "updates", "batch_size": "batch", "data": "data", "versions": "versions",
        "commit": "commit", "started": "started", "seconds": "took",
    }  # fmt: skip
    found = []
    for key, name in names.items():
        value = meta.get(key)
        if value is None:
            continue
        if isinstance(value, Mapping):
            value = ", ".join(f"{part} {version}" for part, version in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        elif key == "seconds":
            value = f"{value:.0f} s"
        found.append((name, str(value)))
    return found


def _code(text: str) -> str:
    """``text`` as HTML, with what stands between backticks set as code."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))


def _points(gap: float) -> str:
    if abs(gap) < 0.005:
        return "level with it in accuracy"
    return f"{abs(gap):.2f} points {'above' if gap > 0 else 'below'} it in accuracy"


def _swatch(method: str) -> str:
    """A short piece of the method's line, as SVG."""
    dash = look(method).dash
    pattern = "" if isinstance(dash, str) else " ".join(f"{length * 2:g}" for length in dash[1])
    return (
        '<svg class="swatch" viewBox="0 0 34 14" aria-hidden="true"><line x1="0" y1="7" x2="34" y2="7" '
        f'stroke="var(--m-{css_name(method)})" stroke-dasharray="{pattern}"/></svg>'
    )


def _model(records: Records, name: str) -> dict[str, Any]:
    entry = records.meta.get("models", {}).get(name, {})
    return {"description": entry.get("description", "")}


def _curves(records: Records) -> list[str]:
    figures = []
    for model in records.models():
        curves = [curve for curve in records.curves if curve["model"] == model]
        if curves:
            figures.append(draw_curves(curves, "accuracy", f"{records.label(model)} · accuracy"))
            figures.append(draw_curves(curves, "loss", f"{records.label(model)} · loss"))
    return figures


def _memory(records: Records) -> list[str]:
    figures = []
    for model in records.models():
        tables = {entry["method"]: entry for entry in records.memory if entry["model"] == model}
        shown = [name for name in ("exact", COMPARED) if name in tables] or list(tables)[:2]
        if shown:
            by_method = {name: tables[name]["by_operator"] for name in shown}
            figures.append(draw_bytes(by_method, records.label(model)))
    return figures


def _spectra(records: Records) -> list[str]:
    figures = []
    for model in records.models():
        spectra = [entry for entry in records.spectrum if entry["model"] == model]
        if spectra:
            figures.append(draw_spectrum(spectra, records.label(model)))
    return figures


def _choices(records: Records) -> list[str]:
    figures = []
    for model in records.models():
        layers = [entry for entry in records.calibration if entry["model"] == model]
        if layers:
            threshold = float(records.meta.get("lqs_threshold", 0.5))
            figures.append(draw_choices(layers, threshold, records.label(model)))
    return figures


def _surfaces(records: Records) -> list[dict[str, Any]]:
    return [
        {
            "svg": draw_surface(surface, surface["layer"]),
            "caption": f"{records.label(surface['model'])}, {surface['layer']}: LQS chose a scale a "
            f"{surface['choice']} (error ratio {surface['ratio']:.2f}).",
        }
        for surface in records.surfaces
    ]
