"""What formats do to gradients as Markdown, from the records that ``benchmarks/formats.py`` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import records

from hotrain.compress import formats, rules

# operator → what the policy calls its entry
ENTRIES = {
    "gelu": "gelu",
    "silu": "curve",
    "tanh": "saturating",
    "layer_norm": "norm",
    "rms_norm": "norm",
    "group_norm": "norm",
    "batch_norm": "norm",
    "softmax": "softmax",
    "attention q, k": "query_key",
    "attention v, output": "value_output",
    "product": "product",
    "matmul": "matmul",
    "linear": "linear",
    "conv2d": "conv",
}
TOGETHER = ("all", "methods")  # what comes behind the model's name in a subject that is no operator
_NOT_YET = (
    "*Nothing is recorded yet: `python benchmarks/formats.py --data cifar10.npz --out "
    "benchmarks/results/formats_cpu_DATE.jsonl` measures on a CPU, `make docs` prints it here.*"
)


def operators(folder: Path = records.RESULTS) -> str:
    """A line a format of an operator, each operator from the first model that has it; in bold what the policy says."""
    rows = [row for row in _latest(folder) if _what(row) not in TOGETHER]
    if not rows:
        return _NOT_YET
    first: dict[str, str] = {}
    for row in rows:
        first.setdefault(_what(row), _model(row))
    lines = []
    for row in rows:
        if first[_what(row)] == _model(row):
            form = f"**{row['variant']}**" if row["variant"] == _today(_what(row)) else row["variant"]
            size = "–" if row.get("bytes_entry") is None else f"{row['bytes_entry']:.2f}"
            own = [
                f"{name} {_percent(errors['error'])} ({_percent(errors['persistent'])})"
                for name, errors in row.get("gradients", {}).items()
                if errors["error"]
            ]
            lines.append([_what(row), _model(row), form, size, ", ".join(own) or "–", *_of_model(row)])
    headers = ["operator", "model", "format", "bytes an entry", "error of its own gradients (persistent)"]
    return _conditions(rows) + records._markdown([*headers, *_MODEL_HEADERS], lines)


def together(folder: Path = records.RESULTS) -> str:
    """All operators at once, a line a set of formats and a method of layers, for every model."""
    rows = [row for row in _latest(folder) if _what(row) in TOGETHER]
    if not rows:
        return _NOT_YET
    products = {"all": "exact", "methods": "of the method"}
    shown: list[dict[str, Any]] = []
    for row in rows:
        # A set that differs in operators which a model lacks gives the numbers of another.
        if not any((row["subject"], row["model"]) == (other["subject"], other["model"]) for other in shown):
            shown.append(row)
    lines = [[_model(row), products[_what(row)], row["variant"], *_of_model(row)] for row in shown]
    return _conditions(rows) + records._markdown(["model", "products", "formats", *_MODEL_HEADERS], lines)


def rule_book(folder: Path = records.RESULTS) -> str:
    """A line a row of the rule book, with the records of the formats that hotrain's own operators have."""
    rows = _latest(folder)
    lines = []
    for rule in rules.RULES:
        eager = [_form(rule.saved)] if rule.saved != rules.EXACT or not rule.arguments else []
        eager += [f"{_form(use)} (argument {place + 1})" for place, use in rule.arguments.items()]
        is_looked_up = rule.aten or rule.decomposed
        compiled = rule.compiled or ("the same" if is_looked_up or not rule.rounds else "the same, by its parts")
        own = [f"{form} ({key})" if len(rule.formats) > 1 else form for key, form in rule.formats.items()]
        mine = [operator for operator, entry in ENTRIES.items() if entry in rule.formats]
        errors = [text for operator in mine for text in _errors(rows, operator)]
        because = rule.because or rules.BECAUSE[rules.strictest(rule.arguments.values() or [rule.saved])]
        cells = [rule.name, ", ".join(own), ", ".join(eager), compiled, because, "; ".join(errors)]
        lines.append([cell or "–" for cell in cells])
    headers = ["operation", "hotrain's operator", "without one, eager", "compiled", "because"]
    return records._markdown([*headers, "error of the gradients with hotrain's operator"], lines)


def _form(use: str) -> str:
    return rules.FORM[use].replace("sign", "a byte per element").replace("shape", "nothing") or "as it is"


def _errors(rows: list[dict[str, Any]], operator: str) -> list[str]:
    """The error of an operator's own gradients in its format, in the first model that has the operator."""
    for row in rows:
        if _what(row) == operator and row["variant"] == _today(operator):
            found = [f"{name} {_percent(e['error'])}" for name, e in row["gradients"].items() if e["error"]]
            return [f"{operator}: {', '.join(found)}"]
    return []


_MODEL_HEADERS = ["error of the model's gradient", "persistent", "worst weight", "variance added to a batch's"]


def _of_model(row: dict[str, Any]) -> list[str]:
    found = row["model"]
    added = (found["error"] / found["noise"]) ** 2
    return [_percent(found[name]) for name in ("error", "persistent", "worst_tensor")] + [_percent(added)]


def _percent(value: float | None) -> str:
    """Two significant digits; what is too small or too large to matter how much, as such."""
    if value is None:
        return "–"
    if value >= 10:
        return "> 1000 %"
    return "< 0.001 %" if 0 < value < 1e-5 else f"{float(f'{100 * value:.2g}'):g} %"


def _latest(folder: Path) -> list[dict[str, Any]]:
    """Of each model the run that was recorded last."""
    rows = records._of_bench("formats", folder)
    runs = {_model(row): row["run_id"] for row in rows}
    return [row for row in rows if row["run_id"] == runs[_model(row)]]


def _what(row: dict[str, Any]) -> str:
    return str(row["subject"]).partition("/")[2]


def _model(row: dict[str, Any]) -> str:
    return str(row["subject"]).partition("/")[0]


def _today(operator: str) -> str:
    entry = ENTRIES[operator]
    return f"input {formats.FORMATS[entry]}" if entry in ("gelu", "curve", "saturating") else formats.FORMATS[entry]


def _conditions(rows: list[dict[str, Any]]) -> str:
    lines = dict.fromkeys(records._conditions(row) for row in rows)
    return "\n".join(f"* {line}" for line in lines) + "\n\n"
