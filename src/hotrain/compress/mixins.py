"""Mixins put before a module's class and removed again: parameters, module names and state_dict keys do not change.

A module may have several mixins. They are added and removed in any order; their order in the class is that of `rank`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ClassVar

from torch import nn

_MARK = "_hotrain_mixed"  # attribute of the classes made here: (class, mixins)
_COPYING = ("__reduce__", "__reduce_ex__", "__getstate__")  # by which a class says how it is copied


class Mixin:
    """Base class of mixins.

    A bound forward may outlive the mixin (accelerate's autocast keeps one): if self has lost the mixin, forward calls
    the class's own.

    Attributes:
        rank: of two mixins, the one with the lower rank is the outer one.
    """

    rank: ClassVar[int]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Not of the model's own class, which may want arguments or keep a list of its subclasses. But transformers'
        # layers are checkpointed by the wrapper that their base class puts around the forward of the last subclass.
        if _MARK not in cls.__dict__ or any(kind.__name__ == "GradientCheckpointingLayer" for kind in cls.__mro__):
            super().__init_subclass__(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled by its parts: the class itself is made anew in each process.
        plain, mixins = _made_of(self)
        if all(getattr(plain, name) is getattr(object, name) for name in _COPYING):
            return _rebuilt, (plain, mixins), self.__dict__
        with _as_it_was(self):  # fx.GraphModule's instances have a class each; a `__getstate__` may leave out a lock
            rebuild, arguments, *state = self.__reduce_ex__(protocol)
        return _mixed_again, (rebuild, arguments, mixins, _ours(self)), *state


def _refuse_script(self: nn.Module) -> nn.Module:
    raise RuntimeError(
        f"hotrain: torch.jit.script cannot compile a converted {type(self).__name__}. Script a copy after "
        "hotrain.revert(copy), or use torch.compile or torch.export on the model as it is."
    )


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deep copy by the class's own `__deepcopy__`, with the mixins added to the copy."""
    with _as_it_was(self):
        twin = copy.deepcopy(self, memo)
    return _mixed_again(lambda: twin, (), _made_of(self)[1], copy.deepcopy(_ours(self), memo))


def _mixed_again(
    rebuild: Callable[..., nn.Module], arguments: tuple[Any, ...], mixins: tuple[type[Mixin], ...], ours: dict[str, Any]
) -> nn.Module:
    module = rebuild(*arguments)
    module.__dict__.update(ours)
    for mixin in mixins:
        mix(module, mixin)
    return module


def _ours(module: Any) -> dict[str, Any]:
    """Attributes that hotrain has set on the module itself."""
    return {name: value for name, value in module.__dict__.items() if name.startswith("_hotrain")}


def _set_class(module: Any, kind: type[nn.Module]) -> None:
    object.__setattr__(module, "__class__", kind)  # the module's own `__setattr__` may refuse


@contextmanager
def _as_it_was(module: Any) -> Iterator[None]:
    """Context in which the module has the class that it had before any mixin."""
    mixed = module.__class__
    _set_class(module, _made_of(module)[0])
    try:
        yield
    finally:
        _set_class(module, mixed)


def mix(module: nn.Module, mixin: type[Mixin]) -> None:
    """Put a mixin before the module's class, in place; a second time without effect."""
    if not isinstance(module, mixin):
        plain, mixins = _parts(type(module))
        _set_class(module, _made(plain, (*mixins, mixin)))


def unmix(module: nn.Module, mixin: type[Mixin]) -> None:
    """Remove a mixin, in place, if the module has it.

    A module whose class was exchanged again since (FSDP2's `fully_shard`) keeps the mixin, which is without effect once
    its attribute on the module is gone.
    """
    plain, mixins = _parts(type(module))
    if mixin in mixins:
        _set_class(module, _made(plain, tuple(kind for kind in mixins if kind is not mixin)))


_classes: dict[tuple[type[nn.Module], tuple[type[Mixin], ...]], type[nn.Module]] = {}


def _parts(kind: type[nn.Module]) -> tuple[type[nn.Module], tuple[type[Mixin], ...]]:
    parts: tuple[type[nn.Module], tuple[type[Mixin], ...]] = kind.__dict__.get(_MARK, (kind, ()))
    return parts


def _made_of(module: Any) -> tuple[type[nn.Module], tuple[type[Mixin], ...]]:
    """`_parts` of a module's class, or of the base class that was made here."""
    return next(_parts(kind) for kind in type(module).__mro__ if _MARK in kind.__dict__)


def _made(plain: type[nn.Module], mixins: tuple[type[Mixin], ...]) -> type[nn.Module]:
    if not mixins:
        return plain
    parts = plain, tuple(sorted(mixins, key=lambda kind: kind.rank))
    if parts not in _classes:
        names = {
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "forward": _with_signature_of(plain, parts[1][0]),
            _MARK: parts,
            "__prepare_scriptable__": _refuse_script,
        }
        if hasattr(plain, "__deepcopy__"):
            names["__deepcopy__"] = _deepcopy
        _classes[parts] = type(plain.__name__, (*parts[1], plain), names)
    return _classes[parts]


def _with_signature_of(plain: type[nn.Module], mixin: type[Mixin]) -> FunctionType:
    """The mixin's forward with the signature of the module's own, which transformers' Trainer reads.

    Its code object is a copy too: Dynamo counts recompilations by code object.
    """
    own: Any = mixin.forward  # type: ignore[attr-defined]
    code = own.__code__.replace(co_name=f"forward_of_{plain.__name__}")
    forward = FunctionType(code, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    forward.__signature__ = inspect.signature(plain.forward)  # type: ignore[attr-defined]
    return forward


def _rebuilt(plain: type[nn.Module], mixins: tuple[type[Mixin], ...]) -> nn.Module:
    module = plain.__new__(plain)
    _set_class(module, _made(plain, mixins))
    return module
