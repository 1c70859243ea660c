"""Eager fallback: quantize the saved tensors of functions without a dedicated op, where the derivative allows it.

Saved-tensor hooks are active only while one function of `RULES` is called, never around a whole forward. So tensors
that hotrain's own operators, converted layers and other autograd functions save do not pass through them, and neither
do those of functions without a rule: PyTorch checks their versions as always, and `torch.func` and checkpoints see no
hooks.

**The table lists what may be rounded, not what may not**: a function without a rule stays exact, and the report names
it with its bytes. There are rules for

* products: the derivative is a polynomial of the saved tensor, so that an error stays in proportion to the largest
  element of its group: int8, as `formats` has it for matrices;
* smooth functions whose derivative is bounded and continuous (softplus, GLU, erf …): int8;
* poles and exponentials: the derivative divides by the saved tensor, or the saved tensor spans orders of magnitude, and
  int8 would flush small elements to zero. bfloat16 keeps their exponent and halves float32; 16-bit tensors stay as
  they are;
* `abs`, which needs the sign, and pooling, which needs the shape.

Exact stay: losses, log-softmax and log-sum-exp (the logits are needed in full precision); attention (a log-sum-exp
enters an exponential); sin and cos (the phase is needed in full precision, however large); comparisons, clamps, maxima,
sorting and indexing; prelu, selu and others whose derivative has a step; differences of saved tensors (var, std, lerp,
mse_loss, grid_sample), whose error is in proportion to the mean, not to the deviation; linalg, prod and cdist;
recurrent layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from ..private import fakes, saved_tensor_hooks, version_of
from ..saved import as_it_was, memory_order
from .formats import GROUPED, SMALL

_COLUMNS = 16  # the least elements of a row that is quantized in groups


class _Short:
    """bfloat16: the rounding error is relative to each element, and none becomes zero."""

    def keep(self, rows: Tensor) -> tuple[Tensor]:
        return (rows.to(torch.bfloat16),)

    def restore(self, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return kept[0].to(dtype)


class _Sign:
    """Sign: −1, 0 or 1, one byte per element."""

    def keep(self, rows: Tensor) -> tuple[Tensor]:
        return (rows.sgn().to(torch.int8),)

    def restore(self, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return kept[0].to(dtype)


class _Shape:
    """The shape alone: the unpacked tensor has undefined values."""

    def keep(self, rows: Tensor) -> tuple[Tensor]:
        return (rows.new_empty(0),)

    def restore(self, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return kept[0].new_empty(tuple(shape))


FORMS: dict[str, Any] = {"int8": GROUPED["int8"], "bfloat16": _Short(), "sign": _Sign(), "shape": _Shape()}
# form → forms that are precise enough where that one is asked for; "" is the tensor as it is
_SATISFIED_BY = {
    "": ("",),
    "bfloat16": ("", "bfloat16"),
    "int8": ("", "bfloat16", "int8"),
    "sign": ("", "sign"),
    "shape": ("", "bfloat16", "int8", "sign", "shape"),
}


@dataclass(frozen=True)
class Rule:
    """The form, of `FORMS`, in which a function's saved tensors are packed; "" for as they are.

    Attributes:
        others: form of all but the arguments in ``places``: results, arguments by keyword, and what the function makes
            of its arguments before it saves that (a cast, a transposed operand).
        places: position of an argument → its form.
    """

    others: str = ""
    places: Mapping[int, str] = field(default_factory=dict)


_EXACT = Rule()
_PRODUCT, _SMOOTH, _WIDE = Rule("int8"), Rule("int8"), Rule("bfloat16")
_DIVISION = Rule(places={0: "int8", 1: "bfloat16"})
_NORM = Rule(places={0: "bfloat16"})  # the derivative divides by the result; its group may include a far larger norm
_POOL = Rule(places={0: "shape"})


def _given(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _pow(*args: Any, **kwargs: Any) -> Rule:
    exponent = _given(args, kwargs, 1, "exponent", None)
    if isinstance(exponent, bool) or not isinstance(exponent, int | float) or abs(exponent) > 4:
        return _EXACT
    return _PRODUCT if exponent in (2, 3, 4) else _WIDE


def _elu(*args: Any, **kwargs: Any) -> Rule:
    # With any other alpha the derivative has a step at zero.
    return _SMOOTH if _given(args, kwargs, 1, "alpha", 1.0) == 1 else _EXACT


def _euclidean(name: str, *orders: Any) -> Callable[..., Rule]:
    def rule(*args: Any, **kwargs: Any) -> Rule:
        return _NORM if _given(args, kwargs, 1, name, orders[0]) in orders else _EXACT

    return rule


def _interpolate(*args: Any, **kwargs: Any) -> Rule:
    return _POOL if _given(args, kwargs, 3, "mode", "nearest") == "area" else _EXACT


def _everywhere(names: str, rule: Rule | Callable[..., Rule]) -> dict[Any, Any]:
    """One rule for the functions of these names, of torch and of Tensor, in-place ones too."""
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
_OPERATORS = (type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add))
_PLAIN = (Tensor, nn.Parameter, fakes.tensor)  # FakeTensor replaces any of them where bytes are predicted


def rule_of(looked_at: set[str], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Rule | None:
    """Look up the rule of a call.

    Args:
        looked_at: names of functions without a rule whose saved bytes are known. The first call of another one with a
            large tensor gets a rule under which all is saved as it is and counted.
        func: the function of PyTorch.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        The rule; None if the call runs unchanged.
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
    """Whether no call of func will have a rule, whatever its arguments."""
    return func not in RULES and name_of(func) in looked_at


