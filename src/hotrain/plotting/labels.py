"""Names beside the points of a figure, where they cover least."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import Bbox

SLIVER = 0.02
"""Of a label: so much may be covered before it goes to a place that is less plainly its mark's."""
_PLACES = (
    *((6, 0), (-6, 0), (0, 8), (0, -8), (6, 8), (6, -8), (-6, 8), (-6, -8)),
    *((6, 17), (6, -17), (-6, 17), (-6, -17), (0, 17), (0, -17), (6, 26), (6, -26), (-6, 26), (-6, -26)),
)
"""Where a label may stand, in points from its mark; earlier places are better."""


def arrange(
    axes: Axes, labels: Sequence[Text], places: Sequence[tuple[float, float]], taken: Iterable[Bbox] = ()
) -> None:
    """Put each label beside its mark, where it covers least of what is there: marks, other labels, ``taken``.

    The figure must have a layout already (``draw_without_rendering``).

    Args:
        labels: annotations at ``places``.
        places: in data coordinates.
        taken: boxes in pixels.
    """
    boxes = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in axes.transData.transform(places)]
    boxes += taken
    inside = axes.get_window_extent()
    for label in labels:

        def cost(offset: tuple[int, int], label: Text = label) -> float:
            _put(label, offset)
            box = label.get_window_extent()
            covered = sum(_area(Bbox.intersection(box, other)) for other in boxes)
            outside = _area(box) - _area(Bbox.intersection(box, inside))
            return max(0.0, covered + outside - SLIVER * _area(box))

        _put(label, min(_PLACES, key=cost))
        boxes.append(label.get_window_extent().padded(1))


def _put(label: Text, offset: tuple[int, int]) -> None:
    right, up = offset
    across = "center" if not right else "left" if right > 0 else "right"
    label.set(position=offset, ha=across, va="center" if right else "bottom" if up > 0 else "top")


def _area(box: Bbox | None) -> float:
    return 0.0 if box is None else box.width * box.height
