"""A module's class exchanged for one with a mixin before it, and back: parameters, names and keys stay as they are.

Several mixins may be on one module. They come and go in any order and always stand in the same one, by `rank`.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any, ClassVar

from torch import nn

_MARK = "_hotrain_mixed"  # on the classes that are made here: what they are made of


class Mixin:
    """Base of what is mixed in. rank: of two mixins the lower one's forward runs outside of the other's."""

    rank: ClassVar[int]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By what the class is made of: it is itself made in every process anew.
        made = next(kind for kind in type(self).__mro__ if _MARK in kind.__dict__)
        return _rebuilt, made.__dict__[_MARK], self.__dict__


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
        }
        _classes[parts] = type(plain.__name__, (*parts[1], plain), names)
    return _classes[parts]


def _with_signature_of(plain: type[nn.Module], mixin: type[Mixin]) -> FunctionType:
    """The mixin's forward, which says that it takes what the module's own takes: transformers' Trainer asks."""
    own: Any = mixin.forward  # type: ignore[attr-defined]
    forward = FunctionType(own.__code__, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    forward.__signature__ = inspect.signature(plain.forward)  # type: ignore[attr-defined]
    return forward


def _rebuilt(plain: type[nn.Module], mixins: tuple[type[Mixin], ...]) -> nn.Module:
    module = plain.__new__(plain)
    module.__class__ = _made(plain, mixins)
    return module
