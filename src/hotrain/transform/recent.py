"""A cache of tensors, bounded by their bytes: inputs of many sizes must not fill the memory that is to be saved."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

_Value = TypeVar("_Value")


def recent(limit: int) -> Callable[[Callable[..., _Value]], Callable[..., _Value]]:
    """Decorator of a function that makes tensors of hashable arguments: it returns what it has made of them before.

    What was used last is held, at most so many bytes and at least the newest. What a CUDA graph reads is held for ever:
    the graph reads it again at its address.
    """

    def decorate(make: Callable[..., _Value]) -> Callable[..., _Value]:
        held: collections.OrderedDict[tuple[Hashable, ...], tuple[_Value, int]] = collections.OrderedDict()
        captured: dict[tuple[Hashable, ...], _Value] = {}
        lock = threading.Lock()

        @functools.wraps(make)
        def get(*args: Hashable) -> _Value:
            with lock:
                found = held.pop(args, None)
                if found is not None:
                    held[args] = found
            if found is None:
                value = captured[args] if args in captured else make(*args)
                found = value, _nbytes(value)
                with lock:
                    held[args] = found
                    total = sum(nbytes for _, nbytes in held.values())
                    while total > limit and len(held) > 1:
                        _, (_, nbytes) = held.popitem(last=False)
                        total -= nbytes
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
                captured[args] = found[0]
            return found[0]

        return get

    return decorate


def _nbytes(value: Any) -> int:
    """Of a tensor, and of those in a tuple or in an object's attributes."""
    if isinstance(value, Tensor):
        return value.nbytes
    parts = value if isinstance(value, tuple) else getattr(value, "__dict__", {}).values()
    return sum(map(_nbytes, parts))
