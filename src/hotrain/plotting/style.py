"""One look for every figure: a colour a method, light and dark, and the step from matplotlib to inline SVG.

Figures are drawn in stand-in colours; `to_svg` replaces each by a CSS variable of the page, so that the same
picture follows the reader's light or dark mode. Colours are Okabe and Ito's colour-blind-safe set, darkened
on white and lightened on black for contrast; line styles differ too, so colour is never the only sign.
"""

from __future__ import annotations

import hashlib
import io
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

INK, MUTED, GRID, FIRST, SECOND = "#010101", "#010102", "#010103", "#010104", "#010105"
"""Stand-ins: text, secondary text, grid lines, and two colours for pairs that are no methods."""

_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", FIRST: "first", SECOND: "second"}


@dataclass(frozen=True)
class Look:
    """How a method is drawn: its colour on white and on black, dash pattern, line width in points."""

    light: str
    dark: str
    dash: str | tuple[float, tuple[float, ...]] = "-"
    width: float = 1.3


LOOKS: dict[str, Look] = {
    "exact": Look("#1b1d21", "#f2f3f5", "-", 2.0),
    "hot-unbiased": Look("#0069b4", "#4ea8ff", "-", 2.0),
    "hot": Look("#d0510a", "#ff8c42", (0, (5, 1.5))),
    "hla": Look("#b98100", "#f2b632", (0, (3, 1.2))),
    "lbp-wht": Look("#00835f", "#2fc79a", (0, (5, 1.2, 1, 1.2))),
    "luq": Look("#b0508a", "#eb9ccb", (0, (1.2, 1.2))),
    "int4": Look("#3d9ad1", "#97d7ff", (0, (3, 1, 1, 1, 1, 1))),
    "hq": Look("#7d6432", "#cfae6a", (0, (7, 2))),
    "hq4": Look("#6750a4", "#b3a1ee", (0, (2, 1))),
    "dropout": Look("#7b7f87", "#9ba0a8", (0, (1, 2))),
}
OTHER = Look("#7b7f87", "#9ba0a8", (0, (1, 2)))
"""A method outside the presets (an override such as ``hot-unbiased(rank=4)``)."""


def look(method: str) -> Look:
    """The look of ``method``, or of the preset whose name it starts with."""
    return LOOKS.get(css_name(method), OTHER)


def css_name(method: str) -> str:
    """The class and variable name of ``method``: its preset's name, or ``other``."""
    preset = re.split(r"[^a-z0-9-]", method, maxsplit=1)[0]
    return preset if preset in LOOKS else "other"


def stand_in(method: str) -> str:
    """The colour to hand to matplotlib for ``method``; `to_svg` makes it the page's variable."""
    names = [*LOOKS, "other"]
    return f"#0102{names.index(css_name(method)):02x}"


def css_variables(mode: str) -> str:
    """``--m-exact:#…;…`` for ``mode`` ``light`` or ``dark``."""
    return "".join(f"--m-{name}:{getattr(value, mode)};" for name, value in {**LOOKS, "other": OTHER}.items())


RC: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: selectable, and set in the page's own font
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}

WIDTH_INCHES = 4.3
"""Width of one panel: narrow enough to be read on a phone at full width, two fit side by side on a desk."""


def drawing(**more: Any) -> AbstractContextManager[None]:
    """The context in which every figure is drawn: matplotlib's settings, put back afterwards."""
    settings: Any = {**RC, **more}  # matplotlib types its settings as 300 literal names
    return matplotlib.rc_context(settings)


def new_figure(title: str, height_inches: float) -> Figure:
    """A figure of one panel's width with its title flush left. Call inside `drawing`."""
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    figure.suptitle(title, x=0.005, ha="left", fontsize=10, fontweight="bold", color=INK)
    return figure


def to_svg(figure: Figure, description: str) -> str:
    """``figure`` as an ``<svg>`` element for an HTML page; ``description`` is what a screen reader says.

    Groups named ``method NAME`` by `tag` carry the classes ``curve`` and NAME. Same figure, same text.
    """
    # ids of clip paths are hashed with the salt: two figures on one page must not share them
    salt = hashlib.sha256(description.encode()).hexdigest()
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        FigureCanvasSVG(figure).print_svg(stream, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    head, body = text.split(">", 1)
    box = re.search(r'viewBox="([^"]*)"', head)
    assert box is not None  # matplotlib always writes one
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href", "href")
    body = re.sub(r'id="method ([a-z0-9-]+)"', r'class="curve \1"', body)
    body = re.sub(r'<g id="[^"]*"', "<g", body)  # names nothing refers to, repeated in every figure
    body = re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font-size: \1px", body)
    body = re.sub(r"font: (bold|600|700) ([0-9.]+)px [^;\"]*", r"font-weight: 600; font-size: \2px", body)
    for colour, name in {**_VARIABLES, **{stand_in(m): f"m-{m}" for m in [*LOOKS, "other"]}}.items():
        body = body.replace(colour, f"var(--{name})")
    label = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'<svg class="figure" viewBox="{box.group(1)}" role="img" aria-label="{label}">{body.strip()}'


def tag(method: str) -> str:
    """The group id that `to_svg` turns into CSS classes, for matplotlib's ``set_gid``."""
    return f"method {css_name(method)}"
