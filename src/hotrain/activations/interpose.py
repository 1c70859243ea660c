"""How a model gets to the mode: the class of its outermost module, and of its blocks, is exchanged for one that runs
forward under `mode.Compressed`. Blocks have their own, for a checkpointed block is recomputed outside of the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.traceback import annotate
from torch.nn.utils.parametrize import is_parametrized

from .. import autograd
from .composed_norms import ComposedRMSNorm, is_composed
from .mixins import Mixin, mix, unmix
from .mode import ATTRIBUTE, KEY, Buffers, Compressed
from .mode_stack import top


class Wrapped(Mixin):
    """Mixed into the class of a module: training forwards run under the mode."""

    rank = 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Wrapped):
            return type(self).forward(self, *args, **kwargs)
        if not isinstance(args, tuple):  # a placeholder of torch.fx for all arguments
            raise RuntimeError(
                f"hotrain: torch.fx cannot trace a converted {type(self).__name__}. Trace it, or extract features, "
                "before hotrain.convert, which takes a GraphModule as well."
            )
        buffers = self.__dict__.get(ATTRIBUTE)
        if buffers is None or not (self.training and autograd.differentiates()):  # type: ignore[attr-defined]
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if torch.compiler.is_dynamo_compiling():
            with Compressed(buffers):
                return self._in_its_region(buffers.region(), *args, **kwargs)
        standing = top()
        stands = isinstance(standing, Compressed) and standing.stands_for(buffers)
        buffers.waits = buffers.waits or (not stands and _is_on_gpu(*args, *kwargs.values()))
        if buffers.example is None and buffers.root is not None and buffers.root() is self:
            buffers.see(self, args, kwargs)
        before = buffers.origins.begin()
        try:  # a checkpoint ends its second forward by an exception
            with nullcontext() if stands else Compressed(buffers):
                return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            buffers.origins.end(before)

    def _in_its_region(self, region: str, *args: Any, **kwargs: Any) -> Any:
        # A tracer does not follow a `with` in a `with`.
        torch.ops.hotrain.region()
        with annotate({KEY: region}):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def _is_on_gpu(*inputs: Any) -> bool:
    return any(isinstance(t, Tensor) and t.is_cuda for t in inputs)


class WrappedNorm(Mixin, ComposedRMSNorm):
    """A composed RMS norm that keeps codes."""

    rank = 2


NAMES: dict[type[nn.Module], str] = {nn.Hardswish: "hardswish", nn.Hardsigmoid: "hardsigmoid"}


class WrappedFunction(Mixin):
    """A module whose function a tracer hands to no mode, so that it calls an operator of hotrain there."""

    rank = 2

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(self, WrappedFunction):
            return type(self).forward(self, input)  # type: ignore[no-any-return]
        plain = not torch.compiler.is_dynamo_compiling() or not (self.training and autograd.differentiates())  # type: ignore[attr-defined]
        if plain or ATTRIBUTE not in self.__dict__:
            return super().forward(input)  # type: ignore[misc,no-any-return]
        name = NAMES[nn.Hardswish if isinstance(self, nn.Hardswish) else nn.Hardsigmoid]
        operator = torch.ops.hotrain.function_ if self.inplace else torch.ops.hotrain.function  # type: ignore[attr-defined]
        return operator(input, name)  # type: ignore[no-any-return]


def wrap(model: nn.Module) -> Buffers:
    """Put the mode around the model and its blocks. Returns where they write down what they served.

    A model that is wrapped already keeps its wraps and gets new records.
    """
    buffers = Buffers()
    buffers.root = weakref.ref(model)
    if "forward" in model.__dict__:
        why = "forward was replaced on the model itself, so that its class's is not run"
        buffers.leave("what no block calls", why)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        buffers.leave("modules of torch.jit.script", "their calls are not PyTorch's; torch.compile them instead")
    # All is chosen before anything is changed.
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    outer = list(_places(model))
    norms = [module for module in modules if not isinstance(module, ComposedRMSNorm) and is_composed(module)]
    functions = [module for module in modules if type(module) in NAMES and "forward" not in module.__dict__]
    for found, mixin in ((outer, Wrapped), (norms, WrappedNorm), (functions, WrappedFunction)):
        for module in found:
            mix(module, mixin)
    for module in (*outer, *(m for m in modules if isinstance(m, ComposedRMSNorm | WrappedFunction))):
        module.__dict__[ATTRIBUTE] = buffers
    return buffers


def unwrap(model: nn.Module) -> None:
    """Give every wrapped module its own class back."""
    for module in model.modules():
        if ATTRIBUTE in module.__dict__:
            del module.__dict__[ATTRIBUTE]
            unmix(module, Wrapped)
        unmix(module, WrappedNorm)
        unmix(module, WrappedFunction)


def _places(model: nn.Module) -> Iterator[nn.Module]:
    """The model, and what stands in its lists of modules and has modules itself."""
    if not isinstance(model, torch.jit.ScriptModule):
        yield model
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            yield from (child for child in parent.children() if child is not model and is_block(child))


def is_block(module: nn.Module) -> bool:
    """Whether an element of a list of modules is worth a mode or a recomputation of its own."""
    return (
        any(True for _ in module.children())
        and "forward" not in module.__dict__
        and not is_parametrized(module)  # its children make its weight, and its class is PyTorch's to exchange
        and not isinstance(module, nn.ModuleList | nn.ModuleDict | torch.jit.ScriptModule)
    )