def call(buffers: Any, rule: Rule, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with its saved tensors packed as the rule says.

    Within a checkpoint the function runs unchanged: both forwards must save the same. Outer hooks of others get the
    quantized values.

    Args:
        buffers: the `mode.Buffers` in which the result is recorded for the report.
        rule: of `rule_of`.
        func: the function of PyTorch.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        What func returns.
    """
    outer, allowed = saved_tensor_hooks()
    theirs = None if outer is None else getattr(outer[0], "__module__", None)
    if theirs in ("torch.utils.checkpoint", __name__) or not allowed:
        return func(*args, **kwargs)
    one = _Call(rule, args, outer)
    try:
        with saved_tensors_hooks(one.pack, _unpack):
            y = func(*args, **kwargs)
    finally:
        one.args = ()  # the graph keeps the hooks alive, and they would keep the arguments alive
    name = name_of(func)
    buffers.looked_at.add(name)
    if one.forms:
        buffers.serve(f"{name} (saved)", ", ".join(sorted(one.forms)))
    if one.full:
        size = sum(one.full.values()) / 2**20
        why = "no rounding rule for it" if rule is _EXACT else "its derivative needs full precision"
        if name not in buffers.full:
            buffers.leave(name, f"{size:.1f} MiB per call, {why}")
    elif one.forms:
        buffers.full.pop(name, None)  # without an operator of its own, but packed here
    return y


def name_of(func: Any) -> str:
    """The name of a function in the report."""
    return getattr(func, "__name__", str(func)).strip("_")


def _is_large(t: Tensor) -> bool:
    return t.dtype in (torch.float32, torch.float16, torch.bfloat16) and t.numel() >= SMALL


# ---- the hooks of a call ----

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _Call:
    """One call of a function, with the forms it packed into and, by storage, the bytes of large tensors saved as is."""

    def __init__(self, rule: Rule, args: tuple[Any, ...], outer: _Hooks | None) -> None:
        self.rule, self.args, self.outer = rule, args, outer
        self.forms: set[str] = set()
        self.full: dict[int, int] = {}

    def pack(self, t: Tensor) -> _Codes | _Whole:
        if not _is_large(t) or type(t) not in _PLAIN or t.layout != torch.strided or _is_of_a_leaf(t):
            return _Whole(t, self.outer)
        form = "" if _overlaps(t) else self._form(t)
        mark, kept = _Mark(t, self.outer), _alive.get(id(t))
        if kept is None or kept.mark != mark or kept.form not in _SATISFIED_BY[form]:
            kept = _Codes(t, form, self.outer, mark) if form else _Whole(t, self.outer, mark)
            if self.rule is not _EXACT:  # which is there for the first call alone
                _alive[id(t)] = kept
        if kept.form:
            self.forms.add(kept.form)
        elif not form:
            storage = t.untyped_storage()
            self.full[StorageWeakRef(storage).cdata] = storage.nbytes()
        return kept

    def _form(self, t: Tensor) -> str:
        places = [place for place, arg in enumerate(self.args) if arg is t]
        asked = [self.rule.places.get(place, self.rule.others) for place in places] or [self.rule.others]
        form = min(asked, key=lambda form: len(_SATISFIED_BY[form]))
        return "" if form == "bfloat16" and t.dtype != torch.float32 else form


def _unpack(kept: _Codes | _Whole) -> Tensor:
    return kept.restore()


class _Whole:
    """A tensor saved as it is: by the outer hooks, or, as PyTorch saves it, with a check of its version."""

    __slots__ = ("__weakref__", "kept", "mark", "outer", "version")
    form = ""

    def __init__(self, t: Tensor, outer: _Hooks | None, mark: _Mark | None = None) -> None:
        self.outer, self.version, self.mark = outer, version_of(t), mark
        # Detached: a result refers to its node, which would refer to the result.
        self.kept = t.detach() if outer is None else outer[0](t)

    def restore(self) -> Tensor:
        if self.outer is not None:
            return self.outer[1](self.kept)
        _check(self.kept, self.version, self.kept.shape)
        return self.kept


class _Codes:
    """A packed tensor, its groups along the axes in memory order."""

    __slots__ = (
        "__weakref__",
        "counter",
        "dtype",
        "form",
        "kept",
        "mark",
        "order",
        "outer",
        "rows",
        "shape",
        "version",
    )

    def __init__(self, t: Tensor, form: str, outer: _Hooks | None, mark: _Mark) -> None:
        self.form, self.outer, self.mark, self.dtype = form, outer, mark, t.dtype
        self.order = memory_order(t)
        dense = t.permute(self.order)
        self.shape = dense.shape
        rows = dense.reshape(-1, _columns(dense.shape))
        self.rows = rows.shape
        codes = FORMS[form].keep(rows)
        self.kept = codes if outer is None else tuple(outer[0](part) for part in codes)
        self.version = version_of(t)
        # For PyTorch's check of the version: an empty tensor that shares the version counter.
        self.counter = t.detach()
        self.counter.data = t.new_empty(0)

    def restore(self) -> Tensor:
        if self.outer is None:
            _check(self.counter, self.version, self.shape)
            kept = self.kept
        else:  # under which PyTorch does not check
            kept = tuple(self.outer[1](part) for part in self.kept)
        rows = FORMS[self.form].restore(kept, self.rows, self.dtype).contiguous()
        return as_it_was(rows.view(self.shape), self.order)


class _Mark:
    """Identity of a saved tensor, by which a second node that saves it finds the first one's packed values.

    Two are equal if they are of one live tensor in one storage (weak references exclude a new one at the same address),
    not written to since, under the same hooks. Writes through `.data` are invisible to this and to PyTorch.
    """

    __slots__ = ("rest", "storage", "tensor")

    def __init__(self, t: Tensor, outer: _Hooks | None) -> None:
        self.tensor, self.storage = weakref.ref(t), StorageWeakRef(t.untyped_storage())
        self.rest = version_of(t), t.shape, t.stride(), t.storage_offset(), outer

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Mark) or self.tensor() is None or self.tensor() is not other.tensor():
            return False
        return self.storage == other.storage and self.rest == other.rest

    __hash__ = None  # type: ignore[assignment]


# id of a tensor → what a live graph saves of it
_alive: weakref.WeakValueDictionary[int, _Codes | _Whole] = weakref.WeakValueDictionary()


def _check(counter: Tensor, version: int, shape: Sequence[int]) -> None:
    if version_of(counter) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: of shape "
            f"{list(shape)}, it is at version {version_of(counter)}; expected version {version} instead"
        )


def _columns(shape: Sequence[int]) -> int:
    """Elements per row: the product of the last axes, as many as `_COLUMNS` takes."""
    columns = 1
    for size in reversed(shape):
        columns *= size
        if columns >= _COLUMNS:
            break
    return columns


def _overlaps(t: Tensor) -> bool:
    """Whether elements may share memory, as an expanded tensor's do: codes would take more bytes than the tensor."""
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
    """Whether t is a leaf (a parameter or an input, alive anyway) or a view, cast or copy of one."""
    node = t.grad_fn
    while node is not None and node.name().rstrip("0123456789").removesuffix("Backward") in _UNCHANGED:
        node = node.next_functions[0][0]
    return node is None or hasattr(node, "variable")
