"""What no operator serves: functions of PyTorch whose derivative bears it keep codes of what they save, in eager mode.

Saved-tensor hooks are there while one function of `RULES` is called, never around a whole forward. So what hotrain's
own operators, converted layers and anybody's autograd functions save does not pass through them, nor what any function
saves that has no rule; PyTorch checks versions of that as ever, and `torch.func` and checkpoints find no hooks.

**A list of what may be rounded, not of what may not**: a function that nobody has thought through stays exact, and the
report names it with its bytes. A rule is there for

* products: the derivative is a polynomial of what is saved, so that an error stays in proportion to the largest of its
  neighbours: int8, as `policy` has it for matrices;
* curves whose slope is bounded and has no step (softplus, GLU, erf …): int8;
* poles and exponentials: the derivative divides by what is saved, or what is saved spans orders of magnitude, and int8
  would make zeros of small entries. bfloat16 keeps their exponent, and halves float32; what has 16 bits already stays;
* `abs`, which asks for signs, and pooling, which asks for a shape.

Not there: losses, log-softmax and log-sum-exp (the head's logits are wanted exactly); attention (a log-sum-exp enters
an exponential); sin and cos (a phase is wanted exactly, however large); comparisons, clamps, maxima, sorting and
indexing; prelu, selu and others with a step in their slope; differences of what is saved (var, std, lerp, mse_loss,
grid_sample), whose error is in proportion to the mean, not to the deviation; linalg, prod and cdist; recurrent layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from ..saved import as_it_was, memory_order
from .format_policy import GROUPED, SMALL

_COLUMNS = 16  # entries along which there are to be groups at least


class _Short:
    """bfloat16: rounded in proportion to each entry, and never to zero."""

    def keep(self, rows: Tensor) -> tuple[Tensor]:
        return (rows.to(torch.bfloat16),)

    def restore(self, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return kept[0].to(dtype)


class _Sign:
    """−1, 0 or 1 in a byte each."""

    def keep(self, rows: Tensor) -> tuple[Tensor]:
        return (rows.sgn().to(torch.int8),)

    def restore(self, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return kept[0].to(dtype)


class _Shape:
    """No entry at all: what comes back has the shape, and no values that mean anything."""

    def keep(self, rows: Tensor) -> tuple[Tensor]:
        return (rows.new_empty(0),)

    def restore(self, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return kept[0].new_empty(tuple(shape))


FORMS: dict[str, Any] = {"int8": GROUPED["int8"], "bfloat16": _Short(), "sign": _Sign(), "shape": _Shape()}
# form → the forms that serve where that one is asked for; "" is the tensor as it is
_SERVED_BY = {
    "": ("",),
    "bfloat16": ("", "bfloat16"),
    "int8": ("", "bfloat16", "int8"),
    "sign": ("", "sign"),
    "shape": ("", "bfloat16", "int8", "sign", "shape"),
}


@dataclass(frozen=True)
class Rule:
    """In which of `FORMS` a function keeps what it saves; "" for as it is.

    places: of its arguments, by place.  others: of all else: results, and what it makes of its arguments before it
    saves that (a cast, a transposed operand). An argument without a place, or by keyword, counts among the others.
    """

    others: str = ""
    places: Mapping[int, str] = field(default_factory=dict)


_EXACT = Rule()
_PRODUCT, _SMOOTH, _WIDE = Rule("int8"), Rule("int8"), Rule("bfloat16")
_DIVISION = Rule(places={0: "int8", 1: "bfloat16"})
_NORM = Rule(places={0: "bfloat16"})  # the result divides; neighbours may belong to a norm that is much larger
_POOL = Rule(places={0: "shape"})


def _given(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _pow(*args: Any, **kwargs: Any) -> Rule:
    exponent = _given(args, kwargs, 1, "exponent", None)
    if isinstance(exponent, bool) or not isinstance(exponent, int | float) or abs(exponent) > 4:
        return _EXACT
    return _PRODUCT if exponent in (2, 3, 4) else _WIDE


def _elu(*args: Any, **kwargs: Any) -> Rule:
    # Of any other alpha the slope has a step at zero.
    return _SMOOTH if _given(args, kwargs, 1, "alpha", 1.0) == 1 else _EXACT


def _euclidean(name: str, *orders: Any) -> Callable[..., Rule]:
    def rule(*args: Any, **kwargs: Any) -> Rule:
        return _NORM if _given(args, kwargs, 1, name, orders[0]) in orders else _EXACT

    return rule


def _interpolate(*args: Any, **kwargs: Any) -> Rule:
    return _POOL if _given(args, kwargs, 3, "mode", "nearest") == "area" else _EXACT


def _everywhere(names: str, rule: Rule | Callable[..., Rule]) -> dict[Any, Any]:
    """The rule for the functions of these names, of torch and of tensors, those in place too."""
    homes = [(home, kind) for home in (torch, Tensor) for kind in ("{}", "{}_")]
    found = [getattr(home, kind.format(name), None) for name in names.split() for home, kind in homes]
    return {func: rule for func in found if func is not None}


RULES: dict[Any, Rule | Callable[..., Rule]] = {
    **_everywhere("mul multiply addcmul square mm bmm mv matmul addmm addbmm baddbmm outer ger inner", _PRODUCT),
    **_everywhere("erf celu", _SMOOTH),
    **_everywhere("sqrt rsqrt reciprocal log log2 log10 exp exp2 expm1", _WIDE),
    **_everywhere("div divide true_divide", _DIVISION),
    **_everywhere("addcdiv", Rule(places={1: "int8", 2: "bfloat16"})),
    **_everywhere("pow", _pow),
    **_everywhere("abs absolute", Rule("sign")),
    **_everywhere("norm", _euclidean("p", "fro", 2, None)),
    **dict.fromkeys((torch.einsum, torch.tensordot, F.linear, F.bilinear), _PRODUCT),
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _PRODUCT),
    **dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), _PRODUCT),
    **dict.fromkeys((F.softplus, F.logsigmoid, F.glu, F.celu), _SMOOTH),
    F.elu: _elu,
    F.normalize: _euclidean("p", 2),
    torch.linalg.vector_norm: _euclidean("ord", 2),
    torch.linalg.norm: _euclidean("ord", None),
    Tensor.__rtruediv__: _WIDE,  # a number by a tensor
    Tensor.__pow__: _pow,
    **dict.fromkeys((F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, F.avg_pool3d), _POOL),
    F.interpolate: _interpolate,
}


# hotrain's own among them, where one mode is inside of another
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_PLAIN = (Tensor, nn.Parameter, FakeTensor)  # the last stands for any of the others, where bytes are predicted


def rule_of(looked_at: set[str], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Rule | None:
    """The rule for a call; None for one that is to run as it is.

    looked_at: names of functions without a rule of which it is known what they save. The first call of such a one with
    a large tensor has a rule, under which everything stays as it is and is counted.
    """
    rule = RULES.get(func)
    if rule is None and name_of(func) in looked_at:
        return None
    if isinstance(func, _OPERATORS) or not all(type(t) in _PLAIN for t in args if isinstance(t, Tensor)):
        return None
    if rule is not None:
        return rule if isinstance(rule, Rule) else rule(*args, **kwargs)
    return _EXACT if any(isinstance(t, Tensor) and _is_large(t) for t in args) else None


def passes(looked_at: set[str], func: Any) -> bool:
    """Whether calls of func have no rule from now on, whatever they are given."""
    return func not in RULES and name_of(func) in looked_at


def call(buffers: Any, rule: Rule, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """func(*args, **kwargs), what it saves kept as the rule has it. buffers: the `mode.Buffers` that are told.

    Inside of a checkpoint it runs as it is: what a second forward keeps there must be what the first one kept. Hooks of
    others, around all of this, get the codes.
    """
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    theirs = None if outer is None else getattr(outer[0], "__module__", None)
    allowed: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    if theirs in ("torch.utils.checkpoint", __name__) or not allowed:
        return func(*args, **kwargs)
    one = _Call(rule, args, outer)
    try:
        with saved_tensors_hooks(one.pack, _unpack):
            y = func(*args, **kwargs)
    finally:
        one.args = ()  # the graph holds the hooks for as long as it lives
    name = name_of(func)
    buffers.looked_at.add(name)
    if one.forms:
        buffers.serve(f"{name} (saved)", ", ".join(sorted(one.forms)))
    if one.full:
        size = sum(one.full.values()) / 2**20
        why = "for which there is no rule" if rule is _EXACT else "of which its derivative asks for all digits"
        if name not in buffers.full:
            buffers.leave(name, f"{size:.1f} MiB a call, {why}")
    elif one.forms:
        buffers.full.pop(name, None)  # no operator serves it, but this does
    return y


def name_of(func: Any) -> str:
    return getattr(func, "__name__", str(func)).strip("_")


def _is_large(t: Tensor) -> bool:
    return t.dtype in (torch.float32, torch.float16, torch.bfloat16) and t.numel() >= SMALL


# ---- the hooks of a call ----

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _Call:
    """One call of a function.  forms: what it kept something in.  full: storage → bytes of what is large and stayed."""

    def __init__(self, rule: Rule, args: tuple[Any, ...], outer: _Hooks | None) -> None:
        self.rule, self.args, self.outer = rule, args, outer
        self.forms: set[str] = set()
        self.full: dict[int, int] = {}

    def pack(self, t: Tensor) -> _Codes | _Whole:
        if not _is_large(t) or type(t) not in _PLAIN or t.layout != torch.strided or _is_of_a_leaf(t):
            return _Whole(t, self.outer)
        form = "" if _overlaps(t) else self._form(t)
        mark, kept = _Mark(t, self.outer), _alive.get(id(t))
        if kept is None or kept.mark != mark or kept.form not in _SERVED_BY[form]:
            kept = _Codes(t, form, self.outer, mark) if form else _Whole(t, self.outer, mark)
            if self.rule is not _EXACT:  # which is not there each time
                _alive[id(t)] = kept
        if kept.form:
            self.forms.add(kept.form)
        elif not form:
            storage = t.untyped_storage()
            self.full[storage._cdata] = storage.nbytes()
        return kept

    def _form(self, t: Tensor) -> str:
        places = [place for place, arg in enumerate(self.args) if arg is t]
        asked = [self.rule.places.get(place, self.rule.others) for place in places] or [self.rule.others]
        form = min(asked, key=lambda form: len(_SERVED_BY[form]))
        return "" if form == "bfloat16" and t.dtype != torch.float32 else form


def _unpack(kept: _Codes | _Whole) -> Tensor:
    return kept.restore()


class _Whole:
    """A tensor kept as it is, as if there were no hooks: by those around, else under the check of its version."""

    __slots__ = ("__weakref__", "kept", "mark", "outer", "version")
    form = ""

    def __init__(self, t: Tensor, outer: _Hooks | None, mark: _Mark | None = None) -> None:
        self.outer, self.version, self.mark = outer, t._version, mark
        # Detached, for a result holds the node that would hold it.
        self.kept = t.detach() if outer is None else outer[0](t)

    def restore(self) -> Tensor:
        if self.outer is not None:
            return self.outer[1](self.kept)
        _check(self.kept, self.version, self.kept.shape)
        return self.kept


class _Codes:
    """A tensor kept in a form, its groups along the memory's own order."""

    __slots__ = (
        "__weakref__",
        "counter",
        "dtype",
        "form",
        "kept",
        "lying",
        "mark",
        "order",
        "outer",
        "rows",
        "version",
    )

    def __init__(self, t: Tensor, form: str, outer: _Hooks | None, mark: _Mark) -> None:
        self.form, self.outer, self.mark, self.dtype = form, outer, mark, t.dtype
        self.order = memory_order(t)
        dense = t.permute(self.order)
        self.lying = dense.shape
        rows = dense.reshape(-1, _columns(dense.shape))
        self.rows = rows.shape
        codes = FORMS[form].keep(rows)
        self.kept = codes if outer is None else tuple(outer[0](part) for part in codes)
        self.version = t._version
        # What PyTorch would check with the tensor in hand: one without memory of its own that shares its counter.
        self.counter = t.detach()
        self.counter.data = t.new_empty(0)

    def restore(self) -> Tensor:
        if self.outer is None:
            _check(self.counter, self.version, self.lying)
            kept = self.kept
        else:  # under which PyTorch does not check
            kept = tuple(self.outer[1](part) for part in self.kept)
        rows = FORMS[self.form].restore(kept, self.rows, self.dtype).contiguous()
        return as_it_was(rows.view(self.lying), self.order)


