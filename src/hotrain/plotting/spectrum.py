"""Energy by sequency along the tokens: how much of it do the first rows of a low-pass hold?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import Any

from hotrain.plotting.style import FIRST, MUTED, SECOND, drawing, to_svg

SHADES = {"g_y": FIRST, "x": SECOND}
NAMES = {"g_y": "output gradient g_y", "x": "input x"}


def kept(spectra: Sequence[dict[str, Any]], tensor: str) -> list[list[float]]:
    """For every layer the share of ``tensor``'s energy in its lowest sequencies: of 1, 2, … of them."""
    return [list(accumulate(record["energy"])) for record in spectra if record["tensor"] == tensor]


def median_kept(spectra: Sequence[dict[str, Any]], tensor: str) -> list[float]:
    """`kept` of the median layer; empty without records of ``tensor``."""
    return [median(values) for values in zip(*kept(spectra, tensor), strict=True)]


def draw_spectrum(spectra: Sequence[dict[str, Any]], title: str) -> str:
    """SVG of the energy that the r lowest sequencies hold: the median layer a line, lowest to highest a band."""
    with drawing(title, 3.0) as figure:
        axes = figure.subplots()
        count = max((len(record["energy"]) for record in spectra), default=16)
        ranks = range(1, count + 1)
        for tensor, colour in SHADES.items():
            layers = kept(spectra, tensor)
            if not layers:
                continue
            low, high = ([100 * pick(values) for values in zip(*layers, strict=True)] for pick in (min, max))
            axes.fill_between(ranks, low, high, color=colour, alpha=0.16, linewidth=0)
            axes.plot(
                ranks,
                [100 * share for share in median_kept(spectra, tensor)],
                color=colour,
                linestyle="-" if tensor == "g_y" else (0, (4, 1.5)),
                marker="o" if tensor == "g_y" else "s",
                markersize=3,
                linewidth=1.5,
                label=NAMES[tensor],
            )
        noise = [100 * rank / count for rank in ranks]
        axes.plot(ranks, noise, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)), label="white noise")
        axes.set_xlim(0.6, count + 0.4)
        axes.set_ylim(0, 103)
        axes.set_xticks([1, *range(4, count + 1, 4)])
        axes.yaxis.set_major_formatter("{x:g} %")
        axes.set_xlabel(f"lowest sequencies, of {count}")
        axes.set_ylabel("energy they hold")
        figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8, labelcolor="linecolor")
        return to_svg(figure, f"{title}: energy of the lowest sequencies")
