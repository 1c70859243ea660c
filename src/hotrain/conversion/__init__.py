"""Model conversion: `convert` gives a model's layers the gradients of a method, `revert` undoes it."""

from .apply import FilterFn, convert
from .candidates import SMALLEST
from .report import ConversionReport, ConvertedRow, KeptRow, line_of
from .undo import converted_layers, revert

__all__ = [
    "SMALLEST", "ConversionReport", "ConvertedRow", "FilterFn", "KeptRow", "convert", "converted_layers", "line_of",
    "revert",
]  # fmt: skip
