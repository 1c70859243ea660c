"""Activation functions: y = f(x), g_x = g_y f'(x).

Backward needs f'(x), which is saved in 4 bits per element, or in 1 bit where it has two values. Functions with
``by_input`` save x quantized instead, along its last axis or along the channels of an image; the next layer's input is
rematerialized from the same codes. f, f' and these formats are in `slopes.ACTIVATIONS`: a function added there is
compressed under its name in `torch.nn.functional`, `torch` and `Tensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import autograd
from ...autograd import not_a_view, once
from ...kernels import FUNCTIONS
from ...private import is_view
from ...quantize.integer import wide
from ...saved import Levels, as_it_was, memory_order
from .. import rematerialize
from ..codes import pack, unpack
from ..formats import BITS, FORMATS
from ..launcher import is_eager, launch, opaque, operator_for, supported, supported_in_eager
from ..rematerialize import restore
from ..sharing import Gate, Unfinished
from ..slopes import ACTIVATIONS, ELSE, FACTOR, LEAKS
from .base import (
    Handlers,
    Scope,
    custom_op,
    is_channels_last,
    is_large,
    uncompressed,
    with_codes,
    without_autocast,
    written,
)
from .batch_norm import finished, is_fused

_DERIVATIVE, _BIT = "4-bit derivative", "1 bit per element"  # formats in the report
_GATES = ("relu", "relu6")  # functions with a 1-bit derivative that the kernels support


# ---- f and its derivative; tensors have their axes in the order of their memory layout ----


def _activate_fake(t: Tensor, name: str, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    columns = t.shape[-1]
    return torch.empty_like(t), t.new_empty(t.numel() // columns, columns // 2, dtype=torch.uint8)


@opaque("activate(Tensor t, str name, Tensor? bias) -> (Tensor, Tensor)", _activate_fake)
def _activate(t: Tensor, name: str, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """f(t + bias), and its 4-bit derivative; bias is along the last axis."""
    kind = ACTIVATIONS[name]
    levels = kind.levels
    assert levels is not None

    def reference() -> tuple[Tensor, Tensor]:
        x = t if bias is None else wide(t) + bias
        return kind.f(x).to(t.dtype), levels.keep(x, kind.slope)[0]

    args = (t.view(-1, t.shape[-1]), name, (levels.first, levels.per_one), bias)
    y, marks = launch(t.device, "activation.activate", reference, *args)
    return y.view_as(t), marks


def _slope_gradient_fake(g: Tensor, marks: Tensor, name: str, sums: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(g), g.new_empty(g.shape[-1] if sums else 0, dtype=torch.float32)


@opaque("slope_gradient(Tensor g, Tensor marks, str name, bool sums) -> (Tensor, Tensor)", _slope_gradient_fake)
def _slope_gradient(g: Tensor, marks: Tensor, name: str, sums: bool) -> tuple[Tensor, Tensor]:
    """g f'(x) from the 4-bit derivative, and its sums per channel in float32, empty if not asked for."""
    levels, factor, columns = ACTIVATIONS[name].levels, FACTOR.get(name, 1.0), g.shape[-1]
    assert levels is not None

    def reference() -> tuple[Tensor, Tensor]:
        g_x = _by_slope(g, (marks,), name)
        return g_x, g_x.float().view(-1, columns).sum(0) if sums else g.new_empty(0, dtype=torch.float32)

    args = (g.view(-1, columns), marks, (levels.first, levels.per_one), factor, sums)
    g_x, found = launch(g.device, "activation.slope_gradient", reference, *args)
    return g_x.view_as(g), found


def _by_slope(g: Tensor, kept: Sequence[Tensor], name: str) -> Tensor:
    levels, factor = ACTIVATIONS[name].levels, FACTOR.get(name, 1.0)
    assert levels is not None
    slope = restore(levels, kept, g.shape, g.dtype)
    return g * slope if factor == 1.0 else g * (slope * factor)


