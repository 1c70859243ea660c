"""Interposition: forward of a converted model in training runs under a TorchFunctionMode with hotrain's operators.

The class of the outermost module, and of each block, is exchanged for one that enters the mode. Blocks have their own
mode because a checkpointed block is recomputed outside of the model's forward. The mode replaces PyTorch's functions by
the operators of `operators.REGISTRY`. Other functions run unchanged; so do calls with arguments that the operators do
not support, and the report says why. Nothing here depends on what changes from step to step, so that nothing is
recompiled.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.traceback import annotate
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from ..private import FULL, compiled_part, constant_in_graphs, differentiates, falls_back
from . import eager
from .graph import KEY
from .layouts import in_twins
from .mixins import Mixin, mix, unmix
from .mode_stack import Mode, current_checkpoint, left_to_eager, top, traced_graph, without_own_modes
from .operators import OF_GRAPHS, REGISTRY
from .operators.attention import INSIDE, renew_names
from .operators.base import Scope
from .operators.composed_norm import COMPOSED, ComposedRMSNorm, composed
from .pace import IN_EAGER, TIMED, Pace
from .report import ATTRIBUTE, Buffers, tensors
from .sharing import Origins, traced_number

_PLAIN = (Tensor,)  # the types of nearly every call that has any
OF_ITS_OWN = "a tensor class with a __torch_function__; x.as_subclass(torch.Tensor) in front of the model is compressed"


class Compressed(Mode):
    """The mode, with the records that it writes to.

    Args:
        buffers: the records.
        below: the mode around it; where it is hotrain's as well, it is removed while operators run.
        traced: the origins that are known while Dynamo traces, and the number of the graph that it traces: outside
            objects must not be mutated within a checkpoint. None in eager mode.
    """

    def __init__(self, buffers: Buffers, below: Any = None, traced: tuple[Origins, int | None] | None = None) -> None:
        super().__init__()
        origins, self.graph = (buffers.origins, None) if traced is None else traced
        self.buffers, self.scope, self.checkpoint = buffers, Scope(buffers, origins), origins.checkpoint
        self.nested = isinstance(below, Mode)

    @left_to_eager
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        compiling = torch.compiler.is_compiling()
        if compiling and func is Tensor.unflatten:  # Python, whose `super()` Dynamo cannot trace under a mode
            func = torch.unflatten
        handler = REGISTRY.get(func)
        without_rule = not compiling and func in self.buffers.passing
        if without_rule and (handler is None or func in OF_GRAPHS):  # nearly every call
            return func(*args, **kwargs)
        wanted = torch.is_grad_enabled() and kwargs.get("out") is None
        if types and types != _PLAIN and not compiling and any(map(eager.sees_functions, types)):
            if handler is not None and wanted and args and eager.sees_functions(type(args[0])):
                self.buffers.record_full(f"what is computed of {type(args[0]).__name__}", OF_ITS_OWN)
            return func(*args, **kwargs)
        if wanted and func in INSIDE:
            renew_names()
            with self:
                return INSIDE[func](*args, **kwargs)
        if compiling and wanted and self._may_compress():
            y = in_twins(self._traced_scope(), _replaced, func, args, kwargs)
            if y is not None:
                return y
        if handler is not None and wanted and self._may_compress():
            if self.nested and not compiling:
                y = without_own_modes(handler, self.scope, *args, **kwargs)
            else:
                y = handler(self._traced_scope() if compiling else self.scope, *args, **kwargs)
            if y is not None:
                return y
        if without_rule or compiling or not wanted:
            return func(*args, **kwargs)
        rule = eager.rule_of(self.buffers.looked_at, func, args, kwargs)
        if rule is None:
            if eager.passes(self.buffers.looked_at, func):
                self.buffers.passing.add(func)
            return func(*args, **kwargs)
        if not self._may_compress():
            return func(*args, **kwargs)
        return without_own_modes(eager.call, self.buffers, rule, func, args, kwargs)

    def stands_for(self, buffers: Buffers, checkpoint: int) -> bool:
        """Whether this mode does what a new one with these buffers would, in a forward that begins now."""
        mine = self.buffers is buffers and self.scope.origins is buffers.origins
        return mine and checkpoint == self.checkpoint

    def is_of(self, buffers: Buffers, graph: int | None) -> bool:
        """The same under Dynamo: whether it was entered in the graph that is traced, so not around a checkpoint."""
        return graph is not None and self.graph == graph and self.buffers is buffers

    def _traced_scope(self) -> Scope:
        """The scope, or behind a graph break one without memory: what an object that is older than the graph holds at
        its end is a result of the graph, with a gradient of its own."""
        if self.graph == traced_number():
            return self.scope
        return Scope(self.buffers, Origins(checkpoint=self.checkpoint))

    def _may_compress(self) -> bool:
        # A checkpoint that begins inside of the mode runs its second forward outside of it: both must save the same.
        return current_checkpoint() == self.checkpoint and differentiates()


def _replaced(scope: Scope, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a function by hotrain's operator, or its own."""
    handler = REGISTRY.get(func)
    y = None if handler is None else handler(scope, *args, **kwargs)
    return func(*args, **kwargs) if y is None else y


