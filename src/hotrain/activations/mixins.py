"""A module's class exchanged for one with a mixin before it, and back: parameters, names and keys stay as they are.

Several mixins may be on one module. They come and go in any order and always stand in the same one, by `rank`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ClassVar

from torch import nn

_MARK = "_hotrain_mixed"  # on the classes that are made here: what they are made of


class Mixin:
    """Base of what is mixed in. rank: of two mixins the lower one's forward runs outside of the other's.

    A bound forward may outlive the mixin (accelerate's autocast keeps one): where self is none of it any more, it calls
    the class's own.
    """

    rank: ClassVar[int]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By what the class is made of: it is itself made in every process anew.
        plain, mixins = _made_of(self)
        if plain.__reduce__ is object.__reduce__:
            return _rebuilt, (plain, mixins), self.__dict__
        with _as_it_was(self):  # fx.GraphModule, whose class is made anew for every instance
            rebuild, arguments, *state = self.__reduce_ex__(protocol)
        return _mixed_again, (rebuild, arguments, mixins, _ours(self)), *state


def _refuse_script(self: nn.Module) -> nn.Module:
    raise RuntimeError(
        f"hotrain: torch.jit.script cannot compile a converted {type(self).__name__}. Script a copy after "
        "hotrain.revert(copy), or use torch.compile or torch.export on the model as it is."
    )


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Of a module whose class has a way of its own: that one's, mixed again."""
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
    """What hotrain left on the module itself."""
    return {name: value for name, value in module.__dict__.items() if name.startswith("_hotrain")}


@contextmanager
def _as_it_was(module: Any) -> Iterator[None]:
    """Within it, the module has the class that it had before anything was mixed in."""
    mixed = module.__class__
    module.__class__ = _made_of(module)[0]
    try:
        yield
    finally:
        module.__class__ = mixed


def mix(module: nn.Module, mixin: type[Mixin]) -> None:
    """Put `mixin` before the module's class, once."""
    if not isinstance(module, mixin):
        plain, mixins = _parts(type(module))
        module.__class__ = _made(plain, (*mixins, mixin))


def unmix(module: nn.Module, mixin: type[Mixin]) -> None:
    """Take `mixin` away again.

    A module whose class was changed once more since (FSDP2's `fully_shard`) keeps it: mixins are without effect where
    what they left on the module is gone.
    """
    plain, mixins = _parts(type(module))
    if mixin in mixins:
        module.__class__ = _made(plain, tuple(kind for kind in mixins if kind is not mixin))


_classes: dict[tuple[type[nn.Module], tuple[type[Mixin], ...]], type[nn.Module]] = {}


def _parts(kind: type[nn.Module]) -> tuple[type[nn.Module], tuple[type[Mixin], ...]]:
    parts: tuple[type[nn.Module], tuple[type[Mixin], ...]] = kind.__dict__.get(_MARK, (kind, ()))
    return parts


def _made_of(module: Any) -> tuple[type[nn.Module], tuple[type[Mixin], ...]]:
    """`_parts` of a module's class, or of the one that it was made from since."""
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
    """The mixin's forward, which says that it takes what the module's own takes: transformers' Trainer asks.

    Its code is its own too, for by the code a tracer counts how often it compiled a forward.
    """
    own: Any = mixin.forward  # type: ignore[attr-defined]
    code = own.__code__.replace(co_name=f"forward_of_{plain.__name__}")
    forward = FunctionType(code, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    forward.__signature__ = inspect.signature(plain.forward)  # type: ignore[attr-defined]
    return forward


def _rebuilt(plain: type[nn.Module], mixins: tuple[type[Mixin], ...]) -> nn.Module:
    module = plain.__new__(plain)
    module.__class__ = _made(plain, mixins)
    return module
