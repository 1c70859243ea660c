"""The HTML report of one folder of records: one file, no script, no request to anywhere."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from hotrain.files import write_text
from hotrain.plotting import lines
from hotrain.plotting.curves import draw_curves
from hotrain.plotting.memory import changes, draw_bytes, parts_of
from hotrain.plotting.page import FORMULA, PAGE, STYLE
from hotrain.plotting.records import Records, load_records
from hotrain.plotting.spectrum import draw_spectrum, median_kept
from hotrain.plotting.style import Look, css_variables, looks
from hotrain.plotting.tradeoff import draw_tradeoff

REPORT = "report.html"

Drawn = dict[str, str]
"""A figure of the page: ``svg`` and ``caption``."""


def write_report(folder: Path | str) -> Path:
    """Draw the records of ``folder`` into its report.html and return the path. Raises as `load_records`."""
    path = Path(folder) / REPORT
    write_text(path, render(load_records(folder)))
    return path


def render(records: Records) -> str:
    """The page as text. Sections without records are left out."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        bytes=lines.bytes_text,
        operations=lines.operations_text,
        milliseconds=lines.milliseconds_text,
        ratio=lines.ratio_text,
        gap=lines.gap_text,
        code=_code,
    )
    style = STYLE.replace("/*light*/", css_variables("light")).replace("/*dark*/", css_variables("dark"))
    described = records.meta.get("models", {})
    methods, table = records.methods(), lines.summarize(records.rows, records.meta.get("test_images"))
    look_of = looks([*methods, *(entry["method"] for kind in (records.memory, records.curves) for entry in kind)])
    names = {method: records.method_label(method) for method in look_of}
    return environment.from_string(PAGE).render(
        style=style,
        formula=[(name, FORMULA[name]) for name in methods if name in FORMULA] if "hot" in methods else [],
        swatch=_swatch,
        looks=look_of,
        meta=records.meta,
        default=records.default(),
        title=records.meta.get("title", "hotrain report"),
        findings=findings(records, table),
        noise=noise(table, records.meta.get("test_images") or {}),
        models=[
            {"name": name, "label": records.label(name), "description": described.get(name, {}).get("description", "")}
            for name in records.models()
        ],
        standing=lines.standing(table, records.label),
        methods=methods,
        same_forward=not any("forward=" in name for name in methods),
        described=[(name, text) for name, text in records.meta.get("methods", {}).items() if name in methods],
        table=table,
        tradeoffs=_tradeoffs(records, table, look_of, names),
        layers=_layers(records),
        curves=_curves(records, look_of),
        memory=_memory(records, names),
        spectra=_spectra(records),
        conditions=condition_rows(records.meta),
    )


def findings(records: Records, table: Sequence[lines.Line]) -> list[str]:
    """A sentence or two a model on its default method or, where that was not run, on the one that keeps least."""
    found = []
    for model in records.models():
        others = [
            line
            for line in table
            if line.model == model and line.method != "exact" and line.gap is not None and line.saved_ratio is not None
        ]
        if not others:
            continue
        line = min(others, key=lambda line: (line.method != records.default(), line.saved_ratio))
        exact = next(other for other in table if (other.model, other.method) == (model, "exact"))
        found.append(
            f"{records.label(model)}: {records.method_label(line.method)} keeps {line.saved_ratio:.2f} × the bytes of "
            f"exact. {_accuracy_against(line, exact)}"
        )
    return found


def _accuracy_against(line: lines.Line, exact: lines.Line) -> str:
    assert line.gap is not None
    reached = f"Its accuracy of {line.accuracy:.2f} %"
    if line.within_noise:
        return f"{reached} is within noise of exact's {exact.accuracy:.2f} %."
    side = "above" if line.gap > 0 else "below"
    known = "the noise is not known" if line.noise is None else f"noise ±{line.noise:.2f}"
    return f"{reached} is {abs(line.gap):.2f} points {side} exact's ({known})."


def noise(table: Sequence[lines.Line], test_images: Mapping[str, int]) -> str:
    """What the page means by noise, in a sentence or two; empty where no gap has one."""
    measured = [line for line in table if line.noise is not None]
    if not measured:
        return ""
    said = []
    if any(line.by_seeds for line in measured):
        said.append("two standard errors of the gap to exact, paired by seed (bars)")
    if not all(line.by_seeds for line in measured):
        counts = sorted({test_images[line.model] for line in measured if not line.by_seeds})
        images = " or ".join(f"{count:,}" for count in counts)
        said.append(
            f"two binomial standard errors of exact's accuracy on {images} test images (band): with fewer than "
            f"{lines.PAIRS} seeds there is no better estimate"
        )
    return f"Noise is {'; elsewhere '.join(said)}."


