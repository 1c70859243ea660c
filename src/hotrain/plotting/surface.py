"""A layer's |g_y| by token and channel, and what LQS chose for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hotrain.plotting.style import FIRST, GRID, MUTED, SECOND, drawing, new_figure, to_svg

CHOICES = {"token": FIRST, "tensor": SECOND}


def draw_surface(surface: dict[str, Any], title: str) -> str:
    """SVG of |g_y| over tokens (rows of ``surface["values"]``) × channels, scaled to its largest entry."""
    values = np.asarray(surface["values"], dtype=float)
    if values.ndim != 2 or min(values.shape) < 2:
        raise ValueError(f"{surface['layer']}: a surface needs tokens × channels of at least 2 × 2, got {values.shape}")
    shares = values / max(values.max(), np.finfo(float).tiny)
    with drawing():
        figure = new_figure(title, 3.0)
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
    with drawing():
        figure = new_figure(title, 0.85 + 0.155 * len(layers))
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
