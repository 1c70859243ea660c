"""Custom operators of the compressed activations, one for each autograd function of `functions` and `attention`.

The mode calls them in eager mode and under Dynamo, which sees one node each; AOTAutograd then traces the autograd
function inside, so that Inductor fuses packing and unpacking with their neighbours. Tensors are cast here as autocast
casts them for the same operator of PyTorch. Format arguments (``form``) are names of `formats.GROUPED`, or
recipes of `rematerialize`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import autograd
from ..private import autocasts_itself
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
    """Tensors as autocast casts them for a product."""
    return [t if t is None or not t.is_floating_point() else autograd.autocast(t) for t in tensors]


@cache
def _is_raised(operator: str, device: str) -> bool:
    """Whether autocast casts to float32 for that operator of PyTorch; its lists differ between devices."""
    return autocasts_itself(operator, device)


def _float32(operator: str, first: Tensor, *rest: Tensor | None) -> list[Tensor | None]:
    """Tensors as autocast casts them for a norm or a softmax: to float32 if it is on and lists the operator."""
    kind = first.device.type
    on = autograd.autocast_to(kind) not in (None, torch.float32)
    low = (torch.float16, torch.bfloat16) if on and _is_raised(operator, kind) else ()
    return [t.float() if t is not None and t.dtype in low else t for t in (first, *rest)]


_lib.define("region() -> ()")


@torch.library.impl(_lib, "region", "CompositeExplicitAutograd")
def region() -> None:
    """Do nothing; the node gives graphs that `compiled` changes another key in the compiler's cache."""


@_operator("slope(Tensor x, str name) -> Tensor")
def slope(x: Tensor, name: str) -> Tensor:
    """Activation ``name`` of x, saving its derivative in 4 bits or 1 bit per element (`functions.Slope`)."""
    with autograd.outside_autocast(x):
        return functions.Slope.apply(x, name)


@_operator("function(Tensor x, str name) -> Tensor")
def function(x: Tensor, name: str) -> Tensor:
    """Activation ``name`` of x, for modules whose function Dynamo passes to no mode; the mode replaces this."""
    y: Tensor = ACTIVATIONS[name].f(x)
    return y


@_operator("function_(Tensor(a!) x, str name) -> Tensor(a!)")
def function_(x: Tensor, name: str) -> Tensor:
    """`function` in place."""
    y: Tensor = getattr(F, name)(x, inplace=True)
    return y


