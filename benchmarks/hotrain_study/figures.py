"""The figures of studies: gaps to exact, errors over a training, what LQS chose, and a layer's |g_y|."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np

from hotrain.plotting.style import FIRST, GRID, INK, MUTED, SECOND, Look, drawing, looks, stand_in, tag, to_svg

CHOICES = {"token": FIRST, "tensor": SECOND}


def draw_gaps(
    gaps: Mapping[str, Sequence[float]], look_of: Mapping[str, Look], title: str, metric: str = "accuracy"
) -> str:
    """SVG of each method's gaps to exact: a mark a seed, the mean, and a bar of two standard errors."""
    with drawing(f"{title}: points above exact", 0.9 + 0.24 * len(gaps)) as figure:
        axes = figure.subplots()
        axes.axvline(0, color=MUTED, linewidth=0.9)
        for place, (method, values) in enumerate(gaps.items()):
            style = look_of[method]
            mean = fmean(values)
            axes.scatter(values, [place] * len(values), s=12, color=stand_in(style), alpha=0.5, linewidth=0)
            if len(values) > 1:
                error = 2 * stdev(values) / len(values) ** 0.5
                axes.hlines(place, mean - error, mean + error, color=stand_in(style), linewidth=1.6, gid=tag(style))
            axes.scatter([mean], [place], s=26, marker=style.marker, color=stand_in(style), linewidth=0, zorder=3)
        axes.set_yticks(range(len(gaps)), list(gaps), fontsize=8, color=INK)
        axes.set_ylim(len(gaps) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"{metric} minus exact's with the same seed (points)")
        return to_svg(figure, f"{title}: gap to exact of {', '.join(gaps)}")


def draw_errors(moments: Sequence[Mapping[str, Any]], path: str, title: str) -> str:
    """SVG of the median layer's relative error over the training, a line a method."""
    methods = list(moments[0]["methods"])
    look_of = looks(methods)
    with drawing(title, 2.7) as figure:
        axes = figure.subplots()
        for method in methods:
            points = []
            for moment in moments:
                errors = [layer[path][0] for layer in moment["methods"][method].values() if layer[path]]
                found = sorted(error for error in errors if error is not None)
                if found:
                    points.append((moment["update"], found[len(found) // 2]))
            if any(error for _, error in points):
                style = look_of[method]
                axes.plot(
                    *zip(*points, strict=True), color=stand_in(style), linestyle=style.dash, marker=style.marker,
                    markersize=3, linewidth=style.width, label=method, gid=tag(style),
                )  # fmt: skip
        axes.set_yscale("log")
        axes.set_xlabel("updates of exact training")
        axes.set_ylabel("relative error, median layer")
        figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=8, labelcolor="linecolor")
        return to_svg(figure, f"{title} over the training for {', '.join(methods)}")


def draw_surface(surface: dict[str, Any], title: str) -> str:
    """SVG of |g_y| over tokens (rows of ``surface["values"]``) × channels, scaled to its largest entry."""
    values = np.asarray(surface["values"], dtype=float)
    if values.ndim != 2 or min(values.shape) < 2:
        raise ValueError(f"{surface['layer']}: a surface needs tokens × channels of at least 2 × 2, got {values.shape}")
    shares = values / max(values.max(), np.finfo(float).tiny)
    with drawing(title, 3.0) as figure:
        figure.set_dpi(220)
        axes = figure.subplots()
        image = axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.grid(visible=False)
        axes.set_xlabel("channel")
        axes.set_ylabel("token")
        bar = figure.colorbar(image, ax=axes, ticks=[0, 0.5, 1], pad=0.02, fraction=0.05)
        bar.outline.set_visible(False)  # type: ignore[operator]
        bar.set_label("|g_y| / largest")
        bar.solids.set_rasterized(True)  # type: ignore[union-attr]
        return to_svg(figure, f"{title}: absolute output gradient of {surface['layer']} over tokens and channels")


def draw_choices(layers: Sequence[dict[str, Any]], threshold: float, title: str) -> str:
    """SVG of every layer's error ratio; left of ``threshold`` LQS chooses per-token scales."""
    with drawing(title, 0.85 + 0.155 * len(layers)) as figure:
        axes = figure.subplots()
        ratios = [layer["ratio"] for layer in layers]
        places = range(len(layers))
        axes.axvline(threshold, color=MUTED, linewidth=0.9, linestyle=(0, (3, 2)))
        axes.hlines(places, threshold, ratios, color=GRID, linewidth=1.2)
        for choice, marker in (("token", "o"), ("tensor", "D")):
            chosen = [place for place in places if layers[place]["choice"] == choice]
            axes.scatter(
                [ratios[place] for place in chosen], chosen, s=20, marker=marker, color=CHOICES[choice],
                linewidth=0, zorder=3,
            )  # fmt: skip
        axes.set_yticks(places, [layer["layer"] for layer in layers], fontsize=7.5)
        axes.set_ylim(len(layers) - 0.4, -0.6)
        axes.set_xlim(0, max(1.05, *(ratio * 1.05 for ratio in ratios)))
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("error ratio, token ÷ tensor")
        return to_svg(figure, f"{title}: LQS error ratio of {len(layers)} layers against threshold {threshold}")
