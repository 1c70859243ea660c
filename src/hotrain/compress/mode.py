"""TorchFunctionMode that replaces PyTorch's functions by the operators of `ops` during a converted model's forward.

Functions that are not in `TABLE` run unchanged. So do calls with arguments that the operators do not support; the
report says why. Nothing here depends on what changes from step to step, so that nothing is recompiled.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import autograd, backward
from ..private import constant_in_graphs, is_transformed, is_view, map_tensors
from ..saved import memory_order
from . import eager, kernel_ops, ops, rematerialize, sharing
from .attention import backend, prepared_mask
from .formats import FORMATS, GROUPED, SMALL
from .functions import InPlace
from .mode_stack import Mode, aside
from .sharing import Origins, Unfinished, current_checkpoint
from .slopes import ACTIVATIONS

_traced = torch.ops.hotrain


def _operators() -> Any:
    """Where operators are called: compiled, `torch.ops`, so that Dynamo sees one node; else their Python functions."""
    return _traced if torch.compiler.is_compiling() else ops


_numbers = itertools.count()
EAGER = 'the host limits the speed of the GPU: use torch.compile, with CUDA graphs (mode="reduce-overhead") if possible'
UNCUT = "compiled: from Inductor's cache or by another backend, so that what the graph keeps is unknown"
DERIVATIVE, BIT = "4-bit derivative", "1 bit per element"  # formats in the report
ATTRIBUTE = "_hotrain_buffers"  # of a module: its `Buffers`


@dataclass(frozen=True)
class Example:
    """The arguments of a model's first call as meta tensors, and the autocast that it ran under.

    Attributes:
        model: a weak reference to the model.
        args: positional arguments.
        kwargs: keyword arguments.
        autocast: device type, and dtype or None.
    """

    model: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: tuple[str, torch.dtype | None]

    @classmethod
    def of(cls, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Example:
        """The example of a call of the model with these arguments."""

        def shape_alone(t: Tensor) -> Tensor:
            return torch.empty_like(t, device="meta").requires_grad_(t.requires_grad)

        shapes, named = map_tensors(shape_alone, (args, dict(kwargs)))
        kind = next((t.device.type for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), "cpu")
        return cls(weakref.ref(model), shapes, named, (kind, autograd.autocast_to(kind)))


@dataclass
class Buffers:
    """What a converted model saves: by operator its format (`served`), or why it is kept in full precision (`full`).

    Attributes:
        full: operator → why its tensors are kept in full precision.
        origins: tensors of the forward that runs whose producer's saved tensors can be shared.
        looked_at: functions without an operator of which `eager` knows what they save.
        passing: functions with neither an operator nor a rule.
        uncut: whether the model was traced, and `compiled` has seen no graph of it.
        waits: whether the model ran in eager mode on a GPU.
        name: identity of the model in a graph's metadata.
        graphs: bytes that each compiled graph keeps.
        example: the first call.
        root: a weak reference to the model.
    """

    served: dict[str, str] = field(default_factory=dict)
    full: dict[str, str] = field(default_factory=dict)
    origins: Origins = field(default_factory=Origins, repr=False, compare=False)
    looked_at: set[str] = field(default_factory=set, repr=False, compare=False)
    passing: set[Any] = field(default_factory=set, repr=False, compare=False)
    uncut: bool = field(default=False, repr=False, compare=False)
    waits: bool = field(default=False, repr=False, compare=False)
    name: str = field(default_factory=lambda: str(next(_numbers)), repr=False, compare=False)
    graphs: list[int] = field(default_factory=list, repr=False, compare=False)
    example: Example | None = field(default=None, repr=False, compare=False)
    root: Any = field(default=None, repr=False, compare=False)

    def see_from(self, fast: Any, model: Any) -> None:
        """Record the first call of a compiled model, whose forward runs no Python of hotrain.

        Args:
            fast: what `torch.compile` returned, which gets a hook.
            model: the model.
        """

        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if model.training and torch.is_grad_enabled():
                self.see(model, args, kwargs)
                handle.remove()

        handle = fast.register_forward_pre_hook(hook, with_kwargs=True)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"passing": set(), "example": None, "root": None}

    def see(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record the shapes of the first call, from which the report predicts total bytes."""
        if self.example is None:
            self.example = Example.of(model, args, kwargs)

    @constant_in_graphs
    def serve(self, what: str, form: str) -> None:
        """Record that an operator saves its tensors in a format."""
        self.served[what] = form

    @constant_in_graphs
    def leave(self, what: str, why: str) -> None:
        """Record why an operator's tensors are kept in full precision."""
        self.full[what] = why

    def __str__(self) -> str:
        rows = [(what, form) for what, form in self.served.items()]
        rows += [(what, f"kept in full precision: {why}") for what, why in self.full.items()]
        rows += [("everything else", UNCUT)] * self.uncut + [("in eager mode", EAGER)] * self.waits
        if not rows:
            return "  between the layers: known after a training forward"
        width = max(len(what) for what, _ in rows)
        return "\n".join(["  between the layers:", *(f"    {what:<{width}}  {how}" for what, how in rows)])

    @constant_in_graphs
    def region(self) -> str:
        """The mark that Dynamo writes to the metadata of this model's nodes."""
        self.waits = False
        try:
            from . import compiled
        except (ImportError, AttributeError) as error:
            self.leave("in compiled graphs", f"this PyTorch lacks what the partitioner needs: {error}")
            return ""
        return compiled.region(self)

    # Dynamo runs them once and traces nothing.