# ---- module classes ----

_lib = torch.library.Library("hotrain", "FRAGMENT")
_lib.define("region(str plan) -> ()")


@torch.library.impl(_lib, "region", "CompositeExplicitAutograd")
def _region(plan: str) -> None:
    """Do nothing; the node gives graphs that `compiled` changes keys of their own in the compiler's cache, by plan."""


@constant_in_graphs
def _leave_mode_uncompiled() -> bool:
    """After a graph break the mode is called in eager mode, where Dynamo must not compile it."""
    return traced_graph() is not None


_FUNCTION = "_hotrain_function"  # of a module: the function that `WrappedFunction` replaces


class Wrapped(Mixin):
    """Mixin for a module: forward in training runs under the mode."""

    rank = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if any(kind.__name__ == "FSDPModule" for kind in cls.__mro__):  # fully_shard gives a module such a class
            cls.__call__ = _outside_of_modes(cls.__call__)  # type: ignore[attr-defined,method-assign]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        buffers = self.__dict__.get(ATTRIBUTE)
        if buffers is not None:
            buffers.root = weakref.ref(self)  # of a copy or unpickled: the model itself comes last

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        result = super().compile(*args, **kwargs)  # type: ignore[misc]
        compiled: Any = self.__dict__.get("_compiled_call_impl")
        if compiled is not None:  # not where a class has another method of that name
            self._compiled_call_impl = _outside_of_modes(compiled)
        return result

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, Wrapped):
            return type(self).forward(self, *args, **kwargs)
        if not isinstance(args, tuple):  # a placeholder of torch.fx for all arguments
            raise RuntimeError(
                f"hotrain: torch.fx cannot trace a converted {type(self).__name__}. Trace it, or extract features, "
                "before hotrain.convert, which takes a GraphModule as well, or a copy after hotrain.revert(copy)."
            )
        buffers = self.__dict__.get(ATTRIBUTE)
        if buffers is None or not (self.training and differentiates()):  # type: ignore[attr-defined]
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if torch.compiler.is_dynamo_compiling():
            _leave_mode_uncompiled()
            standing, graph = top(), traced_number()
            if isinstance(standing, Compressed) and standing.is_of(buffers, graph):
                return self._in_its_region(buffers.region(), *args, **kwargs)
            with Compressed(buffers, standing, (Origins(checkpoint=current_checkpoint()), graph)):
                return self._in_its_region(buffers.region(), *args, **kwargs)
        standing, checkpoint = top(), current_checkpoint()
        stands = isinstance(standing, Compressed) and standing.stands_for(buffers, checkpoint)
        first = buffers.example is None and buffers.root is not None and buffers.root() is self
        if first and not any(eager.sees_functions(type(t)) or t.is_nested for t in tensors((args, kwargs))):
            # It is predicted with plain tensors.
            buffers.see(self, args, kwargs)
        forward = super().forward  # type: ignore[misc]
        if buffers.pace is not None and IN_EAGER in self.__dict__:
            forward = buffers.pace.way(buffers, self, forward, args, kwargs)
        if stands:  # a block behind another one: what that one made is known
            return forward(*args, **kwargs)
        if self not in buffers.entered:
            buffers.entered.add(self)
            _leave_modes_to_compiled(self)  # type: ignore[arg-type]
        before = buffers.origins.begin(checkpoint)
        try:  # a checkpoint ends its second forward by an exception
            buffers.waits = buffers.waits or _is_on_gpu(*args, *kwargs.values())
            with Compressed(buffers, standing):
                y = forward(*args, **kwargs)
            if first and isinstance(y, GeneratorType):
                buffers.record_full("what no block calls", "forward is a generator, whose body runs later")
            return y
        finally:
            buffers.origins.end(before)

    def _in_its_region(self, region: str, *args: Any, **kwargs: Any) -> Any:
        # In a function of its own: Dynamo does not trace these two `with` blocks nested.
        torch.ops.hotrain.region(self.__dict__[ATTRIBUTE].plan())
        with annotate({KEY: region}):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def _outside_of_modes(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a sharded or of a compiled block, outside of the mode of the whole model: FSDP2's hooks read many
    attributes of each tensor, what the compiler made calls many operators, and each would be a call of the mode. The
    block's forward enters its own, which the compiler traces."""

    run = functools.partial(without_own_modes, call)

    @functools.wraps(call)
    def outside(*args: Any, **kwargs: Any) -> Any:
        return (call if torch.compiler.is_compiling() else run)(*args, **kwargs)

    return outside


def _leave_modes_to_compiled(model: nn.Module) -> None:
    """The same for blocks that `torch.compile` has put into modules of its own (as accelerate does) before the model's
    first training forward."""
    for module in model.modules():
        part = compiled_part(module)
        if part is not None and part is not module:
            module.forward = _outside_of_modes(module.forward)


def _is_on_gpu(*inputs: Any) -> bool:
    return any(isinstance(t, Tensor) and t.is_cuda for t in inputs)


class WrappedNorm(Mixin, ComposedRMSNorm):
    """Mixin for an RMS norm written out by hand: it saves its normalized input quantized."""

    rank = 2


_NAMES: dict[type[nn.Module], str] = {nn.Hardswish: "hardswish", nn.Hardsigmoid: "hardsigmoid"}
# Of transformers, written out by hand: compiled, one function in place of eight operations.
_WRITTEN_OUT = {"NewGELUActivation": "gelu_tanh", "FastGELUActivation": "gelu_tanh"}


def _function_of(module: nn.Module) -> str:
    """The name in `slopes.ACTIVATIONS` of the function that `WrappedFunction` replaces; "" for none."""
    if "forward" in module.__dict__:
        return ""
    kind = type(module)
    written_out = _WRITTEN_OUT.get(kind.__name__, "")
    if not written_out or not kind.__module__.startswith("transformers."):
        return _NAMES.get(kind, "")
    with torch.no_grad():
        x = torch.linspace(-6, 6, 97, device="cpu")
        return written_out if torch.allclose(module(x), F.gelu(x, approximate="tanh"), atol=1e-5) else ""


class WrappedFunction(Mixin):
    """Mixin for a module whose function Dynamo passes to no mode: it calls an operator of hotrain there."""

    rank = 2

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(self, WrappedFunction):
            return type(self).forward(self, input)  # type: ignore[no-any-return]
        plain = not torch.compiler.is_dynamo_compiling() or not (self.training and differentiates())  # type: ignore[attr-defined]
        if plain or ATTRIBUTE not in self.__dict__:
            return super().forward(input)  # type: ignore[misc,no-any-return]
        in_place = getattr(self, "inplace", False)
        operator = torch.ops.hotrain.function_ if in_place else torch.ops.hotrain.function
        return operator(input, self.__dict__[_FUNCTION])  # type: ignore[no-any-return]


def wrap(model: nn.Module, keeps_pace: bool = False) -> Buffers:
    """Put the mode around the model and its blocks, in place; returns the records that its forwards write to.

    A model that is wrapped already stays wrapped and gets new records. ``keeps_pace`` is whether blocks may stay exact
    in eager mode (`pace`).
    """
    buffers = Buffers(pace=Pace() if keeps_pace else None)
    buffers.root = weakref.ref(model)
    if why := falls_back(FULL):
        buffers.record_full("everything", why)
        unwrap(model)
        return buffers
    if "forward" in model.__dict__:
        why = "forward was replaced on the model itself, so that its class's is not run"
        buffers.record_full("what no block calls", why)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        buffers.record_full("modules of torch.jit.script", "their calls are not PyTorch's; torch.compile them instead")
    # All modules are chosen before any is changed.
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    outer = list(_places(model))
    others = [module for module in modules if not isinstance(module, ComposedRMSNorm)]
    norms = {module: norm for module in others if (norm := composed(module))}
    functions = {module: name for module in modules if (name := _function_of(module))}
    for found, mixin in ((outer, Wrapped), (norms, WrappedNorm), (functions, WrappedFunction)):
        for module in found:
            mix(module, mixin)
    for module, norm in norms.items():
        module.__dict__[COMPOSED] = norm
    for module, name in functions.items():
        module.__dict__[_FUNCTION] = name
    for module in (*outer, *(m for m in modules if isinstance(m, ComposedRMSNorm | WrappedFunction))):
        module.__dict__[ATTRIBUTE] = buffers
    for module in outer:
        module.__dict__.pop(IN_EAGER, None)
        innermost = not any(other in outer for other in module.modules() if other is not module)
        if keeps_pace and module is not model and innermost:
            module.__dict__[IN_EAGER] = TIMED
    return buffers


def unwrap(model: nn.Module) -> None:
    """Give every wrapped module of the model its own class back, in place."""
    for module in model.modules():
        if ATTRIBUTE in module.__dict__:
            buffers = module.__dict__.pop(ATTRIBUTE)
            buffers.reverted |= buffers.root is not None and buffers.root() is model
            module.__dict__.pop(IN_EAGER, None)
        unmix(module, Wrapped)  # also of a slice, which Sequential makes of its own class
        unmix(module, WrappedNorm)
        unmix(module, WrappedFunction)
        module.__dict__.pop(_FUNCTION, None)
        module.__dict__.pop(COMPOSED, None)


def _places(model: nn.Module) -> Iterator[nn.Module]:
    """The model, and the elements of its module lists that are blocks."""
    yield model
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            yield from (child for child in parent.children() if child is not model and is_block(child))


def is_block(module: nn.Module) -> bool:
    """Whether an element of a module list is a block, with a mode or checkpoint of its own."""
    return (
        any(True for _ in module.children())
        and "forward" not in module.__dict__
        and not is_parametrized(module)  # its children compute its weight, and PyTorch exchanges its class
        and not isinstance(module, nn.ModuleList | nn.ModuleDict | torch.jit.ScriptModule)
    )
