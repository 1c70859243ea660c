"""Bytes kept against accuracy, a point a method: what a reader wants to know first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hotrain.plotting.labels import Place, arrange, label_at
from hotrain.plotting.lines import Line
from hotrain.plotting.style import GRID, INK, MUTED, Look, drawing, stand_in, tag, to_svg

FALL = 10.0
"""Points below the best accuracy: methods that end further down are drawn at the lower edge, with their accuracy."""


def draw_tradeoff(lines: Sequence[Line], looks: Mapping[str, Look], names: Mapping[str, str], title: str) -> str:
    """SVG of one model's methods; those without an accuracy or bytes are left out.

    Where the noise is that of the test images it is a band around exact's accuracy; where it is that of the seeds, a
    bar at every point. Either way a method is within noise where band or bar reaches.

    Raises:
        ValueError: there is no point.
    """
    known = [
        (line, line.saved_bytes, line.accuracy)
        for line in lines
        if line.accuracy is not None and line.saved_bytes is not None
    ]
    if not known:
        raise ValueError(f"{title}: no method has both an accuracy and bytes kept")
    unit, name_of_unit = unit_of(max(size for _, size, _ in known))
    best = max(accuracy for _, _, accuracy in known)
    exact = next((accuracy for line, _, accuracy in known if line.method == "exact"), None)
    band = next((line.noise for line, _, _ in known if line.noise is not None and not line.by_seeds), None)
    with drawing(title, 3.4) as figure:
        axes = figure.subplots()
        if exact is not None:
            axes.axhline(exact, color=MUTED, linewidth=0.9, linestyle=(0, (3, 2)), zorder=1)
            if band is not None:
                axes.axhspan(exact - band, exact + band, color=GRID, alpha=0.55, linewidth=0, zorder=0)
        labels, lows, highs = [], [], []
        strokes: list[tuple[Place, Place]] = []
        for line, size, accuracy in known:
            style, far = looks[line.method], accuracy < best - FALL
            place = (size / unit, max(accuracy, best - FALL))
            (point,) = axes.plot(
                *place, color=stand_in(style), marker="v" if far else style.marker, markersize=6.5, markeredgewidth=0,
                zorder=3,
            )  # fmt: skip
            point.set_gid(tag(style))
            spread = line.noise if line.by_seeds and line.noise is not None and not far else 0.0
            lows.append(place[1] - spread)
            highs.append(place[1] + spread)
            if spread:
                axes.errorbar(*place, yerr=spread, color=stand_in(style), elinewidth=1, capsize=2.5, zorder=2)
                strokes.append(((place[0], lows[-1]), (place[0], highs[-1])))
            text = names[line.method] + (f", {accuracy:.1f} %" if far else "")
            weight = "bold" if names[line.method] != line.method else "normal"
            labels.append(label_at(axes, text, place, INK, fontweight=weight))
        if exact is not None and band is not None:
            lows.append(exact - band)
            highs.append(exact + band)
        axes.set_xlim(0, 1.14 * max(size for _, size, _ in known) / unit)
        margin = 0.12 * max(max(highs) - min(lows), 0.5)
        axes.set_ylim(min(lows) - margin, max(highs) + margin)
        axes.set_xlabel(f"{name_of_unit} kept for backward, one batch")
        axes.set_ylabel("test accuracy (%)")
        if exact is not None:
            strokes.append(((0, exact), (axes.get_xlim()[1], exact)))
        arrange(axes, labels, strokes)
        drawn = ", ".join(names[line.method] for line, _, _ in known)
        return to_svg(figure, f"{title}: bytes kept against test accuracy of {drawn}")


def unit_of(largest: float) -> tuple[int, str]:
    """The unit of an axis that goes up to so many bytes."""
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB") if largest >= 2**20 else (2**10, "KiB")
