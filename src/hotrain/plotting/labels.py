"""Names beside the points of a figure, where they cover least."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

Place = tuple[float, float]
"""In data coordinates."""
SLIVER = 0.02
"""Of a label: so much may be covered before it goes to a place that is less plainly its mark's."""
_PLACES = (
    *((6, 0), (-6, 0), (0, 8), (0, -8), (6, 8), (6, -8), (-6, 8), (-6, -8)),
    *((6, 17), (6, -17), (-6, 17), (-6, -17), (0, 17), (0, -17), (6, 26), (6, -26), (-6, 26), (-6, -26)),
)
"""Where a label may stand, in points from its mark; earlier places are better."""


def label_at(axes: Axes, text: str, place: Place, color: str, **style: Any) -> Annotation:
    """A label of the mark at ``place``, for `arrange`."""
    return axes.annotate(text, place, (0, 0), textcoords="offset points", fontsize=7.5, color=color, **style)


def arrange(
    axes: Axes, labels: Sequence[Annotation], strokes: Iterable[tuple[Place, Place]] = (), half: float = 2
) -> None:
    """Put each label beside its mark, where it covers least of what is there: marks, other labels, strokes.

    Called last: it lays the figure out, to know places on the page.

    Args:
        strokes: both ends of horizontal and vertical lines.
        half: their width to either side, in pixels.
    """
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    boxes = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in axes.transData.transform([each.xy for each in labels])]
    for stroke in strokes:
        (left, bottom), (right, top) = sorted(map(tuple, axes.transData.transform(stroke)))
        across, up = (half, 0) if left == right else (0, half)
        boxes.append(Bbox.from_extents(left - across, bottom - up, right + across, top + up))
    inside = axes.get_window_extent()
    for each in labels:

        def cost(offset: tuple[int, int], label: Annotation = each) -> float:
            _put(label, offset)
            box = label.get_window_extent()
            covered = sum(_area(Bbox.intersection(box, other)) for other in boxes)
            outside = _area(box) - _area(Bbox.intersection(box, inside))
            return max(0.0, covered + outside - SLIVER * _area(box))

        _put(each, min(_PLACES, key=cost))
        boxes.append(each.get_window_extent().padded(1))


def _put(label: Annotation, offset: tuple[int, int]) -> None:
    right, up = offset
    across = "center" if not right else "left" if right > 0 else "right"
    label.set(position=offset, ha=across, va="center" if right else "bottom" if up > 0 else "top")


def _area(box: Bbox | None) -> float:
    return 0.0 if box is None else box.width * box.height
