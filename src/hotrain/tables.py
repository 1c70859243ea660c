"""Plain-text tables and units, shared by everything that prints itself."""

from __future__ import annotations

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows under headers, columns aligned: text to the left, numbers (and what `units` wrote) to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(headers, *cells, strict=True)]
    left = [all(not _is_number(row[i]) for row in cells) for i in range(len(headers))]

    def line(row: Sequence[str]) -> str:
        parts = [c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in zip(row, widths, left, strict=True)]
        return "  ".join(parts).rstrip()

    return "\n".join([line(headers), line(["─" * w for w in widths]), *map(line, cells)])


def bytes_text(count: int) -> str:
    """1536 → ``1.50 KiB``."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"


def count_text(count: float) -> str:
    """1.5e9 → ``1.500 G``."""
    size, unit = float(count), ""
    for larger in ("k", "M", "G", "T", "P"):
        if abs(size) < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.3f} {unit}" if unit else f"{count:.0f}"


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell[:1] in "-−+." or cell == "–"
