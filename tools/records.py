"""Measured results as Markdown, from the records under benchmarks/results; without a record, how to make one.

Two kinds of record lie there. ``*.jsonl``: one measurement a line (`FIELDS`), from ``make bench``; ratios are formed
within one ``run_id`` only. ``*.json``: the ``summary.json`` of a `hotrain compare` or `hotrain demo`, copied under a
name that says what was compared.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
FIELDS = (
    "subject",
    "variant",
    "run_id",
    "median_ms",
    "spread_ms",
    "peak_bytes",
    "activation_bytes",
    "device",
    "torch",
    "commit",
    "command",
)
CONTROL = "exact"


def measurements(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The lines of every ``*.jsonl``, in the order of the files' names.

    Raises ValueError, naming the file and the line, for one that is not JSON or lacks a field.
    """
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path.name}:{number} is not JSON ({error})") from error
            missing = [name for name in FIELDS if name not in row]
            if missing:
                raise ValueError(f"{path.name}:{number} lacks {', '.join(missing)}")
            found.append(row)
    return found


def layers(only: str = "", folder: Path = RESULTS) -> str:
    """Time and bytes of layers, a table a run, ratios to ``exact`` of the same run and subject.

    only: a part of the subjects' names between slashes, such as ``all`` (what `benchmarks/layers.py` calls its sums).
    """
    runs: dict[str, list[dict[str, Any]]] = {}
    for row in measurements(folder):
        if not only or only in row["subject"].split("/"):
            runs.setdefault(row["run_id"], []).append(row)
    if not runs:
        return "*No layer is recorded yet: `make bench` measures some on your machine, `make docs` prints them here.*"
    return "\n\n".join(_run(rows) for rows in runs.values())


def _run(rows: list[dict[str, Any]]) -> str:
    headers = ["subject", "variant", "backward ms", "× exact", "forward ms", "× exact", "bytes kept", "× exact"]
    lines = [headers, ["---"] * len(headers)]
    controls = {row["subject"]: row for row in rows if row["variant"] == CONTROL}
    for row in rows:
        control = controls.get(row["subject"], {})
        cells = [row["subject"], row["variant"]]
        cells += [f"{row['median_ms']:.3g} ± {row['spread_ms']:.2g}", _ratio(row, control, "median_ms")]
        forward = row.get("forward_ms")
        cells += ["–" if forward is None else f"{forward:.3g}", _ratio(row, control, "forward_ms")]
        cells += [f"{row['activation_bytes']:,}", _ratio(row, control, "activation_bytes")]
        lines.append(cells)
    return _conditions(rows[0]) + "\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _ratio(row: dict[str, Any], control: dict[str, Any], field: str) -> str:
    if row["variant"] == CONTROL or row.get(field) is None or not control.get(field):
        return ""
    return f"{row[field] / control[field]:.2f}"


def _conditions(row: dict[str, Any]) -> str:
    torch = row.get("torch") or row.get("versions", {}).get("torch", "?")
    threads = f", {row['threads']} threads" if row.get("threads") else ""
    return f"{row['device']}{threads}, PyTorch {torch}, commit {str(row['commit'])[:10]}: `{row['command'].strip()}`"


def accuracy(folder: Path = RESULTS) -> str:
    """Comparisons: mean accuracy over seeds, its spread, and the gap to exact with the same seed."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    if not found:
        return (
            "*No comparison is recorded yet: `make demo` trains two small models with seven methods on your machine "
            "and prints the table; `hotrain compare` does so for a recipe of your choice.*"
        )
    return "\n\n".join(_comparison(summary) for summary in found)


def _comparison(summary: dict[str, Any]) -> str:
    rows = [row for row in summary["rows"] if row["accuracy"] is not None]
    lines = [
        _conditions(summary),
        "",
        "| model | method | accuracy % | gap to exact | seeds | bytes kept | bit operations | ms a step |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for model, method in dict.fromkeys((row["model"], row["method"]) for row in rows):
        mine = {r["seed"]: r for r in rows if (r["model"], r["method"]) == (model, method)}
        control = {r["seed"]: r["accuracy"] for r in rows if (r["model"], r["method"]) == (model, CONTROL)}
        gaps = [row["accuracy"] - control[seed] for seed, row in mine.items() if seed in control]
        first = next(iter(mine.values()))
        cells = [
            model,
            method,
            _mean([row["accuracy"] for row in mine.values()]),
            "" if method == CONTROL else _mean(gaps, sign="+"),
            str(len(mine)),
            "–" if first["saved_bytes"] is None else f"{first['saved_bytes']:,}",
            "–" if first["bit_ops"] is None else f"{first['bit_ops']:.3g}",
            _mean([row["step_ms"] for row in mine.values() if row["step_ms"] is not None], digits=1),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mean(values: list[float], sign: str = "", digits: int = 2) -> str:
    """Mean, and the standard deviation over seeds where there are several."""
    if not values:
        return "–"
    text = f"{statistics.fmean(values):{sign}.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):.{digits}f}"
