"""The style of all figures: one colour per method, light and dark, and the conversion to inline SVG.

Figures are drawn in stand-in colours; `to_svg` replaces each by a CSS variable of the page, so that the same
picture follows the reader's light or dark mode. Colours are Okabe and Ito's colour-blind-safe set, darkened
on white and lightened on black for contrast; line styles differ too, so colour is never the only sign.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
    """How a method is drawn.

    Attributes:
        name: its CSS class; its colour is the variable ``--m-NAME``.
        light, dark: the colour on white and on black.
        dash: matplotlib's line style.
        marker: matplotlib's marker of a point.
        width: of a line, in points.
    """

    name: str
    light: str
    dark: str
    dash: str | tuple[float, tuple[float, ...]] = "-"
    marker: str = "o"
    width: float = 1.3


_OF_PRESETS = (
    Look("exact", "#1b1d21", "#f2f3f5", "-", "o", 2.0),
    Look("hq8", "#0069b4", "#4ea8ff", "-", "D", 2.0),
    Look("hot-unbiased", "#7a3fb0", "#c58ff5", (0, (6, 1.2)), "s"),
    Look("hot-importance", "#c2185b", "#ff7bac", (0, (4, 1)), "*"),
    Look("hot", "#d0510a", "#ff8c42", (0, (5, 1.5)), "^"),
    Look("hla", "#b98100", "#f2b632", (0, (3, 1.2)), "v"),
    Look("lbp-wht", "#00835f", "#2fc79a", (0, (5, 1.2, 1, 1.2)), "P"),
    Look("luq", "#b0508a", "#eb9ccb", (0, (1.2, 1.2)), "X"),
    Look("int4", "#3d9ad1", "#97d7ff", (0, (3, 1, 1, 1, 1, 1)), "p"),
    Look("hq", "#7d6432", "#cfae6a", (0, (7, 2)), "<"),
    Look("hq4", "#5c7a1f", "#a9c95a", (0, (2, 1)), ">"),
    Look("dropout", "#7b7f87", "#9ba0a8", (0, (1, 2)), "h"),
)
_SPARE = (
    Look("variant-1", "#4b5f8a", "#a3b4dc", (0, (4, 1, 2, 1)), "d"),
    Look("variant-2", "#a3423f", "#f0908c", (0, (6, 2, 1, 2)), "8"),
    Look("variant-3", "#2d7d86", "#74cfd8", (0, (2, 2)), "H"),
    Look("variant-4", "#8a6d8f", "#d5b3da", (0, (1, 1, 3, 1)), "*"),
    Look("variant-5", "#6f7b3c", "#c6d283", (0, (8, 2)), "d"),
    Look("variant-6", "#94582a", "#e0a878", (0, (4, 3)), "8"),
)
"""For methods that are no preset: one with overrides (``hot:rank=4``) or of the user's own."""

LOOKS = {style.name: style for style in (*_OF_PRESETS, *_SPARE)}


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """The look of every method of one page: a preset's own, and for any other the next spare one.

    With more than six methods that are no presets, spare looks repeat.
    """
    spare = itertools.cycle(_SPARE)
    presets = {style.name: style for style in _OF_PRESETS}
    return {method: presets.get(method) or next(spare) for method in dict.fromkeys(methods)}


SERIES = (
    ("#0072b2", "#56a8e0"),
    ("#d5720a", "#f2a04a"),
    ("#009e73", "#3fcfa4"),
    ("#cc79a7", "#e6a3c8"),
    ("#d9b310", "#f0d860"),
    ("#6b5fb0", "#a79df0"),
    ("#8c4a2f", "#cf8f70"),
    ("#9aa0a8", "#6d737c"),
)
"""Colours on white and on black for the parts of a whole, in their order; the last is for the rest."""


def stand_in(style: Look) -> str:
    """The colour of ``style`` for matplotlib; `to_svg` replaces it by the page's variable."""
    return f"#0102{list(LOOKS).index(style.name):02x}"


def part(index: int) -> str:
    """The colour of the part ``index`` of a whole for matplotlib, -1 for the rest."""
    return f"#0103{index % len(SERIES):02x}"


def css_variables(mode: str, used: str | None = None) -> str:
    """``--m-exact:#…;…`` for ``mode`` ``light`` or ``dark``: the colours of methods and of parts.

    Of a text ``used`` only the variables that it refers to.
    """
    colours = {f"--m-{name}": getattr(style, mode) for name, style in LOOKS.items()}
    colours |= {f"--s-{index}": pair[mode == "dark"] for index, pair in enumerate(SERIES)}
    return "".join(f"{name}:{colour};" for name, colour in colours.items() if used is None or f"({name})" in used)


RC: Any = {  # matplotlib types its settings as 300 literal names
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


@contextmanager
def drawing(title: str, height: float, width: float = WIDTH_INCHES) -> Iterator[Figure]:
    """A figure with its title flush left, sizes in inches, and the context in which it is drawn, up to `to_svg`:
    matplotlib's settings, put back afterwards."""
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.suptitle(title, x=0.005, ha="left", fontsize=10, fontweight="bold", color=INK)
        yield figure


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
    methods = {stand_in(style): f"m-{name}" for name, style in LOOKS.items()}
    parts = {part(index): f"s-{index}" for index in range(len(SERIES))}
    for colour, name in {**_VARIABLES, **methods, **parts}.items():
        body = body.replace(colour, f"var(--{name})")
    label = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'<svg class="figure" viewBox="{box.group(1)}" role="img" aria-label="{label}">{body.strip()}'


def tag(style: Look) -> str:
    """The group id that `to_svg` turns into CSS classes, for matplotlib's ``set_gid``."""
    return f"method {style.name}"
