"""Blocks that keep their inputs alone and run forward a second time in backward: activation checkpointing by class.

A block's class is exchanged for one whose forward passes through `torch.utils.checkpoint.checkpoint`; module names and
state_dict keys stay.
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
    """Mixed into the class of a block: where grad is enabled, forward keeps its arguments and is repeated in backward.

    Outermost of all mixins, so that the second forward passes through the others as the first one did.
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
    """Name → module of what can be recomputed: what stands in lists of modules and has modules itself, innermost."""
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
    """Make these blocks recompute."""
    for module in modules.values():
        mix(module, Recomputed)
        module.__dict__[ATTRIBUTE] = True


def keep_all(model: nn.Module) -> list[str]:
    """Make every block keep what it did before. Returns the names of those that recomputed."""
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
    """Let the norms of the block write to copies of their running statistics: the first forward has counted."""
    norms = [m for m in block.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.training]
    before = [dict(norm._buffers) for norm in norms]
    try:
        for norm in norms:
            norm._buffers.update({name: None if b is None else b.clone() for name, b in norm._buffers.items()})
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers.update(buffers)
