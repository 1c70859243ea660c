"""The tensors that a converted model still saves in full precision between forward and backward, with the reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..audit.saved_bytes import CHECKPOINT, WEIGHT_COPY, SavedBytes
from ..compress.rules import SMALL
from ..conversion import ConversionReport
from ..tables import bytes_text, table

SHARE = 0.01  # of the total, under which an operator is not worth a line
NO_FORM = "no compressed form"
LAYERS_ALONE = "memory=linear compresses the inputs of layers alone"

# An operator of PyTorch's → the function under which the report names those that it left full, in the words of both.
_NAMES = {
    "convolution": "conv2d",
    "scaled_dot_product": "scaled_dot_product_attention",
    "leaky_relu": "leaky_relu",
    "max_pool2d_with_indices": "max_pool2d",
}


@dataclass(frozen=True)
class FullRow:
    """Floating-point storages of one operator that are kept for one reason.

    Attributes:
        operator: that saves them.
        reason: why they are not compressed.
        bytes: of all of them.
        share: of all bytes saved.
        modules: that call the operator, in order.
    """

    operator: str
    reason: str
    bytes: int
    share: float
    modules: list[str]


def still_full(audit: SavedBytes, report: ConversionReport | None = None) -> list[FullRow]:
    """The operators that keep floating-point tensors of more than `SHARE` of the audit's total, largest first.

    Reasons are taken from the report of the conversion where it has them.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in audit.rows:
        if "float" in row["dtype"] and "float8" not in row["dtype"]:
            groups.setdefault((row["operator"], _reason(row, report)), []).append(row)
    found = []
    for (operator, reason), rows in groups.items():
        size = sum(row["bytes"] for row in rows)
        if size > SHARE * audit.total:
            modules = list(dict.fromkeys(row["module"] for row in rows))
            found.append(FullRow(operator, reason, size, size / audit.total, modules))
    return sorted(found, key=lambda row: -row.bytes)


def full_table(rows: Sequence[FullRow]) -> str:
    """The rows as text."""
    if not rows:
        return f"nothing of more than {SHARE:.0%} stays in full precision"
    cells = [[r.operator, bytes_text(r.bytes), f"{r.share:.1%}", _where(r.modules), r.reason] for r in rows]
    return table(["stays full precision", "bytes", "share", "where", "why"], cells)


def _where(modules: Sequence[str]) -> str:
    first = modules[0] or "(the model itself)"
    return first if len(modules) == 1 else f"{first} and {len(modules) - 1} more"


def _reason(row: dict[str, Any], report: ConversionReport | None) -> str:
    if row["input"]:
        return "the batch itself"
    if row["operator"] == WEIGHT_COPY:
        return "does not grow with the batch"
    if row["operator"] == CHECKPOINT:
        return "from it the block is recomputed"
    if row["operator"].startswith("hotrain "):
        return "scales and statistics of its codes, or too small"
    otherwise = LAYERS_ALONE if report is not None and report.buffers is None else NO_FORM
    return next(_reported(row, report), otherwise)


def _reported(row: dict[str, Any], report: ConversionReport | None) -> Iterator[str]:
    if report is not None:
        yield from (f"its layer stays exact: {kept.reason}" for kept in report.kept if kept.name == row["module"])
        if report.buffers is not None:
            for start, name in _NAMES.items():
                if row["operator"].startswith(start) and name in report.buffers.full:
                    yield report.buffers.full[name]
    if math.prod(row["shape"]) < SMALL:
        yield f"fewer than {SMALL} entries"
