"""One line per model and method from the rows of all seeds: the table, on the terminal and in the page.

The noise of a gap is two standard errors. From `PAIRS` seeds on it is of the gaps paired by seed; fewer say little of
their own spread, and it is the binomial one of exact's accuracy on the test images. It is never less than one image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from hotrain import tables

PAIRS = 3
"""Seeds from which on their gaps estimate the noise."""


@dataclass(frozen=True)
class Line:
    """Means over the seeds of one model and method.

    ``accuracy`` in percent, ``spread`` its sample standard deviation (None for one seed), ``gap`` the mean
    difference to exact paired by seed in points (None for exact itself or without it), ``noise`` that of the gap in
    points (None without a gap, or with fewer than `PAIRS` pairs of seeds and an unknown number of test images),
    ``paired`` the seeds that the gap is of, ``saved_bytes`` and ``bit_ops`` of one batch, ``step_ms`` the median over
    the seeds. ``*_ratio`` divides by exact.
    ``failed`` counts seeds without an accuracy. None is what was not measured.
    """

    model: str
    method: str
    seeds: int
    failed: int
    accuracy: float | None
    spread: float | None
    gap: float | None
    noise: float | None
    paired: int
    saved_bytes: float | None
    bit_ops: float | None
    step_ms: float | None
    saved_ratio: float | None
    bit_ops_ratio: float | None
    step_ratio: float | None

    @property
    def within_noise(self) -> bool | None:
        """Is the gap no larger than its noise? None where one of them is not known."""
        return None if self.gap is None or self.noise is None else abs(self.gap) <= self.noise

    @property
    def by_seeds(self) -> bool:
        """Is the noise that of the seeds? Else it is that of the test images."""
        return self.paired >= PAIRS


def summarize(rows: Sequence[dict[str, Any]], test_images: Mapping[str, int] | None = None) -> list[Line]:
    """The lines of ``rows`` in their order of first appearance.

    Args:
        rows: one per model, method and seed.
        test_images: model → images that its accuracies are counted on.
    """
    images = test_images or {}
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["method"]), []).append(row)
    return [
        _line(model, method, runs, groups.get((model, "exact"), []), images.get(model))
        for (model, method), runs in groups.items()
    ]


def standing(table: Sequence[Line], label: Callable[[str], str]) -> str:
    """Which methods end further from exact than the noise, in a sentence; empty where no gap has one."""
    if not any(line.noise is not None for line in table):
        return ""
    beyond: dict[str, list[str]] = {}
    for line in table:
        if line.within_noise is False:
            beyond.setdefault(label(line.model), []).append(line.method)
    if not beyond:
        return "No method's accuracy differs from exact's by more than the noise. These runs do not rank them."
    named = "; ".join(f"{model}: {', '.join(methods)}" for model, methods in beyond.items())
    others = any(line.within_noise for line in table)
    return f"Further from exact's accuracy than the noise – {named}." + (
        " The others are not ranked." if others else ""
    )


def _noise(pairs: Sequence[float], exact: Sequence[float], images: int | None) -> float | None:
    """Two standard errors of the mean of ``pairs``, gaps in points to accuracies ``exact`` in percent."""
    one_image = 100 / images if images else 0.0
    if len(pairs) >= PAIRS:
        return max(2 * stdev(pairs) / len(pairs) ** 0.5, one_image)
    if not pairs or not images:
        return None
    share = fmean(exact) / 100
    return max(2 * 100 * (share * (1 - share) / images) ** 0.5, one_image)


def _line(model: str, method: str, runs: list[dict[str, Any]], exact: list[dict[str, Any]], images: int | None) -> Line:
    accuracies = _known(runs, "accuracy")
    exact_by_seed = {row["seed"]: row["accuracy"] for row in exact if row["accuracy"] is not None}
    both = [row for row in runs if row["accuracy"] is not None and row["seed"] in exact_by_seed]
    pairs = [row["accuracy"] - exact_by_seed[row["seed"]] for row in both if method != "exact"]
    saved, ops, step = (_middle(runs, field) for field in ("saved_bytes", "bit_ops", "step_ms"))
    return Line(
        model=model,
        method=method,
        seeds=len(runs),
        failed=len(runs) - len(accuracies),
        accuracy=fmean(accuracies) if accuracies else None,
        spread=stdev(accuracies) if len(accuracies) > 1 else None,
        gap=fmean(pairs) if pairs else None,
        noise=_noise(pairs, [exact_by_seed[row["seed"]] for row in both], images),
        paired=len(pairs),
        saved_bytes=saved,
        bit_ops=ops,
        step_ms=step,
        saved_ratio=_ratio(saved, _middle(exact, "saved_bytes")),
        bit_ops_ratio=_ratio(ops, _middle(exact, "bit_ops")),
        step_ratio=_ratio(step, _middle(exact, "step_ms")),
    )


def _known(rows: Sequence[dict[str, Any]], field: str) -> list[float]:
    return [float(row[field]) for row in rows if row[field] is not None]


def _middle(rows: Sequence[dict[str, Any]], field: str) -> float | None:
    values = _known(rows, field)
    return median(values) if values else None


def _ratio(value: float | None, exact: float | None) -> float | None:
    return value / exact if value is not None and exact else None


def bytes_text(value: float | None) -> str:
    """``1.25 MiB``; ``–`` when not measured."""
    return "–" if value is None else tables.bytes_text(round(value))


def operations_text(value: float | None) -> str:
    """``17.300 T`` bit operations; ``–`` when not measured."""
    return "–" if value is None else tables.count_text(value)


def milliseconds_text(value: float | None) -> str:
    """``31.4 ms``; ``–`` when not measured."""
    return "–" if value is None else f"{value:.1f} ms"


def signed_text(value: float | None) -> str:
    """``+0.28`` or ``−0.56`` with a true minus; empty when there is nothing to compare with."""
    return "" if value is None else f"{value:+.2f}".replace("-", "−")


def gap_text(line: Line) -> str:
    """``−0.56 ± 1.36, within noise``; without the noise where it is not known; empty where there is no gap."""
    if line.noise is None:
        return signed_text(line.gap)
    return f"{signed_text(line.gap)} ± {line.noise:.2f}" + (", within noise" if line.within_noise else "")


def ratio_text(value: float | None) -> str:
    """``0.31 ×``; empty when there is nothing to divide by."""
    return "" if value is None else f"{value:.2f} ×"
