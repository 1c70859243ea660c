"""Views: the origin of a tensor is that of its views as well, so that the layer behind a reshape can share codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import rematerialize
from ..sharing import Unfinished
from .base import Handlers, Scope


def _transposed(scope: Scope, input: Tensor, *axes: Any, **kwargs: Any) -> Tensor | None:
    """A handler of `transpose` and `permute` of attention's result."""
    known = scope.origins.of(input, by_heads=True)
    if known is None or kwargs:
        return None
    order = axes[0] if len(axes) == 1 else axes
    if len(order) == 2:
        swapped = list(range(input.dim()))
        swapped[order[0]], swapped[order[1]] = swapped[order[1]], swapped[order[0]]
        order = swapped
    if [axis % input.dim() for axis in order] != [0, 2, 1, 3]:
        return None
    y = input.permute(0, 2, 1, 3)
    scope.origins.note(y, rematerialize.by_tokens(known.recipe), *known.tensors)
    return y


def _reshaped(func: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """A handler of a function that changes the shape alone."""

    def run(scope: Scope, input: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        known = scope.origins.of(input)
        if known is None or not rematerialize.is_in_order(known.recipe):
            return None
        if isinstance(args[0] if args else kwargs.get("dtype"), torch.dtype):
            return None
        y = func(input, *args, **kwargs)
        if y is not input:
            before = scope.origins.unfinished_of(input, Unfinished)
            scope.origins.note(y, known.recipe, *known.tensors)
            if before is not None:
                scope.origins.note_unfinished(y, before)
        return y

    return run


HANDLERS: Handlers = {
    **dict.fromkeys((torch.transpose, Tensor.transpose, torch.permute, Tensor.permute), _transposed),
    **{
        func: _reshaped(func)
        for func in (
            *(torch.reshape, torch.flatten, torch.unflatten),
            *(Tensor.reshape, Tensor.flatten, Tensor.unflatten, Tensor.view, Tensor.contiguous),
            *(Tensor.reshape_as, Tensor.view_as),
        )
    },
}
