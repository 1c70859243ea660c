"""Eager fallback: saved-tensor hooks around functions without an operator of hotrain's, which pack as `rules` says.

Hooks are active only while one function with a rule is called, never around a whole forward. So tensors that hotrain's
own operators, converted layers and other autograd functions save do not pass through them, and neither do those of
functions without a rule: PyTorch checks their versions as always, and `torch.func` and checkpoints see no hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from ..private import fakes, saved_tensor_hooks, version_of
from . import codes, rules
from .formats import packer
from .rules import SMALL, Rule

# hotrain's own among them, where one mode is inside of another
_OPERATORS = (type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add))
PLAIN = (Tensor, nn.Parameter, fakes.tensor)  # FakeTensor replaces any of them where bytes are predicted


def sees_functions(kind: type[Tensor]) -> bool:
    """Whether PyTorch calls a tensor class's `__torch_function__` in place of its functions: not of parameters, fake
    tensors and DTensors, which have none that is called."""
    return kind not in PLAIN and kind.__torch_function__ is not nn.Parameter.__torch_function__


def rule_of(looked_at: set[str], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Rule | None:
    """The rule of a call of a function of PyTorch; None if it runs unchanged.

    `looked_at` has the names of functions without a rule whose saved bytes are known. The first call of another one
    with a large tensor gets `rules.OTHER`, under which all is saved as it is and counted.
    """
    if passes(looked_at, func) or isinstance(func, _OPERATORS):
        return None
    tensors = [t for t in args if isinstance(t, Tensor)]
    if not all(type(t) in PLAIN and not t.is_nested for t in tensors):
        return None
    if func in rules.BY_FUNCTION:
        return rules.of_call(func, args, kwargs)
    return rules.OTHER if any(_is_large(t) or _is_large_complex(t) for t in tensors) else None


def passes(looked_at: set[str], func: Any) -> bool:
    """Whether no call of func will have a rule, whatever its arguments."""
    return func not in rules.BY_FUNCTION and name_of(func) in looked_at


def call(buffers: Any, rule: Rule, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with its saved tensors packed as the rule of `rule_of` says, and record it in `report.Buffers`.

    Within a checkpoint the function runs unchanged: both forwards must save the same. Outer hooks of others get the
    codes.
    """
    outer, allowed = saved_tensor_hooks.innermost()
    theirs = None if outer is None else getattr(outer[0], "__module__", None)
    if theirs in ("torch.utils.checkpoint", __name__) or not allowed:
        return func(*args, **kwargs)
    name = name_of(func)
    one = _Call(rule, name, args, kwargs, outer)
    try:
        with saved_tensors_hooks(one.pack, _unpack):
            y = func(*args, **kwargs)
    finally:
        one.args, one.kwargs = (), {}  # the graph keeps the hooks alive, and they would keep the arguments alive
    buffers.looked_at.add(name)
    if one.forms:
        buffers.record(f"{name} (saved)", ", ".join(sorted(one.forms)))
    nbytes = sum(one.full.values())
    if nbytes >= 2 * SMALL:
        why = "no rounding rule for it" if rule is rules.OTHER else "its derivative needs full precision"
        if name not in buffers.full:
            buffers.record_full(name, f"{nbytes / 2**20:.1f} MiB per call, {why}")
    elif one.forms:
        buffers.full.pop(name, None)  # without an operator of its own, but packed here
    return y


def name_of(func: Any) -> str:
    """The name of a function in the report."""
    return getattr(func, "__name__", str(func)).strip("_")


def _is_large(t: Tensor) -> bool:
    return t.dtype in (torch.float32, torch.float16, torch.bfloat16) and t.numel() >= SMALL


def _is_large_complex(t: Tensor) -> bool:
    return t.is_complex() and t.numel() >= SMALL


# ---- the hooks of a call ----

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
_Flat = tuple[float, int | None] | None  # of `rules.flat_of`

# tensor → what live graphs save of it. A second node that saves the tensor shares what the first one packed.
_packed = WeakTensorKeyDictionary()