class _Mark:
    """By which another node that saves the very same tensor finds what one keeps of it.

    Equal are those of one object that lives, in one memory (a weak reference lets no other take its place), not
    written to since, under the same hooks. What is written through `.data` neither this nor PyTorch can see.
    """

    __slots__ = ("rest", "storage", "tensor")

    def __init__(self, t: Tensor, outer: _Hooks | None) -> None:
        self.tensor, self.storage = weakref.ref(t), StorageWeakRef(t.untyped_storage())
        self.rest = t._version, t.shape, t.stride(), t.storage_offset(), outer

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Mark) or self.tensor() is None or self.tensor() is not other.tensor():
            return False
        return self.storage == other.storage and self.rest == other.rest

    __hash__ = None  # type: ignore[assignment]


# id of a tensor → what lives of it in a graph
_alive: weakref.WeakValueDictionary[int, _Codes | _Whole] = weakref.WeakValueDictionary()


def _check(counter: Tensor, version: int, shape: Sequence[int]) -> None:
    if counter._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: of shape "
            f"{list(shape)}, it is at version {counter._version}; expected version {version} instead"
        )


def _columns(shape: Sequence[int]) -> int:
    """How many entries a row has: those of the last axes, as many as it takes."""
    columns = 1
    for size in reversed(shape):
        columns *= size
        if columns >= _COLUMNS:
            break
    return columns


def _overlaps(t: Tensor) -> bool:
    """Whether entries may share memory, as an expanded tensor's do: its codes would be more than it is."""
    reach = 0
    for size, stride in sorted(zip(t.shape, t.stride(), strict=True), key=lambda axis: axis[1]):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


_UNCHANGED = {
    *("Alias", "AsStrided", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split", "SplitWithSizes"),
    *("Squeeze", "T", "ToCopy", "Transpose", "Unbind", "UnsafeSplit", "UnsafeView", "Unsqueeze", "View"),
}


def _is_of_a_leaf(t: Tensor) -> bool:
    """Whether t is a leaf, or a view, cast or copy of one: a parameter, or an input, which live anyway."""
    node = t.grad_fn
    while node is not None and node.name().rstrip("0123456789").removesuffix("Backward") in _UNCHANGED:
        node = node.next_functions[0][0]
    return node is None or hasattr(node, "variable")
