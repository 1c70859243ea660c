"""One operator each: what the mode calls, in eager and while a compiler traces.

The compiler sees one node, goes through the autograd function inside it, and fuses the codes into what makes a tensor
and what uses it. Autocast is settled here: tensors are cast as PyTorch casts them for that operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import autograd
from . import functions
from .attention import Attention
from .slopes import ACTIVATIONS

_lib = torch.library.Library("hotrain", "FRAGMENT")


def _operator(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def define(implementation: Callable[..., Any]) -> Callable[..., Any]:
        _lib.define(schema)
        _lib.impl(schema.partition("(")[0], implementation, "CompositeImplicitAutograd")
        return implementation

    return define


def _lower(*tensors: Tensor | None) -> list[Tensor | None]:
    """As autocast hands them to a product."""
    return [t if t is None or not t.is_floating_point() else autograd.autocast(t) for t in tensors]


@cache
def _is_raised(operator: str, device: str) -> bool:
    """Whether autocast hands that operator of PyTorch float32 there: its lists differ from device to device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", f"Autocast{device.upper()}")


def _float32(operator: str, first: Tensor, *rest: Tensor | None) -> list[Tensor | None]:
    """As autocast hands them to a norm or a softmax: in float32 where it is on, and has the operator in its list."""
    kind = first.device.type
    on = autograd.autocast_to(kind) not in (None, torch.float32)
    low = (torch.float16, torch.bfloat16) if on and _is_raised(operator, kind) else ()
    return [t.float() if t is not None and t.dtype in low else t for t in (first, *rest)]


_lib.define("region() -> ()")


@torch.library.impl(_lib, "region", "CompositeExplicitAutograd")
def region() -> None:
    """Nothing, but by it a graph that `partition` changes has another key in a compiler's cache."""


@_operator("slope(Tensor x, str name) -> Tensor")
def slope(x: Tensor, name: str) -> Tensor:
    with autograd.outside_autocast(x):
        return functions.Slope.apply(x, name)


@_operator("function(Tensor x, str name) -> Tensor")
def function(x: Tensor, name: str) -> Tensor:
    """An activation by its name, for modules whose function a tracer hands to no mode; the mode serves it."""
    y: Tensor = ACTIVATIONS[name].f(x)
    return y


@_operator("function_(Tensor(a!) x, str name) -> Tensor(a!)")
def function_(x: Tensor, name: str) -> Tensor:
    """The same, written to x as well."""
    y: Tensor = getattr(F, name)(x, inplace=True)
    return y


@_operator("curve(Tensor x, str name, str form, bool image) -> (Tensor, Tensor, Tensor)")
def curve(x: Tensor, name: str, form: str, image: bool) -> tuple[Tensor, Tensor, Tensor]:
    with autograd.outside_autocast(x):
        return functions.Curve.apply(x, name, form, image)


@_operator(
    "norm(Tensor x, Tensor? w, Tensor? b, str kind, int dims, float eps, str form, Tensor(a!)? running_mean=None, "
    "Tensor(b!)? running_var=None, float momentum=0.1) -> (Tensor, Tensor, Tensor)"
)
def norm(
    x: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    kind: str,
    dims: int,
    eps: float,
    form: str,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    momentum: float = 0.1,
) -> tuple[Tensor, Tensor, Tensor]:
    if kind in ("layer", "rms", "group"):
        x, w, b = _float32(f"{kind}_norm", x, w, b)  # type: ignore[assignment]
    with autograd.outside_autocast(x):
        return functions.Norm.apply(x, w, b, kind, dims, eps, form, running_mean, running_var, momentum)


