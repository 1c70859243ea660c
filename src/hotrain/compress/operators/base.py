"""What the operators share: registration, the records of a forward, which tensors are compressed, casts of autocast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import casting
from ...autograd import skips_undefined
from ...private import any_autocast, autocasts_itself, is_view
from ...saved import memory_order
from ..report import Buffers
from ..rules import SMALL
from ..sharing import Origins

_lib = torch.library.Library("hotrain", "FRAGMENT")

# ---- registration with PyTorch ----


def custom_op(
    schema: str, implementation: Callable[..., Any], eager: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Register a custom operator, into which AOTAutograd traces: Inductor fuses packing and unpacking with the rest.

    Args:
        schema: of the operator; its format arguments (``form``) are names of `formats.GROUPED` or recipes.
        implementation: calls the autograd function, with tensors cast as autocast casts them for PyTorch's operator.
        eager: the same in eager mode outside of autocast; None for the implementation.

    Returns:
        A function that calls it: under Dynamo as an operator, so that a graph has one node for it.
    """
    name = schema.partition("(")[0]
    _lib.define(schema)
    _lib.impl(name, implementation, "CompositeImplicitAutograd")
    traced = getattr(torch.ops.hotrain, name)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return traced(*args)
        return implementation(*args) if eager is None or any_autocast() else eager(*args)

    return call


def direct(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`apply` of an autograd function for `custom_op`'s ``eager``, without the search for tensors of `torch.func`, a
    third of the call: under its transforms no operator runs (`differentiates`)."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def without_autocast(
    function: Callable[..., Any], cast: Callable[..., Sequence[Any]] | None = None
) -> Callable[..., Any]:
    """The function of a tensor and other arguments, run outside of autocast.

    `cast` returns all of them, with tensors cast as autocast casts them for PyTorch's operator.
    """

    def run(x: Tensor, *args: Any) -> Any:
        kind = x.device.type if any_autocast() else ""
        if not kind or casting.autocast_to(kind) is None:
            return function(x, *args)
        given = (x, *args) if cast is None else cast(x, *args)
        torch.set_autocast_enabled(kind, False)  # in a forward the flag alone, which costs less than a context
        try:
            return function(*given)
        finally:
            torch.set_autocast_enabled(kind, True)

    return run


def lower(*args: Any) -> list[Any]:
    """Arguments with their tensors as autocast casts them for a product."""
    dtype = casting.autocast_to(args[0].device.type)
    wide = torch.float64, dtype  # autocast leaves float64
    return [t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype not in wide else t for t in args]


def float32(name: str, *args: Any) -> list[Any]:
    """Arguments with their tensors as autocast casts them for a norm or a softmax: to float32 if it lists that one."""
    kind = args[0].device.type
    raised = casting.autocast_to(kind) != torch.float32 and autocasts_itself(name, kind)
    low = (torch.float16, torch.bfloat16) if raised else ()
    return [t.float() if isinstance(t, Tensor) and t.dtype in low else t for t in args]


# ---- handlers of PyTorch's functions: called with a `Scope`, they return None to leave a call as it is ----

Handlers = dict[Any, Callable[..., Any]]  # function of PyTorch → its handler


@dataclass
class Scope:
    """One forward of a block: the records that it writes to, and the origins that it knows."""

    buffers: Buffers
    origins: Origins

    def record(self, what: str, form: str) -> None:
        """Record that an operator saves its tensors in a format; in eager mode a plain entry."""
        if torch.compiler.is_compiling():
            # No bound method that is kept: behind a graph break Dynamo < 2.13 cannot call one.
            self.buffers.record(what, form)
        else:
            self.buffers.formats[what] = form


def is_large(t: Any) -> bool:
    """Whether t is a tensor that is worth compressing; nested tensors are left to PyTorch."""
    return isinstance(t, Tensor) and t.is_floating_point() and not t.is_nested and t.numel() >= SMALL


def wants_gradient(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether one of them requires a gradient."""
    if x.requires_grad:
        return True
    return any(p is not None and p.requires_grad for p in parameters)


def is_channels_last(t: Tensor) -> bool:
    """Whether the memory layout is channels-last."""
    return t.dim() == 4 and memory_order(t)[-1] == 1


def pair(value: Any) -> list[int]:
    """A number or a pair of numbers of PyTorch's functions for images, as a pair."""
    return numbers(value, 2)


def numbers(value: Any, axes: int) -> list[int]:
    """A number, or one of each axis, of PyTorch's functions for images and videos, as a list of `axes`."""
    given = list(value) if isinstance(value, tuple | list) else [value]
    return given * axes if len(given) == 1 else given


def uncompressed(what: str, why: str) -> Callable[..., None]:
    """A handler that replaces nothing and records, for large tensors, why they are kept in full precision.

    Compiled, the compiler decides what is kept, and `compiled` in which form.
    """

    def run(scope: Scope, *args: Any, **kwargs: Any) -> None:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        if torch.compiler.is_dynamo_compiling():
            return
        if tensors and is_large(tensors[0]) and wants_gradient(*tensors):
            scope.buffers.record_full(what, why)

    return run


# ---- results that are written to an operand, or returned by an autograd function as its own ----


@skips_undefined
class _InPlace(torch.autograd.Function):
    """Write y to x; the gradient of the result is that of y alone.

    With `copy_` PyTorch would also add a gradient of x, zeros in the contiguous layout; the sum, and every gradient
    before it, would then have that layout.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.copy_(y)

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[None, Tensor]:
        return None, g_y


# y written to x, as an in-place function returns it; a view's base has other elements.
written = custom_op(
    "written(Tensor(a!) x, Tensor y) -> Tensor(a!)",
    lambda x, y: x.copy_(y) if is_view(x) else _InPlace.apply(x, y),
)


def replaced(x: Tensor, y: Tensor) -> Tensor:
    """`written` where nothing else reads or writes x: traced, the result is y, and what made x may be left out."""
    if not torch.compiler.is_dynamo_compiling():
        return written(x, y)  # type: ignore[no-any-return]
    # The gradient of `copy_` is a sum with zeros in another layout; the compiler removes an unused one.
    x.copy_(y)
    return y if x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last) else x  # a slice keeps gaps
