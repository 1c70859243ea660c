"""Autocast's dtypes, and the casts that it would make, made explicitly."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Evaluated once, here: Dynamo cannot trace the call.
_AUTOCASTS = frozenset(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")))


def autocast_dtype(t: Tensor) -> torch.dtype:
    """The dtype to which autocast casts t for a product: its own where autocast is off, and for float64."""
    return t.dtype if t.dtype == torch.float64 else autocast_to(t.device.type) or t.dtype


def autocast_to(kind: str) -> torch.dtype | None:
    """The dtype of autocast on that kind of device, None where it is off."""
    return torch.get_autocast_dtype(kind) if kind in _AUTOCASTS and torch.is_autocast_enabled(kind) else None


def autocast(t: Tensor) -> Tensor:
    """The tensor as autocast casts it for a product."""
    return t.to(autocast_dtype(t))


def outside_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Context without autocast, where casts are made explicitly.

    Autocast's cache must not get copies of weights that have no graph. And a context, not a flag: a backward within
    autocast clears the cache, else casts of one stream would be used in a graph of another.
    """
    kind = x.device.type
    return nullcontext() if autocast_to(kind) is None else torch.autocast(kind, enabled=False)