class Scope:
    """One forward of a block: the records that it writes to, and the origins that it knows.

    Under Dynamo the origins are made while it traces: outside objects must not be mutated within a checkpoint.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.origins = Origins() if torch.compiler.is_dynamo_compiling() else buffers.origins

    def serve(self, what: str, form: str) -> None:
        """As `Buffers.serve`."""
        self.buffers.serve(what, form)

    def leave(self, what: str, why: str) -> None:
        """As `Buffers.leave`."""
        self.buffers.leave(what, why)


class Compressed(Mode):
    """The mode.

    Args:
        buffers: the records that it writes to.
    """

    def __init__(self, buffers: Buffers) -> None:
        super().__init__()
        self.buffers = buffers
        self.scope = Scope(buffers)
        self.checkpoint = current_checkpoint()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        compiling = torch.compiler.is_compiling()
        if not compiling and func in self.buffers.passing:  # nearly every call
            return func(*args, **kwargs)
        handler = TABLE.get(func)
        differentiates = torch.is_grad_enabled() and kwargs.get("out") is None
        if handler is not None and differentiates and self._may_compress():
            if compiling:
                y = handler(self.scope, *args, **kwargs)
            else:
                with aside():
                    y = handler(self.scope, *args, **kwargs)
            if y is not None:
                return y
        if compiling or not differentiates:
            return func(*args, **kwargs)
        rule = eager.rule_of(self.buffers.looked_at, func, args, kwargs)
        if rule is None:
            if handler is None and eager.passes(self.buffers.looked_at, func):
                self.buffers.passing.add(func)
            return func(*args, **kwargs)
        if not self._may_compress():
            return func(*args, **kwargs)
        with aside():
            return eager.call(self.buffers, rule, func, args, kwargs)

    def stands_for(self, buffers: Buffers) -> bool:
        """Whether this mode does what a new one with these buffers would, in a forward that begins now."""
        mine = self.buffers is buffers and self.scope.origins is buffers.origins
        return mine and current_checkpoint() == self.checkpoint

    def _may_compress(self) -> bool:
        # A checkpoint that begins inside of the mode runs its second forward outside of it: both must save the same.
        return not _transforms() and current_checkpoint() == self.checkpoint


@constant_in_graphs
def _transforms() -> bool:
    """Whether `torch.func` transforms this call, which autograd functions with a context do not support."""
    return is_transformed()


# Dynamo calls it once and takes the result as a constant.


def _large(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point() and t.numel() >= SMALL


def _activation(name: str) -> Callable[..., Tensor | None]:
    def run(scope: Scope, input: Tensor, inplace: bool = False) -> Tensor | None:
        if not (_large(input) and input.requires_grad):
            return None
        unfinished = scope.origins.unfinished_of(input)
        if unfinished is not None and kernel_ops.serves_norm(unfinished.x, name):
            scope.serve(name, DERIVATIVE if ACTIVATIONS[name].levels else BIT)
            return _finished(scope, unfinished, name, input if inplace else None)
        kind, known = ACTIVATIONS[name], scope.origins.of(input)
        if kind.by_input:
            scope.serve(name, FORMATS["curve"])
            image = _is_image(input) or (known is not None and rematerialize.is_image(known.recipe))
            y, *codes = _operators().curve(input, name, FORMATS["curve"], image)
            recipe = rematerialize.of(name, rematerialize.values(FORMATS["curve"], _columns(input, image), image))
        else:
            scope.serve(name, DERIVATIVE if kind.levels else BIT)
            y = _operators().slope(input, name)
            recipe, codes = ("", []) if known is None else (rematerialize.of(name, known.recipe), list(known.tensors))
        if inplace:
            y = _written(scope, input, y)
        if recipe:
            scope.origins.note(y, recipe, *codes)
        return y

    return run


def _finished(scope: Scope, what: Unfinished, name: str, place: Tensor | None = None) -> Tensor:
    """Fused batch norm, shortcut and the activation of this name ("" for none), written to ``place`` if given."""
    y, codes, scale = _operators().normalized(what.x, what.mean, what.r, what.w, what.b, what.shortcut, name)
    if place is not None:
        y = _written(scope, place, y)
    if what.shortcut is None:
        recipe = rematerialize.normed(rematerialize.values(FORMATS["norm"], _columns(y, True), True), False)
        scope.origins.note(y, rematerialize.of(name, recipe) if name else recipe, codes, scale, what.w, what.b)
    return y


def _sum(func: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """A handler of additions: a shortcut is added to batch norm's result in the same kernel."""

    def run(scope: Scope, input: Any, other: Any, **kwargs: Any) -> Tensor | None:
        if kwargs or not (isinstance(input, Tensor) and isinstance(other, Tensor)) or input.shape != other.shape:
            return None
        pairs = [(input, other), (other, input)]
        in_place = func in (Tensor.add_, operator.iadd)
        # An in-place sum overwrites its operand, and what shares memory with it.
        for normed, shortcut in pairs[:1] if in_place else pairs:
            what = scope.origins.unfinished_of(normed)
            if what is not None and what.shortcut is None and _same_layout(what.x, shortcut):
                y = func(input, other)
                if not in_place or sharing.read_apart():
                    scope.origins.note_unfinished(y, dataclasses.replace(what, shortcut=shortcut))
                return y
        return None

    return run


