"""Bytes saved between forward and backward, one bar per method, divided by operator; one panel per model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hotrain.plotting.lines import bytes_text, ratio_text
from hotrain.plotting.style import INK, SERIES, drawing, part, to_svg
from hotrain.plotting.tradeoff import unit_of

REST = "the rest"
ACTIVATIONS = (
    *("elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish", "relu6", "sigmoid", "silu", "tanh"),
    *("slope", "curve"),  # ours: of any of them
)
READABLE = {
    "addmm": "linear layers",
    "mm": "linear layers",
    "bmm": "linear layers",
    "linear": "linear layers",
    "conv2d": "convolutions",
    "convolution": "convolutions",
}


def readable(operator: str) -> str:
    """What a reader calls one of PyTorch's operators: it and its converted form have the same name.

    ``native_layer_norm`` and ``hotrain norm`` are ``norms``; an unknown operator keeps its name.
    """
    name = operator.removeprefix("hotrain ").strip()
    if name.startswith("scaled_dot_product") or name == "attention":
        return "attention"
    if name.endswith("norm") or name == "normalized":
        return "norms"
    if name in ACTIVATIONS or name.replace(" ", "").endswith("relu"):
        return "activation functions"
    return READABLE.get(name, name.removeprefix("native_").replace("_", " "))


def gathered(table: Mapping[str, int]) -> Counter[str]:
    """The bytes by operator, with the operators that a reader calls alike added up."""
    sums: Counter[str] = Counter()
    for operator, size in table.items():
        sums[readable(operator)] += size
    return sums


def parts_of(tables: Sequence[Mapping[str, int]]) -> list[str]:
    """The operators of several tables that get a colour, by their largest bytes; ``the rest`` is last."""
    peak: Counter[str] = Counter()
    for table in tables:
        peak |= gathered(table)  # the larger of both, above 0
    names = sorted(peak, key=lambda name: (-peak[name], name))
    room = len(SERIES) - 1
    return names[:room] + ([REST] if len(names) > room else [])


def draw_bytes(
    by_method: Mapping[str, Mapping[str, int]], parts: Sequence[str], names: Mapping[str, str], title: str
) -> str:
    """SVG of stacked bars. ``by_method``: method → operator → bytes. ``names``: method → its label.

    ``parts``: operators in the order of their colours, as `parts_of` gives them for all figures of a page.
    """
    tables = {method: gathered(table) for method, table in by_method.items()}
    totals = {method: sum(table.values()) for method, table in tables.items()}
    unit, name_of_unit = unit_of(max(totals.values(), default=0))
    shown = [name for name in parts if any(_bytes_of(table, name, parts) for table in tables.values())]
    with drawing(title, 1.05 + 0.25 * len(tables) + 0.17 * -(-len(shown) // 2)) as figure:
        axes = figure.subplots()
        rows = range(len(tables))
        left = [0.0] * len(tables)
        for name in shown:
            widths = [_bytes_of(table, name, parts) / unit for table in tables.values()]
            colour = part(-1 if name == REST else parts.index(name))
            axes.barh(rows, widths, left=left, height=0.66, color=colour, linewidth=0, label=name)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for row, (method, total) in enumerate(totals.items()):
            ratio = total / totals["exact"] if method != "exact" and totals.get("exact") else None
            text = bytes_text(total) + (f" · {ratio_text(ratio)}" if ratio is not None else "")
            axes.annotate(text, (left[row], row), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
        axes.set_yticks(rows, [names[method] for method in tables], color=INK)
        for label, method in zip(axes.get_yticklabels(), tables, strict=True):
            label.set_fontweight("bold" if names[method] != method else "normal")
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_xlim(0, 1.42 * max(max(left, default=0.0), 1 / unit))
        axes.set_xlabel(f"{name_of_unit} kept for one batch")
        figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8, handlelength=1, handleheight=0.9)
        return to_svg(figure, f"{title}: bytes kept by operator for {', '.join(names[method] for method in tables)}")


def changes(by_method: Mapping[str, Mapping[str, int]]) -> list[tuple[list[str], list[str], list[str]]]:
    """What becomes smaller and what larger than with exact: (methods, operators smaller, operators larger).

    Methods that change the same operators are one entry, in the order of ``by_method``; without exact there is none. A
    hundredth more or less is no change.
    """
    if "exact" not in by_method:
        return []
    tables = {method: gathered(table) for method, table in by_method.items()}
    exact = tables.pop("exact")
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for method, table in tables.items():
        names = sorted(set(table) | set(exact), key=lambda name: -max(table[name], exact[name]))
        less = tuple(name for name in names if table[name] < 0.99 * exact[name])
        more = tuple(name for name in names if table[name] > 1.01 * exact[name])
        alike.setdefault((less, more), []).append(method)
    return [(methods, list(less), list(more)) for (less, more), methods in alike.items()]


def _bytes_of(table: Counter[str], name: str, parts: Sequence[str]) -> int:
    if name == REST and name not in table:
        return sum(size for operator, size in table.items() if operator not in parts)
    return table[name]