@_operator("curve(Tensor x, str name, str form, bool image) -> (Tensor, Tensor, Tensor)")
def curve(x: Tensor, name: str, form: str, image: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Activation ``name`` of x, saving x quantized (`functions.Curve`).

    Args:
        x: of any shape; (N, C, H, W) for an image.
        name: of `slopes.ACTIVATIONS`.
        form: the format of x.
        image: whether groups are along the channels, not along the last axis.

    Returns:
        The result, and codes and scales of x.
    """
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
    """Layer, RMS, group or batch norm, saving the normalized input quantized (`functions.Norm`).

    Args:
        x: (..., C) for layer and RMS norms, (N, C, ...) for the others.
        w: γ, or None.
        b: β, or None.
        kind: ``"layer"``, ``"rms"``, ``"rms_cast"``, ``"group"`` or ``"batch"``.
        dims: the number of axes that are reduced; for ``"group"`` the number of groups.
        eps: added to the variance.
        form: the format of x̂.
        running_mean: (C,), of a batch norm; updated in place.
        running_var: (C,), of a batch norm; updated in place.
        momentum: of the running statistics.

    Returns:
        The result, and codes and scales of x̂.
    """
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
    """Mean and 1/σ of each channel, (C,) in float32; the running statistics are updated in place."""
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
    """Fused batch norm, shortcut and activation (`functions.Normalized`).

    Args:
        x: (N, C, H, W) in channels-last.
        mean: (C,), of `batch_statistics`.
        r: 1/σ, (C,), of `batch_statistics`.
        w: γ, or None.
        b: β, or None.
        shortcut: added before the activation, or None; as x.
        name: of `slopes.ACTIVATIONS`, "" for none.

    Returns:
        The result, and codes and scales of x̂.
    """
    with autograd.outside_autocast(x):
        return functions.Normalized.apply(x, w, b, shortcut, mean, r, name)


@_operator("kept_softmax(Tensor x, int dim, str form) -> (Tensor, Tensor, Tensor)")
def kept_softmax(x: Tensor, dim: int, form: str) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax along ``dim``, saving its result quantized; returns it with its codes and scales."""
    (cast,) = _float32("softmax.int", x)
    with autograd.outside_autocast(x):
        return functions.Softmax.apply(cast, dim, form)


@_operator("kept_dropout(Tensor x, float p) -> Tensor")
def kept_dropout(x: Tensor, p: float) -> Tensor:
    """Dropout with probability p, saving its mask in 1 bit per element."""
    return functions.Dropout.apply(x, p)


# Lists of the next four: as arguments the tensors of a recipe, in results the codes and scales packed there.

Made = tuple[Tensor, list[Tensor]]


@_operator(
    "product(Tensor a, Tensor b, str a_form, str b_form, Tensor?[] a_given, Tensor?[] b_given) -> (Tensor, Tensor[])"
)
def product(
    a: Tensor, b: Tensor, a_form: str, b_form: str, a_given: list[Tensor | None], b_given: list[Tensor | None]
) -> Made:
    """a b by element, saving its factors quantized (`functions.Product`).

    Args:
        a: a factor.
        b: a factor; broadcast with a.
        a_form: the form of a; ``"exact"`` for a as it is.
        b_form: the form of b; ``"exact"`` for b as it is.
        a_given: tensors of a's recipe, empty for a format.
        b_given: tensors of b's recipe, empty for a format.

    Returns:
        The product, and codes and scales packed here.
    """
    y, *made = functions.Product.apply(a, b, a_form, b_form, a_given, b_given)
    return y, made


@_operator("kept_matmul(Tensor a, Tensor b, str a_form, str b_form, Tensor?[] a_given) -> Tensor")
def kept_matmul(a: Tensor, b: Tensor, a_form: str, b_form: str, a_given: list[Tensor | None]) -> Tensor:
    """a @ b of (..., I, K) and (..., K, J), saving both quantized; arguments as `product`'s."""
    a_cast, b_cast = _lower(a, b)
    with autograd.outside_autocast(a):
        return functions.Matmul.apply(a_cast, b_cast, a_form, b_form, a_given)


@_operator("kept_linear(Tensor x, Tensor w, Tensor? b, str form, Tensor?[] given) -> (Tensor, Tensor[])")
def kept_linear(x: Tensor, w: Tensor, b: Tensor | None, form: str, given: list[Tensor | None]) -> Made:
    """x wᵀ + b with exact products, saving x quantized.

    Args:
        x: (..., I).
        w: (O, I).
        b: (O,), or None.
        form: the form of x.
        given: tensors of x's recipe, empty for a format.

    Returns:
        The result (..., O), and codes and scales packed here.
    """
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
    """A convolution with exact products, saving x quantized along its channels.

    Args:
        x: (N, C, H, W).
        w: (O, C / groups, ·, ·).
        b: (O,), or None.
        stride: two numbers.
        padding: two numbers.
        dilation: two numbers.
        groups: as of `torch.nn.functional.conv2d`.
        form: the form of x.
        given: tensors of x's recipe, empty for a format.

    Returns:
        The result, and codes and scales packed here.
    """
    x_cast, w_cast, b_cast = _lower(x, w, b)
    with autograd.outside_autocast(x):
        y, *made = functions.Conv2d.apply(x_cast, w_cast, b_cast, stride, padding, dilation, groups, form, given)
        return y, made


@_operator("kept_max_pool2d(Tensor x, int[] kernel, int[] stride, int[] padding, bool ceil) -> Tensor")
def kept_max_pool2d(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil: bool
) -> Tensor:
    """Max pooling of (N, C, H, W), saving 1 byte per output; windows of at most 256 elements."""
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
    """Average pooling of (N, C, H, W), saving nothing."""
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
    """Attention, saving q, k and v quantized (`attention.Attention`).

    Args:
        q: (B, H, T, D).
        k: (B, H or a divisor of it, T', D).
        v: as k.
        mask: booleans, numbers of `attention.prepared_mask`, or None.
        dropout: probability of dropping an attention weight.
        causal: whether the causal mask is applied.
        scale: factor of the logits.
        kind: the kernel, of `attention.backend`.
        qk_form: the format of q and k.
        vo_form: the format of v and of the result.

    Returns:
        The result (B, H, T, D), and its codes and scales, of (B, T, H, D).
    """
    with autograd.outside_autocast(q):
        return Attention.apply(q, k, v, mask, dropout, causal, scale, kind, qk_form, vo_form)