def _same_layout(x: Tensor, other: Tensor) -> bool:
    return x.dtype == other.dtype and other.is_contiguous(memory_format=torch.channels_last)


def _written(scope: Scope, input: Tensor, y: Tensor) -> Tensor:
    """y written to input, as an in-place function returns it."""
    if not torch.compiler.is_dynamo_compiling():
        return input.copy_(y) if is_view(input) else InPlace.apply(input, y)  # a view's base has other elements
    # The gradient of `copy_` is a sum with zeros in another layout; the compiler removes an unused one.
    input.copy_(y)
    return y


def _is_image(t: Tensor) -> bool:
    """Whether the memory layout is channels-last."""
    return t.dim() == 4 and memory_order(t)[-1] == 1


def _columns(t: Tensor, image: bool) -> int:
    return t.shape[1 if image else -1]


_gelu_exact, _gelu_tanh = _activation("gelu"), _activation("gelu_tanh")


def _gelu(scope: Scope, input: Tensor, approximate: str = "none") -> Tensor | None:
    if approximate not in ("none", "tanh"):
        return None
    return (_gelu_tanh if approximate == "tanh" else _gelu_exact)(scope, input)


_leaky = _activation("leaky_relu")


def _leaky_relu(scope: Scope, input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor | None:
    if negative_slope != 0.01:
        scope.leave("leaky_relu", f"negative_slope={negative_slope}; only 0.01 is supported")
        return None
    return _leaky(scope, input, inplace)


def _norm(
    scope: Scope,
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    kind: str,
    dims: int,
    eps: float,
    *statistics: Any,
) -> Tensor:
    """The norm of that kind (`functions.Norm`), with its result noted in `Origins`."""
    found = _operators().norm(x, w, b, kind, dims, eps, FORMATS["norm"], *statistics)
    _note_norm(scope, found, w, b, kind)
    return found[0]


def _note_norm(
    scope: Scope, found: tuple[Tensor, Tensor, Tensor], w: Tensor | None, b: Tensor | None, kind: str
) -> None:
    y, codes, scale = found
    image = kind in ("group", "batch")
    recipe = rematerialize.normed(rematerialize.values(FORMATS["norm"], _columns(y, image), image), kind == "rms_cast")
    scope.origins.note(y, recipe, codes, scale, w, b)


def _wants(x: Tensor, *parameters: Tensor | None) -> bool:
    return x.requires_grad or any(p is not None and p.requires_grad for p in parameters)


def _ends_in(input: Tensor, shape: Any) -> bool:
    return 0 < len(shape) <= input.dim() and input.shape[-len(shape) :] == torch.Size(shape)


def _layer_norm(
    scope: Scope,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    if not (_large(input) and _wants(input, weight, bias) and _ends_in(input, normalized_shape)):
        return None
    scope.serve("layer_norm", FORMATS["norm"])
    return _norm(scope, input, weight, bias, "layer", len(normalized_shape), eps)


def _rms_norm(
    scope: Scope,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | None:
    if not (_large(input) and _wants(input, weight) and _ends_in(input, normalized_shape)):
        return None
    scope.serve("rms_norm", FORMATS["norm"])
    if eps is None:
        eps = torch.finfo(backward.wide(input.dtype)).eps
    return _norm(scope, input, weight, None, "rms", len(normalized_shape), eps)


def _group_norm(
    scope: Scope,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    if not (_large(input) and input.dim() >= 3 and _wants(input, weight, bias)):
        return None
    scope.serve("group_norm", FORMATS["norm"])
    return _norm(scope, input, weight, bias, "group", num_groups, eps)


def _batch_norm(
    scope: Scope,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if not (_large(input) and _wants(input, weight, bias)):
        return None
    if not training:
        scope.leave("batch_norm", "normalized with running statistics; only batch statistics are supported")
        return None
    if input.dim() < 2:
        return None
    if input.numel() == input.shape[1]:  # one value per channel, which PyTorch refuses
        return None
    scope.serve("batch_norm", FORMATS["norm"])
    if torch.compiler.is_dynamo_compiling() and kernel_ops.serves_norm(input):
        mean, r = _operators().batch_statistics(input, running_mean, running_var, momentum, eps)
        what = Unfinished(input, mean, r, weight, bias)
        y = _finished(scope, what, "")
        scope.origins.note_unfinished(y, what)
        return y
    return _norm(scope, input, weight, bias, "batch", 1, eps, running_mean, running_var, momentum)


def _softmax(
    scope: Scope, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Tensor | None:
    if not (_large(input) and input.requires_grad) or dim is None:
        return None
    scope.serve("softmax", FORMATS["softmax"])
    y, *codes = _operators().kept_softmax(input if dtype is None else input.to(dtype), dim, FORMATS["softmax"])
    if dim in (-1, input.dim() - 1):
        scope.origins.note(y, rematerialize.values(FORMATS["softmax"], _columns(y, False)), *codes)
    return y


def _tensor_softmax(scope: Scope, input: Tensor, dim: int, dtype: Any = None) -> Tensor | None:
    return _softmax(scope, input, dim, dtype=dtype)


def _dropout(
    scope: Scope, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor | None:
    if p == 0 and isinstance(input, Tensor):
        return input  # as PyTorch does; the next layer must find its origin
    if not (training and 0 < p <= 1 and _large(input) and input.requires_grad):
        return None
    scope.serve("dropout", BIT)
    y = _operators().kept_dropout(input, p)
    return _written(scope, input, y) if inplace else y


def _forms(a: Tensor, b: Tensor, form: str) -> tuple[str, str] | None:
    """The forms of a product's factors; None if neither is large and needed by the other's gradient."""
    large_a, large_b = _large(a) and b.requires_grad, _large(b) and a.requires_grad
    return (form if large_a else "exact", form if large_b else "exact") if large_a or large_b else None


def _form_of(scope: Scope, t: Tensor, form: str) -> tuple[str, list[Tensor | None]]:
    """The form in which t is saved: the recipe and tensors of its origin if that is known, else the format given."""
    known = None if form == "exact" else scope.origins.of(t)
    return (form, []) if known is None else (known.recipe, list(known.tensors))


def _values(form: str, t: Tensor) -> str:
    """The recipe of codes of t, contiguous or channels-last; "" for other memory layouts."""
    order = memory_order(t)
    if order == list(range(t.dim())):
        return rematerialize.values(form, _columns(t, False))
    return rematerialize.values(form, _columns(t, True), True) if order == [0, 2, 3, 1] else ""


def _product(scope: Scope, input: Any, other: Any) -> Tensor | None:
    a, b = input, other
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dtype.is_complex or b.dtype.is_complex:
        return None
    forms = _forms(a, b, FORMATS["product"])
    if forms is None:
        return None
    scope.serve("mul", FORMATS["product"])
    saved = [_form_of(scope, t, form) for t, form in zip((a, b), forms, strict=True)]
    y, made = _operators().product(a, b, saved[0][0], saved[1][0], saved[0][1], saved[1][1])
    # Both are saved and of one shape: the next layer can share them and compute the product again.
    if "exact" not in forms and a.shape == b.shape:
        parts, begin = [], 0
        for t, (form, given) in zip((a, b), saved, strict=True):
            own = form in GROUPED
            recipe = _values(form, t) if own else form
            parts.append((recipe, made[begin : begin + 2] if own else given))
            begin += 2 * own
        if parts[0][0] and parts[1][0]:
            scope.origins.note(y, rematerialize.product(parts[0][0], parts[1][0]), *parts[0][1], *parts[1][1])
    return y


def _matmul(scope: Scope, input: Any, other: Any) -> Tensor | None:
    a, b = input, other
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point() and b.is_floating_point()):
        return None
    forms = _forms(a, b, FORMATS["matmul"])
    if forms is None:
        return None
    if a.dim() > 2 and b.dim() == 2:
        return _linear(scope, a, b.mT)  # as PyTorch computes it
    if a.dim() < 3 or b.dim() < 3:
        scope.leave(
            "matmul", "an operand is a vector, or the first one a matrix; only batches of matrices are supported"
        )
        return None
    scope.serve("matmul", FORMATS["matmul"])
    a_form, given = _form_of(scope, a, forms[0])
    return _operators().kept_matmul(a, b, a_form, forms[1], given)


def _bmm(scope: Scope, input: Any, mat2: Any, out_dtype: Any = None) -> Tensor | None:
    # What `bmm` refuses must stay refused, though `matmul` broadcasts it.
    fits = isinstance(input, Tensor) and isinstance(mat2, Tensor) and input.dim() == mat2.dim() == 3
    if out_dtype is not None or not fits or input.shape[0] != mat2.shape[0]:
        return None
    return _matmul(scope, input, mat2)


def _linear(scope: Scope, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if not (_large(input) and input.dim() > 2 and weight.dim() == 2 and weight.requires_grad):
        return None
    scope.serve("linear (exact product)", FORMATS["linear"])
    form, given = _form_of(scope, input, FORMATS["linear"])
    y, made = _operators().kept_linear(input, weight, bias, form, given)
    if made:
        scope.origins.note(input, rematerialize.values(form, _columns(input, False)), *made)
    return y


def _pair(value: Any) -> list[int]:
    pair = list(value) if isinstance(value, tuple | list) else [value]
    return pair * 2 if len(pair) == 1 else pair


def _step(stride: Any, kernel: list[int]) -> list[int]:
    return kernel if stride is None or stride in ([], ()) else _pair(stride)


def _conv2d(
    scope: Scope,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    if not (_large(input) and input.dim() == 4 and _wants(input, weight)):
        return None
    if input.shape[1] < 16 and weight.requires_grad:
        return None
    if isinstance(padding, str):
        scope.leave("conv2d", f"padding={padding!r}; only numbers are supported")
        return None
    scope.serve("conv2d (exact product)", FORMATS["conv"])
    form, given = _form_of(scope, input, FORMATS["conv"])
    y, made = _operators().kept_conv2d(
        input, weight, bias, _pair(stride), _pair(padding), _pair(dilation), groups, form, given
    )
    if made:
        scope.origins.note(input, rematerialize.values(form, _columns(input, True), True), *made)
    return y


def _max_pool2d(
    scope: Scope,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    if not (_large(input) and input.dim() == 4 and input.requires_grad) or return_indices:
        return None
    kernel = _pair(kernel_size)
    if _pair(dilation) != [1, 1] or kernel[0] * kernel[1] > 256:
        scope.leave("max_pool2d", "dilated, or a window of more than 256 elements")
        return None
    scope.serve("max_pool2d", "1 byte per output")
    return _operators().kept_max_pool2d(input, kernel, _step(stride, kernel), _pair(padding), ceil_mode)


def _avg_pool2d(
    scope: Scope,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor | None:
    if not (_large(input) and input.dim() == 4 and input.requires_grad):
        return None
    scope.serve("avg_pool2d", "nothing saved")
    kernel = _pair(kernel_size)
    return _operators().kept_avg_pool2d(
        input, kernel, _step(stride, kernel), _pair(padding), ceil_mode, count_include_pad, divisor_override
    )


def _attention(
    scope: Scope,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if not _large(query) or not (query.requires_grad or key.requires_grad or value.requires_grad):
        return None
    q, k, v = map(autograd.autocast, (query, key, value))
    mask = attn_mask
    if mask is not None and mask.is_floating_point():
        mask = autograd.autocast(mask)
    kind = backend(q, k, v, mask, dropout_p, is_causal)
    if kind is None or (q.dim() == 4 and q.shape[1] != k.shape[1] and not enable_gqa):
        scope.leave("scaled_dot_product_attention", "no fused kernel runs it here")
        return None
    scope.serve("scaled_dot_product_attention", f"{FORMATS['query_key']}, {FORMATS['value_output']}")
    if mask is not None and mask.dtype != torch.bool:
        mask = prepared_mask(mask, q, k, kind)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    y, *codes = _operators().kept_attention(
        q, k, v, mask, dropout_p, is_causal, scale, kind, FORMATS["query_key"], FORMATS["value_output"]
    )
    # Models transpose heads and tokens next, which gives the memory layout of the codes: `_turned` notes that.
    scope.origins.note(y, rematerialize.heads(FORMATS["value_output"], _columns(y, False), dropout_p > 0), *codes)
    return y


# ---- views: an origin is known of a view as well ----


def _turned(scope: Scope, input: Tensor, *axes: Any, **kwargs: Any) -> Tensor | None:
    """A handler of `transpose` and `permute` of attention's result."""
    known = scope.origins.of(input, by_heads=True)
    if known is None or kwargs or not rematerialize.is_by_heads(known.recipe):
        return None
    order = axes[0] if len(axes) == 1 else axes
    if len(order) == 2:
        swapped = list(range(input.dim()))
        swapped[order[0]], swapped[order[1]] = swapped[order[1]], swapped[order[0]]
        order = swapped
    if [axis % input.dim() for axis in order] != [0, 2, 1, 3]:
        return None
    y = input.permute(0, 2, 1, 3)
    scope.origins.note(y, rematerialize.by_tokens(known.recipe), *known.tensors)
    return y


def _reshaped(func: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    def run(scope: Scope, input: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        known = scope.origins.of(input)
        retyped = isinstance(args[0] if args else kwargs.get("dtype"), torch.dtype)
        if known is None or not rematerialize.is_in_order(known.recipe) or retyped:
            return None
        y = func(input, *args, **kwargs)
        if y is not input:
            scope.origins.note(y, known.recipe, *known.tensors)
        return y

    return run


def _full(what: str, why: str) -> Callable[..., None]:
    """A handler that replaces nothing and records, for large tensors, why they are kept in full precision.

    Compiled, the compiler decides what is kept, and `compiled` in which form.
    """

    def run(scope: Scope, *args: Any, **kwargs: Any) -> None:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        if torch.compiler.is_dynamo_compiling():
            return
        if tensors and _large(tensors[0]) and _wants(*tensors):
            scope.leave(what, why)

    return run


_adaptive = _full("interpolate", 'mode="area" saves its input; other modes save nothing')


def _interpolate(
    scope: Scope,
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    *args: Any,
    **kwargs: Any,
) -> None:
    if mode == "area":
        _adaptive(scope, input)


# ---- hotrain's own operators, as layers and composed norms call them under Dynamo ----


def serve_layer(op: Callable[..., Tensor]) -> None:
    """Let a converted layer share its producer's saved tensors when compiled.

    Args:
        op: the layer's operator; its arguments seven and eight are the recipe of its input and the tensors for it.
    """
    TABLE[op] = _layer(op)


def _layer(op: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    def run(scope: Scope, *args: Any) -> Tensor | None:
        known = None if args[7] else scope.origins.of(args[0])
        return None if known is None else op(*args[:7], known.recipe, list(known.tensors), *args[9:])

    return run


def _composed_norm(
    scope: Scope, x: Tensor, w: Tensor | None, b: Tensor | None, kind: str, *rest: Any
) -> tuple[Tensor, Tensor, Tensor] | None:
    if kind != "rms_cast":  # called in an inner block, in place of a function of PyTorch
        return None
    found: tuple[Tensor, Tensor, Tensor] = _operators().norm(x, w, b, kind, *rest)
    _note_norm(scope, found, w, b, kind)
    return found


def _function(scope: Scope, input: Tensor, name: str) -> Tensor | None:
    return _named(name)(scope, input)


def _function_in_place(scope: Scope, input: Tensor, name: str) -> Tensor | None:
    return _named(name)(scope, input, True)


def _named(name: str) -> Callable[..., Tensor | None]:
    return TABLE[getattr(F, name)]


TABLE: dict[Any, Callable[..., Any]] = {
    _traced.norm: _composed_norm,
    _traced.function: _function,
    _traced.function_: _function_in_place,
    F.gelu: _gelu,
    F.leaky_relu: _leaky_relu,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,  # what Dynamo traces for it
    F.group_norm: _group_norm,
    F.batch_norm: _batch_norm,
    F.softmax: _softmax,
    torch.softmax: _tensor_softmax,
    Tensor.softmax: _tensor_softmax,
    F.dropout: _dropout,
    **{func: _sum(func) for func in (torch.add, Tensor.add, Tensor.add_, operator.add, operator.iadd)},
    F.linear: _linear,
    F.conv2d: _conv2d,
    F.max_pool2d: _max_pool2d,
    torch.max_pool2d: _max_pool2d,
    F.avg_pool2d: _avg_pool2d,
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, operator.mul), _product),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, operator.matmul), _matmul),
    **dict.fromkeys((torch.bmm, Tensor.bmm), _bmm),
    **dict.fromkeys((torch.transpose, Tensor.transpose, torch.permute, Tensor.permute), _turned),
    **{
        func: _reshaped(func)
        for func in (torch.reshape, torch.flatten, Tensor.reshape, Tensor.flatten, Tensor.view, Tensor.contiguous)
    },
    F.multi_head_attention_forward: _full("multi_head_attention_forward", "PyTorch runs it in one call"),
    F.interpolate: _interpolate,
    F.glu: _full("glu", "it saves its input; no compressed operator for it"),
    **dict.fromkeys(
        (F.log_softmax, torch.log_softmax, Tensor.log_softmax),
        _full("log_softmax", "it saves its result; no compressed operator for it"),
    ),
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), _activation("relu")),
    **dict.fromkeys((F.sigmoid, torch.sigmoid, Tensor.sigmoid), _activation("sigmoid")),
    **dict.fromkeys((F.tanh, torch.tanh, Tensor.tanh), _activation("tanh")),
    **{getattr(F, name): _activation(name) for name in ("silu", "mish", "hardswish", "relu6", "hardsigmoid")},
}