def condition_rows(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The measurement's conditions as (name, value), in the order a reader asks for them."""
    names = {
        "command": "command", "device": "device", "threads": "threads", "jobs": "runs at a time", "seeds": "seeds",
        "epochs": "epochs", "steps": "updates", "batch_size": "batch", "data": "data", "test_images": "test images",
        "versions": "versions",
        "commit": "commit", "started": "started", "seconds": "took",
    }  # fmt: skip
    found = []
    for key, name in names.items():
        value = meta.get(key)
        if value is None:
            continue
        if isinstance(value, Mapping):
            value = ", ".join(f"{part} {entry}" for part, entry in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        elif key == "seconds":
            value = f"{value:.0f} s"
        found.append((name, str(value)))
    return found


def _code(text: str) -> str:
    """``text`` as HTML, with text between backticks as code."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{part}</code>" if index % 2 else part for index, part in enumerate(parts))


def _swatch(style: Look) -> str:
    """A short piece of the method's line, as SVG."""
    pattern = "" if isinstance(style.dash, str) else " ".join(f"{length * 2:g}" for length in style.dash[1])
    return (
        '<svg class="swatch" viewBox="0 0 34 14" aria-hidden="true"><line x1="0" y1="7" x2="34" y2="7" '
        f'stroke="var(--m-{style.name})" stroke-dasharray="{pattern}"/></svg>'
    )


def _tradeoffs(
    records: Records, table: Sequence[lines.Line], look_of: Mapping[str, Look], names: Mapping[str, str]
) -> list[Drawn]:
    figures = []
    for model in records.models():
        own = [line for line in table if line.model == model]
        if any(line.accuracy is not None and line.saved_bytes is not None for line in own):
            svg = draw_tradeoff(own, look_of, names, records.label(model))
            figures.append({"svg": svg, "caption": ""})
    return figures


def _layers(records: Records) -> list[dict[str, Any]]:
    """A table a model of what ran in the layers, of the first seed that says."""
    tables = []
    for model in records.models():
        ran: dict[str, list[dict[str, Any]]] = {}
        for row in records.rows:
            if row["model"] == model and row.get("layers"):
                ran.setdefault(row["method"], row["layers"])
        columns = list(dict.fromkeys(key for groups in ran.values() for group in groups for key in group))
        if columns:
            rows = [
                (method, [_cell(key, group.get(key)) for key in columns])
                for method, groups in ran.items()
                for group in groups
            ]
            tables.append({"label": records.label(model), "columns": columns, "rows": rows})
    return tables


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "–"
    if column in ("bytes", "exact_bytes") and isinstance(value, int | float):
        return lines.bytes_text(value)
    if column == "kernels":
        return "Triton" if value else "PyTorch"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def _by_model(records: Records, entries: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The label of every model that has entries, and those."""
    for model in records.models():
        own = [entry for entry in entries if entry["model"] == model]
        if own:
            yield records.label(model), own


def _curves(records: Records, look_of: Mapping[str, Look]) -> list[Drawn]:
    """Two figures a model that has two epochs; the numbers of a single epoch are in the table."""
    return [
        {"svg": draw_curves(curves, quantity, look_of, f"{label} · {quantity}"), "caption": ""}
        for label, curves in _by_model(records, records.curves)
        if any(len(curve["epoch"]) > 1 for curve in curves)
        for quantity in ("accuracy", "loss")
    ]


def _memory(records: Records, names: Mapping[str, str]) -> list[Drawn]:
    figures = []
    parts = parts_of([entry["by_operator"] for entry in records.memory])
    for label, entries in _by_model(records, records.memory):
        tables = {entry["method"]: entry["by_operator"] for entry in entries}
        svg = draw_bytes(tables, parts, names, label)
        figures.append({"svg": svg, "caption": " ".join(_change(records, *entry) for entry in changes(tables))})
    return figures


def _change(records: Records, methods: Sequence[str], less: Sequence[str], more: Sequence[str]) -> str:
    """One sentence: ``hot, int4: less in linear layers.``"""
    said = [f"{word} in {', '.join(names)}" for word, names in (("less", less), ("more", more)) if names]
    return f"{', '.join(map(records.method_label, methods))}: {'; '.join(said) or 'as much as exact everywhere'}."


def _spectra(records: Records) -> list[Drawn]:
    return [
        {"svg": draw_spectrum(spectra, label), "caption": _energy(spectra)}
        for label, spectra in _by_model(records, records.spectrum)
    ]


def _energy(spectra: Sequence[dict[str, Any]]) -> str:
    """What the lower half of the sequencies holds, in the median layer."""
    held = {tensor: median_kept(spectra, tensor) for tensor in ("g_y", "x")}
    said = [f"{100 * shares[len(shares) // 2 - 1]:.0f} % of {tensor}" for tensor, shares in held.items() if shares]
    half = max(len(shares) for shares in held.values()) // 2
    return f"The {half} lowest hold {' and '.join(said)} in the median layer; of white noise they hold 50 %."