@_operator(
    "batch_statistics(Tensor x, Tensor(a!)? running_mean, Tensor(b!)? running_var, float momentum, float eps) "
    "-> (Tensor, Tensor)"
)
def batch_statistics(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Mean and 1/σ of each channel; the running ones are moved."""
    with torch.no_grad(), autograd.outside_autocast(x):
        _, mean, r = torch.native_batch_norm(x, None, None, running_mean, running_var, True, momentum, eps)
        return mean.to(torch.float32), r.to(torch.float32)


@_operator(
    "normalized(Tensor x, Tensor mean, Tensor r, Tensor? w, Tensor? b, Tensor? shortcut, str name) "
    "-> (Tensor, Tensor, Tensor)"
)
def normalized(
    x: Tensor, mean: Tensor, r: Tensor, w: Tensor | None, b: Tensor | None, shortcut: Tensor | None, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    with autograd.outside_autocast(x):
        return functions.Normalized.apply(x, w, b, shortcut, mean, r, name)


@_operator("kept_softmax(Tensor x, int dim, str form) -> (Tensor, Tensor, Tensor)")
def kept_softmax(x: Tensor, dim: int, form: str) -> tuple[Tensor, Tensor, Tensor]:
    (cast,) = _float32("softmax.int", x)
    with autograd.outside_autocast(x):
        return functions.Softmax.apply(cast, dim, form)


@_operator("kept_dropout(Tensor x, float p) -> Tensor")
def kept_dropout(x: Tensor, p: float) -> Tensor:
    return functions.Dropout.apply(x, p)


# Of the next four, lists are the tensors of a recipe going in, and the codes made there coming out.

Made = tuple[Tensor, list[Tensor]]


@_operator(
    "product(Tensor a, Tensor b, str a_form, str b_form, Tensor?[] a_given, Tensor?[] b_given) -> (Tensor, Tensor[])"
)
def product(
    a: Tensor, b: Tensor, a_form: str, b_form: str, a_given: list[Tensor | None], b_given: list[Tensor | None]
) -> Made:
    y, *made = functions.Product.apply(a, b, a_form, b_form, a_given, b_given)
    return y, made


@_operator("kept_matmul(Tensor a, Tensor b, str a_form, str b_form, Tensor?[] a_given) -> Tensor")
def kept_matmul(a: Tensor, b: Tensor, a_form: str, b_form: str, a_given: list[Tensor | None]) -> Tensor:
    a_cast, b_cast = _lower(a, b)
    with autograd.outside_autocast(a):
        return functions.Matmul.apply(a_cast, b_cast, a_form, b_form, a_given)


@_operator("kept_linear(Tensor x, Tensor w, Tensor? b, str form, Tensor?[] given) -> (Tensor, Tensor[])")
def kept_linear(x: Tensor, w: Tensor, b: Tensor | None, form: str, given: list[Tensor | None]) -> Made:
    x_cast, w_cast, b_cast = _lower(x, w, b)
    with autograd.outside_autocast(x):
        y, *made = functions.Linear.apply(x_cast, w_cast, b_cast, form, given)
        return y, made


@_operator(
    "kept_conv2d(Tensor x, Tensor w, Tensor? b, int[] stride, int[] padding, int[] dilation, int groups, str form, "
    "Tensor?[] given) -> (Tensor, Tensor[])"
)
def kept_conv2d(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    form: str,
    given: list[Tensor | None],
) -> Made:
    x_cast, w_cast, b_cast = _lower(x, w, b)
    with autograd.outside_autocast(x):
        y, *made = functions.Conv2d.apply(x_cast, w_cast, b_cast, stride, padding, dilation, groups, form, given)
        return y, made


@_operator("kept_max_pool2d(Tensor x, int[] kernel, int[] stride, int[] padding, bool ceil) -> Tensor")
def kept_max_pool2d(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil: bool
) -> Tensor:
    return functions.MaxPool2d.apply(x, kernel, stride, padding, ceil)


@_operator(
    "kept_avg_pool2d(Tensor x, int[] kernel, int[] stride, int[] padding, bool ceil, bool counts_padding, "
    "int? divisor) -> Tensor"
)
def kept_avg_pool2d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil: bool,
    counts_padding: bool,
    divisor: int | None,
) -> Tensor:
    return functions.AvgPool2d.apply(x, kernel, stride, padding, ceil, counts_padding, divisor)


@_operator(
    "kept_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float dropout, bool causal, float scale, str kind, "
    "str qk_form, str vo_form) -> (Tensor, Tensor, Tensor)"
)
def kept_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float,
    kind: str,
    qk_form: str,
    vo_form: str,
) -> tuple[Tensor, Tensor, Tensor]:
    with autograd.outside_autocast(q):
        return Attention.apply(q, k, v, mask, dropout, causal, scale, kind, qk_form, vo_form)
