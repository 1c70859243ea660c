"""Activation checkpointing of whole blocks: each saves its inputs alone and runs forward again in backward.

The class of a block is exchanged for one whose forward calls `torch.utils.checkpoint.checkpoint`. Module names and
state_dict keys do not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .interpose import is_block
from .mixins import Mixin, mix, unmix

ATTRIBUTE = "_hotrain_recomputed"
_CACHES = ("past_key_value", "past_key_values", "layer_past", "cache_params")


class Recomputed(Mixin):
    """Mixin for a block: with grad enabled, forward saves its arguments alone and is repeated in backward.

    It is the outermost of all mixins, so that both forwards run through the others.
    """

    rank = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Recomputed):
            return type(self).forward(self, *args, **kwargs)
        if not torch.is_grad_enabled() or ATTRIBUTE not in self.__dict__:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        for name in _CACHES:
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name}: a recomputed block would write to the cache twice; call the model with use_cache=False"
                )
        forward = super().forward  # type: ignore[misc]
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=partial(_contexts, self), **kwargs)  # type: ignore[arg-type]


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Name → module of what can be checkpointed: the innermost elements of module lists that have submodules."""
    found = {
        f"{name}.{key}" if name else key: child
        for name, parent in model.named_modules()
        if isinstance(parent, nn.ModuleList | nn.Sequential)
        for key, child in parent.named_children()
        if child is not model and is_block(child)
    }
    outer = {id(module) for module in found.values() if any(_holds(module, other) for other in found.values())}
    return {name: module for name, module in found.items() if id(module) not in outer}


def recompute(modules: dict[str, nn.Module]) -> None:
    """Switch checkpointing on for these `blocks`."""
    for module in modules.values():
        mix(module, Recomputed)
        module.__dict__[ATTRIBUTE] = True


def keep_all(model: nn.Module) -> list[str]:
    """Switch checkpointing off in the whole model, in place; returns the names of the blocks that had it."""
    names = [name for name, module in model.named_modules() if ATTRIBUTE in module.__dict__]
    for module in model.modules():
        if module.__dict__.pop(ATTRIBUTE, False):
            unmix(module, Recomputed)
    return names


def _holds(module: nn.Module, other: nn.Module) -> bool:
    return module is not other and any(inner is other for inner in module.modules())


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _statistics_stay(block)


@contextmanager
def _statistics_stay(block: nn.Module) -> Iterator[None]:
    """Let the block's norms update copies of their running statistics: the first forward has updated them already."""
    norms = [m for m in block.modules() if hasattr(m, "running_mean") and m.training]
    before = [(norm, name, b) for norm in norms for name, b in norm.named_buffers(recurse=False)]
    try:
        for norm, name, buffer in before:
            setattr(norm, name, buffer.clone())
        yield
    finally:
        for norm, name, buffer in before:
            setattr(norm, name, buffer)
