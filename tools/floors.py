"""The table of floors: what the hardware allows a training step at most, exact and with the default's arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import records

PACKED = 0.25  # bytes that the default keeps at least of one in bf16: 4 bits


@dataclass(frozen=True)
class Floor:
    """ms that a step takes at least.

    products, between: exact's.  optimizer: of both.  exact, default: of the step.
    """

    products: float
    between: float
    optimizer: float
    exact: float
    default: float


def floor(row: dict[str, Any], roofs: records.Roofs) -> Floor:
    """Of a record of ``hotrain bench floors``, at the roofs of a GPU."""

    def product(operations: float, nbytes: float, rate: float) -> float:
        return max(operations / rate, nbytes / roofs.copy)

    products = sum(count * product(each, nbytes, roofs.bf16) for each, nbytes, count in row["products"])
    between = (row["forward_bytes"] + row["backward_bytes"]) / roofs.copy
    optimizer = row["optimizer_bytes"] / roofs.copy
    gained = 0.0
    for t, o, i, count in row["layers"]:
        once = 2.0 * t * o * i
        exact = 2 * product(once, 2 * (t * o + t * i + o * i), roofs.bf16)
        codes = product(once, t * o + o * i + 2 * t * i, roofs.fp8) + product(
            once, t * o + t * i + 2 * o * i, roofs.fp8
        )
        packing = (4 * t * o + 3 * t * i + 3 * o * i) / roofs.copy  # g_y to two codes, x to one, w to one
        gained += count * max(0.0, exact - codes - packing)
    gained += (1 - 2 * PACKED) * row["saved_bytes"] / roofs.copy
    whole = products + between + optimizer
    return Floor(*(us / 1e3 for us in (products, between, optimizer, whole, whole - gained)))


def table() -> str:
    """Models by the ratio of their floors, with the latest run that timed both and what was asked for."""
    measured = records.roofs()
    rows = {row["subject"]: row for row in records._of_bench("floors")}
    if measured is None or not rows:
        return records._none_yet("floors")
    where, roofs = measured
    lines = []
    for target in records.STEP_TARGETS:
        row, times = rows.get(target.subject), target.times()
        if row is None or times is None or target.variant != records.models.HOTRAIN:
            continue
        (base, ms), found = times, floor(row, roofs)
        parts = (found.products, found.between, found.optimizer, found.exact)
        cells = [target.subject, *(f"{part:.1f}" for part in parts), f"{base:.1f}", f"{found.exact / base:.0%}"]
        cells += [f"{found.default:.1f}", f"{ms:.1f}", f"{found.default / ms:.0%}"]
        cells += [f"{found.default / found.exact:.2f}", target.time.asked()[0], f"{ms / base:.2f}"]
        lines.append(cells)
    headers = ["model", "products", "between", "optimizer", "exact: floor", "measured", "share"]
    headers += ["default: floor", "measured", "share", "ratio of floors", "asked", "reached"]
    about = (
        f"ms. Roofs, measured on {records._place(where)}: a copy {roofs.copy / 1e6:.2f} TB/s, products "
        f"{roofs.bf16 / 1e6:.0f} TFLOP/s in bf16 and {roofs.fp8 / 1e6:.0f} in fp8, of the fastest layers of "
        "[kernels.md](kernels.md)."
    )
    counted = records._conditions(next(iter(rows.values())))
    return "\n\n".join((about, records._markdown(headers, lines), f"Counted by {counted}"))
