"""Conversions that a script makes, with their reports."""

from __future__ import annotations

from typing import Any

from torch import nn

import hotrain
import hotrain.integrations.common


def noted(**override: Any) -> list[tuple[nn.Module, hotrain.ConversionReport]]:
    """Replace `hotrain.convert` in this process by one that notes what it does.

    Args:
        **override: arguments that each conversion gets in place of its own.

    Returns:
        A list that grows: models, alive until their report was read, and their reports.
    """
    made: list[tuple[nn.Module, hotrain.ConversionReport]] = []
    convert = hotrain.convert

    def note(model: nn.Module, *more: Any, **options: Any) -> hotrain.ConversionReport:
        made.append((model, convert(model, *more, **options | override)))
        return made[-1][1]

    hotrain.convert = hotrain.integrations.common.convert = note
    return made
