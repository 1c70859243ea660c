"""Plain-text tables and units, shared by everything that prints itself."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence

GAP = "  "  # between columns
NAME = 16  # letters from which on a word may be broken behind . _ / : + and -
_PARTS = re.compile(r"[^._/:+\-]*[._/:+\-]+|[^._/:+\-]+")
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A text table, columns aligned: text to the left, numbers (also those of `bytes_text`) to the right.

    On a terminal, cells are broken between words, the longest texts first, until the table is as wide as the terminal.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(headers, *cells, strict=True))
    left = [not any(_is_number(cell) for cell in column[1:]) for column in columns]
    widths = [max(map(len, column)) for column in columns]
    if sys.stdout.isatty():  # elsewhere lines may have any length
        room = shutil.get_terminal_size().columns - len(GAP) * (len(columns) - 1)
        widths = _narrowed(widths, columns, left, room)

    def lines(row: Sequence[str]) -> str:
        broken = [_broken(cell, width) for cell, width in zip(row, widths, strict=True)]
        height = max(map(len, broken))
        filled = [part + [""] * (height - len(part)) for part in broken]
        return "\n".join(
            GAP.join(c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in zip(line, widths, left, strict=True))
            .rstrip()
            for line in zip(*filled, strict=True)
        )  # fmt: skip

    return "\n".join([lines(headers), lines(["─" * w for w in widths]), *map(lines, cells)])


def _narrowed(widths: Sequence[int], columns: Sequence[Sequence[str]], left: Sequence[bool], room: int) -> list[int]:
    """Widths that add up to `room`: headers over numbers shrink first, then texts, then numbers; words stay whole."""
    widths = list(widths)
    words = [max(len(word) for cell in column for word in _words(cell)) for column in columns]
    numbers = [max([least, *map(len, column[1:])]) for least, column in zip(words, columns, strict=True)]
    for texts, least in ((False, numbers), (True, words), (False, words)):
        while sum(widths) > room:
            over = [i for i, width in enumerate(widths) if left[i] is texts and width > least[i]]
            if not over:
                break
            widths[max(over, key=lambda i: widths[i])] -= 1
    return widths


def _words(cell: str) -> list[str]:
    """The parts that no line break falls into; a name's parts (``blocks.0.`` and ``mlp.``) where it is a long one."""
    return [part for word in cell.split(" ") for part in ([word] if len(word) <= NAME else _PARTS.findall(word))]


def _broken(cell: str, width: int) -> list[str]:
    """The cell in lines of at most `width`, or of its longest part."""
    lines = [""]
    for word in cell.split(" ") if len(cell) > width else [cell]:
        parts = [word] if len(word) <= width else _PARTS.findall(word)
        for number, part in enumerate(parts):
            space = " " if number == 0 and lines[-1] else ""
            if lines[-1] and len(lines[-1]) + len(space) + len(part) > width:
                lines.append(part)
            else:
                lines[-1] += space + part
    return lines


def bytes_text(count: int) -> str:
    """1536 → ``1.50 KiB``."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"


def parse_bytes(text: str | float) -> int:
    """Parse a size in bytes; a number is one already.

    Args:
        text: as ``24GB``, ``24GiB``, ``800 MB`` or ``1000``: powers of 1000, with an i of 1024.

    Raises:
        ValueError: it is no size, or a number below 1000 as text without its unit, which is meant otherwise.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    if isinstance(text, float) and text.is_integer():
        return int(text)
    if not isinstance(text, str):
        raise ValueError(f"got {text!r}, accepted are numbers of bytes and sizes as 24GB, 24GiB or 800MB")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    factor = {**_UNITS, **_BINARY}.get(match[2].lower()) if match else None
    if match is None or factor is None or (size := int(float(match[1]) * factor)) <= 0:
        raise ValueError(f"got {text!r}, accepted are sizes as 24GB, 24GiB or 800MB")
    if text.strip().isdigit() and size < 1000:
        raise ValueError(f"got {text!r}, which is {size} bytes; give a unit, as {size}GB")
    return size


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
