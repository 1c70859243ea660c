"""Operators that save quantized tensors, one file each, and the registry of PyTorch's functions that they replace.

Such a file holds, in this order: the mathematics and what backward needs of it, in which format; the reference in plain
PyTorch; the launch of its kernels (of `hotrain.kernels`); the autograd function; the custom
operator, which AOTAutograd traces into; and the handlers of PyTorch's functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from . import (
    activation,
    attention,
    batch_norm,
    composed_norm,
    cross_entropy,
    dropout,
    head,
    image_norm,
    interpolate,
    linear,
    norm,
    pooling,
    product,
    softmax,
    views,
)
from .base import Handlers, Scope

_OPERATORS = (
    *(norm, image_norm, composed_norm, batch_norm, activation, attention, softmax, dropout, pooling),
    *(interpolate, cross_entropy, head, product, linear, views),
)
REGISTRY: Handlers = {function: handler for each in _OPERATORS for function, handler in each.HANDLERS.items()}
OF_GRAPHS = frozenset(image_norm.SUMS)  # those whose handler leaves every call in eager mode as it is


def share_inputs(op: Callable[..., Tensor]) -> None:
    """Let a converted layer share its producer's saved tensors when compiled.

    The last arguments of its operator are the recipe of its input and the tensors for it.
    """

    def run(scope: Scope, *args: Any) -> Tensor | None:
        *given, recipe, _ = args
        known = None if recipe else scope.origins.of(args[0])
        return None if known is None else op(*given, known.recipe, list(known.tensors))

    REGISTRY[op] = run