class _Call:
    """One call of a function, with the forms it packed into and, by storage, the bytes of large tensors saved as is."""

    def __init__(
        self, rule: Rule, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], outer: _Hooks | None
    ) -> None:
        self.rule, self.name, self.args, self.kwargs, self.outer = rule, name, args, kwargs, outer
        self.forms: set[str] = set()
        self.full: dict[int, int] = {}

    def pack(self, t: Tensor) -> _Saved:
        # Of an RNN a workspace, and a tensor for each step, are most of it.
        counts = (self.rule is rules.OTHER or _is_large_complex(t)) and t.layout == torch.strided
        if counts and not _is_large(t) and (t.dtype == torch.uint8 or not _is_of_a_leaf(t)):
            self._count(t)
        if not _is_large(t) or type(t) not in PLAIN or t.layout != torch.strided or _is_of_a_leaf(t):
            return _Saved(t, rules.EXACT, self.outer)
        use = rules.EXACT if _overlaps(t) else self._use(t)
        flat = rules.flat_of(self.name, self.args, self.kwargs) if use == rules.VALUE else None
        state, known = (*_state(t, self.outer), flat), _packed.get(t)
        saved = None if known is None else known()
        if saved is None or saved.state != state or not saved.is_precise_enough(use):
            saved = _Saved(t, use, self.outer, state, flat)
            if self.rule is not rules.OTHER:  # which is there for the first call alone
                _packed[t] = weakref.ref(saved)
        if saved.form:
            self.forms.add(saved.form)
        elif use == rules.EXACT:
            self._count(t)
        return saved

    def _count(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        self.full[StorageWeakRef(storage).cdata] = storage.nbytes()

    def _use(self, t: Tensor) -> str:
        places = [place for place, arg in enumerate(self.args) if arg is t]
        asked = [self.rule.arguments.get(place, self.rule.saved) for place in places] or [self.rule.saved]
        use = rules.strictest(asked)
        return rules.EXACT if use == rules.RATIO and t.dtype != torch.float32 else use


class _Saved:
    """A tensor as a node saves it: packed, or as it is.

    Under outer hooks they save it, or its codes, and PyTorch does not check its version.
    """

    __slots__ = ("__weakref__", "counter", "form", "outer", "parts", "restore", "shape", "state", "use", "version")

    def __init__(
        self, t: Tensor, use: str, outer: _Hooks | None, state: tuple[Any, ...] = (), flat: _Flat = None
    ) -> None:
        self.use, self.form, self.outer, self.state = use, rules.FORM[use], outer, state
        self.version, self.shape = version_of(t), t.shape
        self.parts: tuple[Any, ...] = (t,)
        if self.form:
            pack, self.restore = packer(t, self.form, codes.pack, codes.unpack)
            self.parts = pack(t if flat is None else _cut(t, *flat))
        if outer is not None:
            self.parts = tuple(outer[0](part) for part in self.parts)
            return
        # It shares the version. As it is, t would be in a circle: a result refers to its node, which refers to this.
        self.counter = t.detach()
        if self.form:
            self.counter.data = t.new_empty(0)
        else:
            self.parts = (self.counter,)

    def is_precise_enough(self, use: str) -> bool:
        """Whether a use of that class can share this; signs are not read from bfloat16."""
        return rules.strictest((self.use, use)) == self.use and (self.use, use) != (rules.RATIO, rules.SIGN)


def _cut(t: Tensor, flat: float, axis: int | None) -> Tensor:
    """t, or the half of it that is a gate, from -flat to flat.

    A mask of -inf, or of -1e9, would else be the scale of its group.
    """
    if axis is not None:
        values, gate = t.chunk(2, axis)
        return torch.cat((values, _cut(gate, flat, None)), axis)
    flat = min(flat, torch.finfo(t.dtype).max)  # which `clamp` asks for
    return t.clamp(-flat, flat)


def _unpack(saved: _Saved) -> Tensor:
    parts = saved.parts
    if saved.outer is not None:
        parts = tuple(saved.outer[1](part) for part in parts)
    elif version_of(saved.counter) != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: of shape "
            f"{list(saved.shape)}, it is at version {version_of(saved.counter)}; expected version {saved.version} "
            "instead"
        )
    y: Tensor = saved.restore(*parts) if saved.form else parts[0]
    return y


def _state(t: Tensor, outer: _Hooks | None) -> tuple[Any, ...]:
    """What differs once t is written to, has other memory or is under other hooks; writes through `.data` do not show.

    The weak reference keeps new memory from having the address of the old.
    """
    return version_of(t), t.shape, t.stride(), t.storage_offset(), StorageWeakRef(t.untyped_storage()), outer


def _overlaps(t: Tensor) -> bool:
    """Whether elements may share memory, as an expanded tensor's do: codes would take more bytes than the tensor."""
    reach = 0
    for size, stride in sorted(zip(t.shape, t.stride(), strict=True), key=lambda axis: axis[1]):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


# Names of the autograd nodes of views, casts and copies.
_MOVES = {
    *("Alias", "AsStrided", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "SplitWithSizes"),
    *("Squeeze", "T", "ToCopy", "Transpose", "Unbind", "UnsafeSplit", "UnsafeView", "Unsqueeze", "View"),
}


def _is_of_a_leaf(t: Tensor) -> bool:
    """Whether t is a leaf (a parameter or an input, alive anyway) or a view, cast or copy of one."""
    node = t.grad_fn
    while node is not None and node.name().rstrip("0123456789").removesuffix("Backward") in _MOVES:
        node = node.next_functions[0][0]
    return node is None or hasattr(node, "variable")
