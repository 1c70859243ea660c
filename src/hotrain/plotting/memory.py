"""Bytes kept between forward and backward by operator, exact above converted; one panel a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hotrain.plotting.style import INK, drawing, new_figure, stand_in, tag, to_svg

SHOWN = 7
"""Operators drawn by name; the rest are summed."""

READABLE = {
    "addmm": "linear layers",
    "mm": "linear layers",
    "bmm": "linear layers",
    "hotrain linear": "linear layers",
    "convolution": "convolutions",
    "hotrain conv2d": "convolutions",
    "native_layer_norm": "layer norm",
    "native_batch_norm": "batch norm",
    "cudnn_batch_norm": "batch norm",
}
"""What a reader calls PyTorch's operators; a layer and its converted form share a row."""


def readable(operator: str) -> str:
    """``scaled_dot_product_flash_attention_for_cpu`` is ``attention``; an unknown operator keeps its name."""
    if operator.startswith("scaled_dot_product"):
        return "attention"
    if operator.replace(" ", "").endswith("relu"):
        return "relu"  # exact, or converted to keep a bit an entry
    return READABLE.get(operator, operator.removeprefix("native_").replace("_", " "))


def _gathered(table: Mapping[str, int]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for operator, size in table.items():
        name = readable(operator)
        sums[name] = sums.get(name, 0) + size
    return sums


def draw_bytes(by_method: Mapping[str, Mapping[str, int]], title: str) -> str:
    """SVG of grouped bars. ``by_method``: method → operator → bytes; the first method is drawn on top."""
    by_method = {method: _gathered(table) for method, table in by_method.items()}
    operators = _largest(by_method)
    peak = max((table.get(name, 0) for table in by_method.values() for name in operators), default=0)
    unit, name_of_unit = (2**20, "MiB") if peak >= 2**20 else (2**10, "KiB")
    count = len(by_method)
    height = 0.8 / max(count, 1)
    with drawing():
        figure = new_figure(title, 0.75 + 0.2 * len(operators) * max(count, 1.6))
        axes = figure.subplots()
        for rank, (method, table) in enumerate(by_method.items()):
            widths = [_bytes_of(table, name, operators) / unit for name in operators]
            places = [row + (rank - (count - 1) / 2) * height for row in range(len(operators))]
            bars = axes.barh(places, widths, height=height * 0.9, color=stand_in(method), linewidth=0)
            for bar, width in zip(bars, widths, strict=True):
                bar.set_gid(tag(method))
                axes.annotate(
                    f"{width:.2f}" if width < 10 else f"{width:.0f}",
                    (width, bar.get_y() + bar.get_height() / 2),
                    xytext=(3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=7,
                    color=INK,
                )
        axes.set_yticks(range(len(operators)), operators)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.margins(x=0.12, y=0.01)
        axes.set_xlabel(f"{name_of_unit} kept for one batch")
        return to_svg(figure, f"{title}: bytes kept by operator for {', '.join(by_method)}")


def _largest(by_method: Mapping[str, Mapping[str, int]]) -> Sequence[str]:
    """Operator names by their largest bytes in any method, the small ones gathered under ``the rest``."""
    peak: dict[str, int] = {}
    for table in by_method.values():
        for name, size in table.items():
            peak[name] = max(peak.get(name, 0), size)
    names = sorted((name for name in peak if peak[name] > 0), key=lambda name: (-peak[name], name))
    return names if len(names) <= SHOWN + 1 else [*names[:SHOWN], "the rest"]


def _bytes_of(table: Mapping[str, int], name: str, shown: Sequence[str]) -> int:
    if name == "the rest" and name not in table:
        return sum(size for operator, size in table.items() if operator not in shown)
    return table.get(name, 0)