def _gradient(g: Tensor, kept: Sequence[Tensor], name: str, supports: bool) -> Tensor:
    """g f'(x) from the 4-bit derivative; `supports`: whether the kernels run there."""
    levels, columns = ACTIVATIONS[name].levels, g.shape[-1] if g.dim() else 1
    fits = isinstance(levels, Levels) and levels.bits == 4 and columns % 2 == 0 and g.is_contiguous()
    # A derivative of this one is that of the formula.
    plain = torch.is_grad_enabled() and g.requires_grad
    if not (supports and fits) or plain:
        return _by_slope(g, kept, name)
    return operator_for(g, "slope_gradient")(g, kept[0], name, False)[0]  # type: ignore[no-any-return]


def _gradient_of_bits(g: Tensor, kept: Sequence[Tensor], name: str) -> Tensor:
    """g f'(x) from the bits of a derivative of two values."""

    def reference() -> Tensor:
        # Not a product: where the derivative is 0, an infinite gradient becomes 0 as in PyTorch, not 0 · inf.
        factor, other = FACTOR.get(name, 1.0), ELSE.get(name)
        scaled = g if factor == 1.0 else g * factor
        closed = torch.zeros((), dtype=g.dtype, device=g.device) if other is None else g * other
        return torch.where(restore(BITS, kept, g.shape), scaled, closed)

    differentiable = torch.is_grad_enabled()  # the kernel is not
    if differentiable or not supported_in_eager(g) or name not in _GATES or g.numel() % 8 or not g.is_contiguous():
        return reference()
    return launch(g.device, "activation.bits_gradient", reference, g, *kept)  # type: ignore[no-any-return]


# ---- autograd functions ----


class Slope(torch.autograd.Function):
    """y = f(x), saving the derivative; `in_place` (eager mode, x no view): y is x, written to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, in_place: bool = False) -> Tensor:
        kind, ctx.activation, ctx.order = ACTIVATIONS[name], name, memory_order(x)
        ctx.supports = x.device.type in autograd.KERNELS and supported(x.device, x.dtype)
        ordered = x.permute(ctx.order)  # the codes have this order

        def reference() -> tuple[Tensor, Tensor]:
            marks = BITS.keep(kind.slope(ordered))[0]
            return ordered.copy_(kind.f(ordered)) if in_place else kind.f(ordered), marks

        if in_place:
            ctx.mark_dirty(x)
        has_kernel = ctx.supports and ordered.is_contiguous()
        if has_kernel and name in _GATES and is_eager(x) and x.numel() % 8 == 0:
            y, marks = launch(x.device, "activation.bits", reference, ordered, name, in_place)
            ctx.save_for_backward(marks)
            return x if in_place else not_a_view(as_it_was(y, ctx.order))
        if has_kernel and kind.levels is not None and name in FUNCTIONS and ordered.shape[-1] % 2 == 0:
            y, marks = operator_for(ordered, "activate")(ordered, name, None)
        else:
            kept = BITS.keep(kind.slope(ordered)) if kind.levels is None else kind.levels.keep(ordered, kind.slope)
            ctx.save_for_backward(*kept)
            return x.copy_(kind.f(x)) if in_place else kind.f(x)
        ctx.save_for_backward(marks)
        return x.copy_(as_it_was(y, ctx.order)) if in_place else not_a_view(as_it_was(y, ctx.order))

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        name, levels = ctx.activation, ACTIVATIONS[ctx.activation].levels
        g, kept = g_y.permute(ctx.order), ctx.saved_tensors
        if levels is None:
            return as_it_was(_gradient_of_bits(g, kept, name), ctx.order), None, None
        g_x = _gradient(g, kept, name, ctx.supports)
        return *once(name, (as_it_was(g_x, ctx.order),), g_y), None, None


class Curve(torch.autograd.Function):
    """y = f(x), saving x quantized; returns y, and codes and scales of x, from which f(x) can be made as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, form: str, image: bool) -> tuple[Tensor, ...]:
        y = ACTIVATIONS[name].f(x)
        ordered = x.movedim(1, -1) if image else x
        codes, scale = pack(ordered, form)
        ctx.save_for_backward(codes, scale)
        ctx.activation, ctx.form, ctx.shape, ctx.image = name, form, ordered.shape, image
        return y, *with_codes(ctx, codes, scale)

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        x = unpack(ctx.form, ctx.saved_tensors, ctx.shape, torch.promote_types(g_y.dtype, torch.float32))
        slope = ACTIVATIONS[ctx.activation].slope(x.movedim(-1, 1) if ctx.image else x)
        return *once(ctx.activation, ((g_y * slope).to(g_y.dtype),), g_y), None, None, None


