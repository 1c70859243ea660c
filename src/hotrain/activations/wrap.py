"""How a model gets to the mode: the class of its outermost module, and of its blocks, is exchanged for one that runs
forward under `mode.Compressed`. Blocks have their own, for a checkpointed block is recomputed outside of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .mode import Buffers, Compressed

ATTRIBUTE = "_hotrain_buffers"


class Wrapped:
    """Mixed into the class of a module: training forwards run under the mode."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):  # type: ignore[attr-defined]
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        with Compressed(self.__dict__[ATTRIBUTE]):
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By the class that the module had: this one is made in every process anew.
        return _rebuilt, (type(self).__mro__[2],), self.__dict__


def _rebuilt(kind: type[nn.Module]) -> nn.Module:
    module = kind.__new__(kind)
    module.__class__ = _wrapped(kind)
    return module


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _wrapped(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _classes:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _classes[kind] = type(kind.__name__, (Wrapped, kind), names)
    return _classes[kind]


def wrap(model: nn.Module) -> Buffers:
    """Put the mode around the model and its blocks. Returns where they write down what they served.

    A model that is wrapped already keeps its wraps and gets new records.
    """
    buffers = Buffers()
    for module in _places(model):
        if not isinstance(module, Wrapped):
            module.__class__ = _wrapped(type(module))
        module.__dict__[ATTRIBUTE] = buffers
    return buffers


def unwrap(model: nn.Module) -> None:
    """Give every wrapped module its own class back."""
    for module in model.modules():
        if ATTRIBUTE in module.__dict__ and isinstance(module, Wrapped):
            del module.__dict__[ATTRIBUTE]
            module.__class__ = type(module).__mro__[2]


def hindrance(model: nn.Module) -> str | None:
    """Why the mode would not be entered, or None."""
    if "forward" in model.__dict__:
        return "its forward was replaced on the instance, so that the class's is not called"
    return None


def _places(model: nn.Module) -> Iterator[nn.Module]:
    """The model, and what stands in its lists of modules and has modules itself."""
    yield model
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            yield from (child for child in parent.children() if child is not model and _is_block(child))


def _is_block(module: nn.Module) -> bool:
    return (
        any(True for _ in module.children())
        and "forward" not in module.__dict__
        and not isinstance(module, nn.ModuleList | nn.ModuleDict)
    )
