"""Energy by sequency along the tokens: is a low-pass basis justified for this model?"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from matplotlib.ticker import LogLocator

from hotrain.plotting.style import FIRST, MUTED, SECOND, drawing, new_figure, to_svg

SHADES = {"g_y": FIRST, "x": SECOND}
NAMES = {"g_y": "gradient g_y", "x": "input x"}
FLOOR = 1e-4
"""The smallest share drawn on the logarithmic axis."""


def draw_spectrum(spectra: Sequence[dict[str, Any]], title: str) -> str:
    """SVG of the layers' energy shares by sequency: the median as a line, lowest to highest as a band."""
    with drawing():
        figure = new_figure(title, 2.7)
        axes = figure.subplots()
        for tensor in SHADES:
            layers = [record["energy"] for record in spectra if record["tensor"] == tensor]
            if not layers:
                continue
            per_sequency = list(zip(*layers, strict=True))
            places = range(len(per_sequency))
            colour = SHADES[tensor]
            low, middle, high = ([max(pick(values), FLOOR) for values in per_sequency] for pick in (min, median, max))
            axes.fill_between(places, low, high, color=colour, alpha=0.16, linewidth=0)
            axes.plot(
                places,
                middle,
                color=colour,
                linestyle="-" if tensor == "g_y" else (0, (4, 1.5)),
                marker="o" if tensor == "g_y" else "s",
                markersize=3,
                linewidth=1.5,
                label=NAMES[tensor],
            )
        count = max((len(record["energy"]) for record in spectra), default=16)
        axes.axhline(1 / count, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
        axes.annotate(
            "white noise", (count - 1, 1 / count), xytext=(2, 3), textcoords="offset points", ha="right",
            fontsize=7.5, color=MUTED,
        )  # fmt: skip
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(base=10, numticks=5))
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
        axes.yaxis.set_minor_formatter("")
        axes.set_xticks(range(0, count, 3))
        axes.margins(x=0.02)
        axes.set_xlabel("sequency (sign changes in 16 tokens)")
        axes.set_ylabel("share of the energy")
        axes.legend(loc="lower left", frameon=False, fontsize=8, labelcolor="linecolor")
        return to_svg(figure, f"{title}: energy by sequency")