# ---- registration ----

_slope = without_autocast(Slope.apply)
slope = custom_op("slope(Tensor x, str name) -> Tensor", _slope)
curve = custom_op(
    "curve(Tensor x, str name, str form, bool image) -> (Tensor, Tensor, Tensor)", without_autocast(Curve.apply)
)
# For modules whose function Dynamo passes to no mode (`interpose.WrappedFunction`): the mode replaces these.
custom_op("function(Tensor x, str name) -> Tensor", lambda x, name: ACTIVATIONS[name].f(x))
custom_op("function_(Tensor(a!) x, str name) -> Tensor(a!)", lambda x, name: getattr(F, name)(x, inplace=True))


def _handler(name: str) -> Callable[..., Tensor | None]:
    """A handler of the activation function of that name."""

    def run(scope: Scope, input: Tensor, inplace: bool = False) -> Tensor | None:
        kind, before = ACTIVATIONS[name], scope.origins.unfinished_of(input, Unfinished)
        known = scope.origins.of(input)
        if not (is_large(input) and input.requires_grad):
            return None
        if before is not None and not is_fused(before.x, name):
            before = None
        saves_input = kind.by_input and before is None
        form = FORMATS["curve"] if saves_input else _DERIVATIVE if kind.levels else _BIT
        scope.record(name, form)
        if before is not None:
            return finished(scope, before, name, input if inplace else None)
        if saves_input:
            image = is_channels_last(input) or (known is not None and rematerialize.is_image(known.recipe))
            y, *codes = curve(input, name, form, image)
            recipe = rematerialize.of(name, rematerialize.values(form, input.shape, image))
        else:
            at_once = inplace and is_eager(input) and not is_view(input)  # a view's base has other elements
            y = _slope(input, name, True) if at_once else slope(input, name)
            recipe, codes = ("", []) if known is None else (rematerialize.of(name, known.recipe), list(known.tensors))
        if inplace and y is not input:
            y = written(input, y)
        if recipe:
            scope.origins.note(y, recipe, *codes)
        if kind.by_input and not inplace and torch.compiler.is_dynamo_compiling():
            scope.origins.note_unfinished(y, Gate(input, name))
        return y

    return run


_by_name = {name: _handler(name) for name in ACTIVATIONS}


def _gelu(scope: Scope, input: Tensor, approximate: str = "none") -> Tensor | None:
    if approximate not in ("none", "tanh"):
        return None
    return _by_name["gelu_tanh" if approximate == "tanh" else "gelu"](scope, input)


def _leaky_relu(scope: Scope, input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor | None:
    if negative_slope not in LEAKS:
        known = ", ".join(map(str, LEAKS))
        scope.buffers.record_full("leaky_relu", f"negative_slope={negative_slope}; supported: {known}")
        return None
    return _by_name[LEAKS[negative_slope]](scope, input, inplace)


HANDLERS: Handlers = {
    **{
        getattr(home, name): handler
        for name, handler in _by_name.items()
        for home in (F, torch, Tensor)
        if hasattr(home, name)
    },
    F.gelu: _gelu,
    F.leaky_relu: _leaky_relu,
    torch.ops.hotrain.function: lambda scope, x, name: _by_name[name](scope, x),
    torch.ops.hotrain.function_: lambda scope, x, name: _by_name[name](scope, x, True),
    F.glu: uncompressed("glu", "it saves its input; no compressed operator for it"),
}
