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
from ...autograd import differentiated_once, not_a_view
from ...kernels import FUNCTIONS
from ...private import is_view
from ...quantize.integer import wide
from ...saved import as_it_was, group_size, memory_order
from .. import rematerialize
from ..codes import empty_codes, has_kernel, pack
from ..formats import BITS, FORMATS, GROUPED
from ..launcher import is_eager, launch, opaque, operator_for, supported, supported_in_eager
from ..rematerialize import in_place_of, packing, restore, source
from ..sharing import Exact, Gate, Unfinished
from ..slopes import ACTIVATIONS, ELSE, FACTOR, LEAKS
from .base import (
    Handlers,
    Scope,
    custom_op,
    direct,
    is_channels_last,
    is_large,
    replaced,
    uncompressed,
    without_autocast,
    written,
)
from .image_norm import finished, is_fused

_DERIVATIVE, _BIT = "4-bit derivative", "1 bit per element"  # formats in the report
_GATES = ("relu", "relu6")  # functions with a 1-bit derivative that the kernels support


# ---- f and its derivative; tensors have their axes in the order of their memory layout ----


def _activate_fake(t: Tensor, name: str, form: str, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(t), *empty_codes(t, form)


@opaque("activate(Tensor t, str name, str form, Tensor? bias) -> (Tensor, Tensor, Tensor)", _activate_fake)
def _activate(
    t: Tensor, name: str, form: str, bias: Tensor | None, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """f(t + bias), and codes and scales of t + bias, cut off below; bias is along the last axis.

    ``in_place``: the first is t, written to.
    """
    spec, columns, kind = GROUPED[form], t.shape[-1], ACTIVATIONS[name]

    def reference() -> tuple[Tensor, Tensor, Tensor]:
        x = t if bias is None else wide(t) + bias
        y, kept = kind.f(x).to(t.dtype), spec.keep(x, kind.least)
        return t.copy_(y) if in_place else y, *kept

    args = (t.view(-1, columns), name, group_size(columns, spec.whole), spec.bits, bias, kind.least, in_place)
    y, codes, scale = launch(t.device, "codes.activate", reference, *args)
    return y.view_as(t), codes, scale


@opaque(
    "activate_(Tensor(a!) t, str name, str form, Tensor? bias) -> (Tensor, Tensor)",
    lambda *args: _activate_fake(*args)[1:],
    inlined=False,
)
def _activate_in_place(t: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """The codes and scales of `_activate`, which writes its first result over t."""
    return _activate(t, *args, in_place=True)[1:]


def _activation_gradient_fake(
    g: Tensor, codes: Tensor, scale: Tensor, name: str, form: str, sums: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(g), g.new_empty(g.shape[-1] if sums else 0, dtype=torch.float32)


@opaque(
    "activation_gradient(Tensor g, Tensor codes, Tensor scale, str name, str form, bool sums) -> (Tensor, Tensor)",
    _activation_gradient_fake,
)
def _activation_gradient(
    g: Tensor, codes: Tensor, scale: Tensor, name: str, form: str, sums: bool, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """g f'(x) from the codes of x, and its sums per channel in float32, empty if not asked for.

    ``in_place``: the first is g, written to.
    """
    columns = g.shape[-1]

    def reference() -> tuple[Tensor, Tensor]:
        g_x = _by_input(g, (codes, scale), name, form)
        g_x = g.copy_(g_x) if in_place else g_x
        return g_x, g_x.float().view(-1, columns).sum(0) if sums else g.new_empty(0, dtype=torch.float32)

    args = (g.view(-1, columns), codes, scale, name, GROUPED[form].bits, sums, in_place)
    g_x, found = launch(g.device, "codes.gradient", reference, *args)
    return g_x.view_as(g), found


@opaque(
    "activation_gradient_(Tensor(a!) g, Tensor codes, Tensor scale, str name, str form, bool sums) -> Tensor",
    lambda *args: _activation_gradient_fake(*args)[1],
    inlined=False,
)
def _activation_gradient_in_place(g: Tensor, *args: Any) -> Tensor:
    """The sums of `_activation_gradient`, which writes its first result over g."""
    return _activation_gradient(g, *args, in_place=True)[1]


def _by_input(g: Tensor, kept: Sequence[Tensor], name: str, form: str, number: int | None = None) -> Tensor:
    """``number`` is that of x, which `choosing` may put in the place of what is unpacked."""
    accurate = torch.promote_types(g.dtype, torch.float32)
    x = restore(GROUPED[form], kept, g.shape, accurate if number is None else g.dtype)
    if number is not None:
        with rematerialize.noted(rematerialize.OPERATOR, name):
            x = in_place_of(number, x).to(accurate)
    return (g * ACTIVATIONS[name].slope(x)).to(g.dtype)


def _by_slope(g: Tensor, kept: Sequence[Tensor], name: str) -> Tensor:
    levels, factor = ACTIVATIONS[name].levels, FACTOR.get(name, 1.0)
    assert levels is not None
    slope = restore(levels, kept, g.shape, g.dtype)
    return g * slope if factor == 1.0 else g * (slope * factor)


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


@differentiated_once(lambda ctx: None if ACTIVATIONS[ctx.activation].levels is None else ctx.activation)
class Slope(torch.autograd.Function):
    """y = f(x), saving the derivative; `in_place` (eager mode, x no view): y is x, written to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, in_place: bool = False) -> Tensor:
        kind, ctx.activation, ctx.order = ACTIVATIONS[name], name, memory_order(x)
        supports = x.device.type in autograd.KERNELS and supported(x.device, x.dtype)
        ordered = x.permute(ctx.order)  # the codes have this order

        def reference() -> tuple[Tensor, Tensor]:
            marks = BITS.keep(kind.slope(ordered))[0]
            return ordered.copy_(kind.f(ordered)) if in_place else kind.f(ordered), marks

        if in_place:
            ctx.mark_dirty(x)
        if supports and ordered.is_contiguous() and name in _GATES and is_eager(x) and x.numel() % 8 == 0:
            y, marks = launch(x.device, "activation.bits", reference, ordered, name, in_place)
            ctx.save_for_backward(marks)
            return x if in_place else not_a_view(as_it_was(y, ctx.order))
        y = None if in_place else kind.f(x)
        if y is not None and kind.of_result:  # where a compiled forward saves y, backward has the bits
            ordered = y.permute(ctx.order)
        with packing(again=kind.levels is not None):
            kept = BITS.keep(kind.slope(ordered)) if kind.levels is None else kind.levels.keep(ordered, kind.slope)
        ctx.save_for_backward(*kept)
        return x.copy_(kind.f(x)) if y is None else y

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        name, levels = ctx.activation, ACTIVATIONS[ctx.activation].levels
        g, kept = g_y.permute(ctx.order), ctx.saved_tensors
        if levels is None:
            return as_it_was(_gradient_of_bits(g, kept, name), ctx.order), None, None
        return as_it_was(_by_slope(g, kept, name), ctx.order), None, None


@differentiated_once(lambda ctx: ctx.activation)
class Curve(torch.autograd.Function):
    """y = f(x), saving x quantized; returns y, and codes and scales of x, from which f(x) can be made as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, form: str, image: bool) -> tuple[Tensor, ...]:
        kind, ctx.activation, ctx.form, ctx.image = ACTIVATIONS[name], name, form, image
        ordered, ctx.source = x.movedim(1, -1) if image else x, None
        # In eager mode f is PyTorch's own; a compiler fuses the formulas of what has 4 bits itself.
        supports = x.device.type in autograd.KERNELS and name in FUNCTIONS and supported(x.device, x.dtype)
        eager = supports and is_eager(x)
        ctx.kernels = eager or (supports and GROUPED[form].bits == 8)
        if ctx.kernels and not eager and ordered.is_contiguous() and has_kernel(form, int(ordered.shape[-1])):
            y, codes, scale = operator_for(ordered, "activate")(ordered, name, form, None)
            y = not_a_view(y.movedim(-1, 1)) if image else y
        else:
            y = kind.f(x)
            # Fewer bits a compiler packs in the kernel of f.
            if torch.compiler.is_compiling() and GROUPED[form].bits == 8 and not image:
                ordered, ctx.source = source(ordered)
            ordered = ordered if kind.flat is None else ordered.clamp(-kind.flat, kind.flat)
            codes, scale = pack(ordered, form, kind.least)
        ctx.save_for_backward(codes, scale)
        ctx.mark_non_differentiable(codes, scale)
        return y, codes, scale

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        name, form, kept = ctx.activation, ctx.form, ctx.saved_tensors
        g = g_y.movedim(1, -1) if ctx.image else g_y
        if ctx.kernels and g.is_contiguous() and has_kernel(form, int(g.shape[-1])):
            g_x, _ = operator_for(g, "activation_gradient")(g, *kept, name, form, False)
        else:
            g_x = _by_input(g, kept, name, form, ctx.source)
        return g_x.movedim(-1, 1) if ctx.image else g_x, None, None, None


# ---- registration ----

_slope = without_autocast(Slope.apply)
slope = custom_op("slope(Tensor x, str name) -> Tensor", _slope, direct(Slope))
curve = custom_op(
    "curve(Tensor x, str name, str form, bool image) -> (Tensor, Tensor, Tensor)",
    without_autocast(Curve.apply),
    direct(Curve),
)
# For modules whose function Dynamo passes to no mode (`interpose.WrappedFunction`): the mode replaces these.
custom_op("function(Tensor x, str name) -> Tensor", lambda x, name: ACTIVATIONS[name].f(x))
custom_op("function_(Tensor(a!) x, str name) -> Tensor(a!)", lambda x, name: getattr(F, name)(x, inplace=True))


def by_slope(x: Tensor, name: str, inplace: bool = False) -> Tensor:
    """f(x), written to x if `inplace`, of which backward has the derivative."""
    if inplace and is_eager(x) and not is_view(x):  # a view's base has other elements
        return _slope(x, name, True)  # type: ignore[no-any-return]
    y = slope(x, name)
    if not inplace:
        return y
    # PyTorch's ReLU keeps its result, to which nothing may be written again.
    return replaced(x, y) if name == "relu" else written(x, y)


def _handler(name: str) -> Callable[..., Tensor | None]:
    """A handler of the activation function of that name."""

    def run(scope: Scope, input: Tensor, inplace: bool = False) -> Tensor | None:
        kind, before = ACTIVATIONS[name], scope.origins.unfinished_of(input, Unfinished)
        known, made_of_exact = scope.origins.of(input), scope.origins.unfinished_of(input, Exact) is not None
        if not (is_large(input) and input.requires_grad):
            return None
        if kind.by_input and made_of_exact:
            scope.buffers.record_full(name, "backward makes it of the input of the exact norm before, which is saved")
            return None
        if before is not None and not is_fused(before.x, name):
            before = None
        saves_input = bool(kind.by_input) and before is None
        form = FORMATS[kind.by_input] if saves_input else _DERIVATIVE if kind.levels else _BIT
        scope.record(name, form)
        if before is not None:
            return finished(scope, before, name, input, input if inplace else None)
        if saves_input:
            image = is_channels_last(input) or (known is not None and rematerialize.is_image(known.recipe))
            y, *codes = curve(input, name, form, image)
            y = written(input, y) if inplace else y
            recipe = rematerialize.of(name, rematerialize.values(form, input.shape, image))
        else:
            y = by_slope(input, name, inplace)
            recipe, codes = ("", []) if known is None else (rematerialize.of(name, known.recipe), list(known.tensors))
        if recipe:
            scope.origins.note(y, recipe, *codes)
        if kind.by_input == "curve" and not inplace and torch.compiler.is_dynamo_compiling():
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
