"""Peak memory against the time of a training step, one point per variant, as a self-contained SVG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from hotrain.plans import undominated
from hotrain.plotting.labels import Place, arrange, label_at
from hotrain.plotting.page import STYLE
from hotrain.plotting.style import LOOKS, MUTED, SECOND, css_variables, drawing, stand_in, to_svg
from hotrain.plotting.tradeoff import unit_of

Points = Mapping[str, Place]
"""Variant → (peak, ms/step)."""

WIDTH, HEIGHT = 4.8, 4.6  # inches
"""Narrow enough for its labels to be read on a phone, and as wide as the longest of them needs."""
PEAK = "peak memory of a training step (GiB)"
SLOWEST = 2.0
"""Times the fastest step: slower variants are drawn at the upper edge, with their time beside the name."""
OUTLIER = 1.25
"""Times the slowest point of a frontier but one: a slower one is drawn at the upper edge."""
LEAST_RANGE = 0.3
"""Of the fastest step's time: what the axis of times spans at least."""


def draw_frontier(rows: Sequence[Mapping[str, Any]]) -> str:
    """The text of an SVG file from `Frontier.rows`; points that ran out of memory are left out.

    Raises:
        ValueError: no point ran.
    """
    about = rows[0]
    ran = [row["point"] for row in rows if row["point"]["ms"] is not None and row["point"]["peak_bytes"] is not None]
    unit, name = unit_of(max((point["peak_bytes"] for point in ran), default=0))
    points = {point["name"]: (point["peak_bytes"] / unit, point["ms"]) for point in ran}
    title = f"{about['model']}, {about['device']}, {'compiled' if about['compile'] else 'eager'}"
    predicted = any(point["how"] == "predicted" for point in ran)
    across = f"peak memory of a training step ({name}{', predicted' if predicted else ''})"
    if any(point["method"] and point["recomputed"] for point in ran):
        across += "; +n/m: n of m blocks checkpointed"
    times = sorted(ms for _, ms in points.values())
    return draw_steps(points, title, across, OUTLIER * sum(times[-2:-1]) or None)


def draw_steps(points: Points, title: str, across: str = PEAK, ceiling: float | None = None) -> str:
    """The text of an SVG file, in light and dark.

    Args:
        points: at least one.
        across: label of the axis of peaks.
        ceiling: ms from which on variants are drawn at the upper edge; None: `SLOWEST` times the fastest.

    Raises:
        ValueError: there are no points.
    """
    if not points:
        raise ValueError(f"{title}: no variant was measured")
    ceiling = ceiling or SLOWEST * min(ms for _, ms in points.values())
    shown = {name: (gib, min(ms, ceiling)) for name, (gib, ms) in points.items()}
    with drawing(title, HEIGHT, WIDTH) as figure:
        axes = figure.subplots()
        front = [shown[name] for name in undominated(points)]
        axes.step(*zip(*front, strict=True), where="post", color=MUTED, linewidth=0.9, linestyle=(0, (3, 2)), zorder=1)
        labels = []
        for name, place in shown.items():
            slow = points[name][1] > ceiling
            colour, marker = _mark(name)
            axes.plot(*place, color=colour, marker="^" if slow else marker, markersize=5.5, markeredgewidth=0)
            text = f"{name}, {points[name][1]:.0f} ms" if slow else name
            labels.append(label_at(axes, text, place, colour))
        axes.set_xlim(0, 1.12 * max(gib for gib, _ in shown.values()))
        times = [ms for _, ms in shown.values()]
        lack = max(0.0, LEAST_RANGE * min(times) - max(times) + min(times)) / 2  # a percent must not look like a cliff
        low, high = min(times) - lack, max(times) + lack
        margin = 0.08 * (high - low)
        axes.set_ylim(low - 1.5 * margin, high + margin)
        axes.set_xlabel(across)
        axes.set_ylabel("ms/step")
        strokes: list[tuple[Place, Place]] = []
        for (x, y), (right, down) in pairwise(front):
            strokes += [((x, y), (right, y)), ((right, y), (right, down))]
        arrange(axes, labels, strokes)
        return alone(to_svg(figure, f"{title}: peak memory against step time of {', '.join(points)}"))


def _mark(variant: str) -> tuple[str, str]:
    """Colour and marker: of exact training, of hotrain, of others."""
    if variant.startswith("exact"):
        return stand_in(LOOKS["exact"]), "o"
    return (stand_in(LOOKS["hq8"]), "D") if variant.startswith("hotrain") else (SECOND, "s")


def alone(svg: str) -> str:
    """A figure for a page as a file: with its name space, and the page's colours and font."""
    colours = STYLE[: STYLE.index("*{")].replace("/*light*/", css_variables("light", svg))
    colours = colours.replace("/*dark*/", css_variables("dark", svg))
    font = "svg{background:var(--paper);font-family:system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif}"
    head, body = svg.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{colours.strip()}\n{font}</style>{body}\n'
