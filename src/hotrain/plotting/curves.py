"""Test accuracy and training loss over epochs, one line per method (mean of the seeds), one panel per model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.ticker import LogLocator, MaxNLocator

from hotrain.plotting.style import Look, drawing, stand_in, tag, to_svg


def draw_curves(
    curves: Sequence[dict[str, Any]], quantity: str, looks: Mapping[str, Look], title: str, metric: str = "accuracy"
) -> str:
    """SVG of one model's curves of the records, over two epochs or more.

    ``quantity`` is ``accuracy`` (percent; ``metric`` says of what) or ``loss`` (mean over the epoch).
    """
    by_method: dict[str, list[dict[str, Any]]] = {}
    for curve in curves:
        by_method.setdefault(curve["method"], []).append(curve)
    with drawing(title, 2.7) as figure:
        axes = figure.subplots()
        lowest: list[float] = []
        for method, runs in by_method.items():
            epochs, values = _mean_over_seeds(runs, quantity)
            if not epochs:
                continue
            style = looks[method]
            axes.plot(
                epochs,
                values,
                color=stand_in(style),
                linestyle=style.dash,
                linewidth=style.width,
                marker="o" if len(epochs) == 1 else None,
                markersize=3,
                solid_capstyle="round",
                gid=tag(style),
                zorder=2 + (style.dash == "-"),
            )
            lowest.append(min(values))
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.margins(x=0.02)
        if quantity == "accuracy":
            axes.set_ylabel(f"test {metric} (%)")
        else:
            axes.set_ylabel("training loss")
            if lowest and min(lowest) > 0:
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter("")
        return to_svg(
            figure, f"{title}: {metric if quantity == 'accuracy' else quantity} over epochs for {', '.join(by_method)}"
        )


def _mean_over_seeds(runs: Sequence[dict[str, Any]], quantity: str) -> tuple[list[int], list[float]]:
    """Epochs that every run of the method reached, and the mean of ``quantity`` there."""
    tables = [{e: v for e, v in zip(run["epoch"], run[quantity], strict=True) if v is not None} for run in runs]
    epochs = sorted(set.intersection(*(set(table) for table in tables)))
    return epochs, [fmean(table[epoch] for table in tables) for epoch in epochs]
