"""Layer, RMS and group norm: y = γ x̂ + β with x̂ = (x − μ) r, r = 1/σ.

    g_x = r (γg − mean(γg) − x̂ mean(γg x̂)),  g_γ = Σ g x̂,  g_β = Σ g

with means over the axes of the statistics. RMS norms have no μ and no mean(γg). Backward needs γ, r, and x̂, which is
quantized; the next layer's input is rematerialized from the same codes.

A row has one scale. So that channels far above the others do not round these to zero, x̂ is divided by a factor c of
each channel before (`quantize.channels`; most are 1): backward reads c x̂', the next layer γ c x̂' + β.

`KINDS` says what the kinds of norm differ in. ``dims`` is the number of axes that the statistics reduce; for
``"group"`` the number of groups. x is (..., C), for group norm (N, C, ...); γ and β may be None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import autograd
from ...autograd import differentiated_once, not_a_view
from ...private import memory_format_of
from ...quantize.channels import factors
from ...quantize.integer import wide
from ..codes import LONGEST_ROW, unpack
from ..formats import BITS, FORMATS, GROUPED
from ..launcher import is_eager, launch, opaque, operator_for, supported, supported_in_eager
from ..rematerialize import normed
from .base import Handlers, Scope, custom_op, direct, float32, is_large, wants_gradient, without_autocast
from .group_norm import (
    Grads,
    gradients_of_groups,
    in_groups,
    of_groups,
    stays_in_layout,
)


@dataclass(frozen=True)
class Kind:
    """What a kind of norm differs in.

    Attributes:
        centered: whether μ is subtracted, and with it mean(γg) in backward; else μ = 0.
        by_token: whether statistics are over the last axes; else over groups of channels.
        rounds: whether x̂ is rounded to x's dtype before γ.
        function: PyTorch's, as autocast names it; None where it has none.
        has_kernels: whether `kernels.norm` has its formula: layer norm's if centered, else RMS norm's.
    """

    centered: bool = False
    by_token: bool = True
    rounds: bool = False
    function: str | None = None
    has_kernels: bool = False


KINDS = {
    "layer": Kind(centered=True, function="layer_norm", has_kernels=True),
    "rms": Kind(function="rms_norm", has_kernels=True),
    "rms_cast": Kind(rounds=True, has_kernels=True),  # written out by hand, as in transformers
    "rms_float": Kind(has_kernels=True),  # so too, where γ is multiplied before the result is rounded
    "group": Kind(centered=True, by_token=False, function="group_norm"),
}

KERNEL_FORMAT = "int4 nearest/row"  # the one that the kernels pack and read
LONGEST_ROW_OF_GRADIENT = 4096


def saved_format() -> str:
    """The format of x̂."""
    return FORMATS["norm"]


# ---- reference ----

Six = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def forward(
    x: Tensor, w: Tensor | None, b: Tensor | None, kind: str, dims: int, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """PyTorch's result, μ (None for an RMS norm) and r."""
    shape = x.shape
    if kind == "layer":
        return torch.native_layer_norm(x, shape[-dims:], w, b, eps)
    if kind == "group":
        if stays_in_layout(x):
            return of_groups(x, w, b, dims, eps)
        # Dense, in the layout that PyTorch takes: on a CPU channels-last is preserved, for slices too.
        layout = memory_format_of(x) if x.device.type == "cpu" else torch.contiguous_format
        dense, count = x.contiguous(memory_format=layout), math.prod(shape[2:])
        y, mean, r = torch.native_group_norm(dense, w, b, shape[0], shape[1], count, dims, eps)
        mean, r = (wide(t).view(shape[0], dims, 1, 1) for t in (mean, r))
        return y, mean, r
    lifted = wide(x)
    r = torch.rsqrt(lifted.square().mean(tuple(range(-dims, 0)), keepdim=True) + eps)
    if kind == "rms":
        return F.rms_norm(x, shape[-dims:], w, eps), None, r
    assert kind in ("rms_cast", "rms_float"), kind
    normal = (lifted * r).to(x.dtype) if KINDS[kind].rounds else lifted * r
    y = normal if w is None else w * normal
    return y if KINDS[kind].rounds else y.to(x.dtype), None, r


def _gradients(
    g: Tensor, normal: Tensor, w: Tensor | None, r: Tensor, kind: str, dims: int, needs: Sequence[bool]
) -> Grads:
    """The gradients, None where not needed."""
    if not KINDS[kind].by_token:
        return gradients_of_groups(g, normal, w, r, dims, needs)
    shape = g.shape
    leading = list(range(len(shape) - dims))
    g_w, g_b = g * normal if needs[1] else None, g if needs[2] else None
    if leading:  # a sum over no axes is one over all of them
        g_w, g_b = (None if t is None else t.sum(leading) for t in (g_w, g_b))
    if not needs[0]:
        return None, (g_b, g_w)
    scaled = g if w is None else g * w
    over = list(range(-dims, 0))
    inner = scaled - normal * (scaled * normal).mean(over, keepdim=True)
    if KINDS[kind].centered:
        inner = inner - scaled.mean(over, keepdim=True)
    return (inner * r).reshape(shape), (g_b, g_w)


def channels_of(normal: Tensor, w: Tensor | None) -> Tensor:
    """c of rows x̂ (..., C), and γ c, (2, C)."""
    c = factors(normal)
    return torch.stack([c, c if w is None else w.to(c.dtype) * c])


# ---- kernels ----


def pack_normalized(
    x: Tensor, mean: Tensor | None, r: Tensor, form: str, normalized: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """Codes and scales of x̂ for x (..., C), μ and r per channel, contiguous; the reference takes `normalized`."""

    def reference() -> tuple[Tensor, Tensor]:
        return GROUPED[form].keep(normalized())

    if not _fits(x, form):
        return reference()
    return launch(x.device, "norm.pack", reference, x, mean, r, False)  # type: ignore[no-any-return]


def _fits(x: Tensor, form: str) -> bool:
    """Whether x is packed by the kernels."""
    fits = form == KERNEL_FORMAT and x.is_contiguous() and supported_in_eager(x)
    return fits and x.shape[-1] % 4 == 0 and x.shape[-1] <= LONGEST_ROW


def _kept(
    x: Tensor, mean: Tensor | None, r: Tensor, w: Tensor | None, form: str, normalized: Callable[[], Tensor],
    in_rows: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Codes and scales of x̂ / c, and `channels_of`; ``in_rows``: whether kernels may make them."""
    if not (in_rows and _fits(x, form)):
        normal = normalized()
        channels = channels_of(normal, w)
        return *GROUPED[form].keep(normal / channels[0]), channels
    channels = launch(x.device, "norm.channels", lambda: channels_of(normalized(), w), x, mean, r, w)

    def reference() -> tuple[Tensor, Tensor]:
        return GROUPED[form].keep(normalized() / channels[0])

    return *launch(x.device, "norm.pack", reference, x, mean, r, True, channels), channels


def _has_kernel(t: Tensor, kind: str, dims: int, form: str, dtype: torch.dtype) -> bool:
    """Whether the kernels over rows run for t (x, or its gradient); ``dtype`` is x's."""
    if not KINDS[kind].has_kernels or dims != 1 or form != KERNEL_FORMAT or not supported(t.device, t.dtype):
        return False
    columns = t.shape[-1]
    same = t.dtype == dtype or supported(t.device, dtype)
    return same and columns % 4 == 0 and columns <= LONGEST_ROW_OF_GRADIENT


def _norm_forward_fake(
    x: Tensor, branch: Tensor | None, w: Tensor | None, b: Tensor | None, eps: float, *args: Any
) -> Six:
    total, y, _, _, keeps, *_ = args
    rows, columns = x.shape
    return (
        x.new_empty((rows, columns) if keeps and branch is not None else (0,), dtype=total),
        x.new_empty(rows, columns, dtype=y),
        x.new_empty(rows, dtype=torch.float32),
        x.new_empty(rows, 1, columns // 2, dtype=torch.uint8),
        x.new_empty(rows, 1, 1, dtype=torch.bfloat16),
        x.new_empty(2, columns, dtype=torch.float32),
    )


@opaque(
    "norm_forward(Tensor x, Tensor? branch, Tensor? w, Tensor? b, float eps, ScalarType total, ScalarType y, "
    "bool centered, bool cast, bool keeps, Tensor? bias, Tensor? factor, float times) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _norm_forward_fake,
)
def _norm_forward(x: Tensor, branch: Tensor | None, w: Tensor | None, b: Tensor | None, eps: float, *args: Any) -> Six:
    """A norm over rows (R, C), of x + bias + branch · factor, for compiled graphs; all as the kernel's."""
    total, y, centered, cast, keeps, bias, *factor = args

    def reference() -> Six:
        added = x if bias is None else wide(x) + bias
        added = added if branch is None else (added + _multiplied(branch, *factor)).to(total)
        lifted = wide(added)
        lifted = lifted - lifted.mean(1, keepdim=True) if centered else lifted
        r = torch.rsqrt(lifted.square().mean(1) + eps)
        normal = lifted * r[:, None]
        made = normal.to(y).to(normal.dtype) if cast else normal
        made = made if w is None else made * w
        made = made if b is None else made + b
        kept = added if keeps and branch is not None else x.new_empty(0, dtype=total)
        channels = channels_of(normal, w)
        return kept, made.to(y), r, *GROUPED[KERNEL_FORMAT].keep(normal / channels[0]), channels

    dtypes = total, y
    given = x, branch, w, b, eps, dtypes, centered, cast, keeps, bias, *factor
    return launch(x.device, "norm.forward", reference, *given)  # type: ignore[no-any-return]


def _multiplied(t: Tensor, factor: Tensor | None, times: float) -> Tensor:
    """Rows times a factor of each of as many runs, of each channel, or where a bit is set, and times a number."""
    if factor is None:
        return t
    if factor.dtype == torch.uint8:
        return wide(t) * BITS.restore((factor,), t.shape) * times
    each = factor if factor.dim() == 2 else factor.repeat_interleave(len(t) // len(factor))[:, None]
    return wide(t) * each * times


def _norm_backward_fake(g: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    dtype, _, copy, *_ = args[5:]
    twin = g.new_empty(0, dtype=dtype) if copy is None else g.new_empty(g.shape, dtype=copy)
    return g.new_empty(g.shape, dtype=dtype), g.new_empty(2, g.shape[1], dtype=torch.float32), twin


@opaque(
    "norm_backward(Tensor g, Tensor codes, Tensor scale, Tensor r, Tensor channels, Tensor? other, ScalarType dtype, "
    "bool centered, ScalarType? copy, Tensor? factor, float times) -> (Tensor, Tensor, Tensor)",
    _norm_backward_fake,
)
def _norm_backward(
    g: Tensor, codes: Tensor, scale: Tensor, r: Tensor, channels: Tensor, other: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a norm over rows (R, C); arguments and results as the kernel's, r of any shape."""
    dtype, centered, copy, *factor = args

    def reference() -> tuple[Tensor, Tensor, Tensor]:
        lifted = wide(g)
        normal = GROUPED[KERNEL_FORMAT].restore((codes, scale), g.shape, lifted.dtype) * channels[0]
        w = channels[1] / channels[0]
        kind = "layer" if centered else "rms"
        g_x, (g_b, g_w) = _gradients(lifted, normal, w, r.reshape(-1, 1), kind, 1, (True, True, True))
        assert g_x is not None
        assert g_b is not None
        assert g_w is not None
        g_x = g_x if other is None else g_x + other
        twin = g.new_empty(0, dtype=dtype) if copy is None else _multiplied(g_x, *factor).to(copy)
        return g_x.to(dtype), torch.stack([g_b, g_w]), twin

    given = g, codes, scale, r, channels, dtype, centered, other, copy, *factor
    return launch(g.device, "norm.gradient", reference, *given)  # type: ignore[no-any-return]


# ---- autograd function ----


def _as(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in that dtype: `Tensor.to` takes longer to find out that it has it."""
    return t if t.dtype == dtype else t.to(dtype)


@differentiated_once(lambda ctx: f"{ctx.facts[0]} norm")
class Norm(torch.autograd.Function):
    """Returns y, codes and scales of x̂ / c, and `channels_of`, empty for a norm over several axes (c = 1)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, kind: str, dims: int, eps: float, form: str
    ) -> tuple[Tensor, ...]:
        shape, dtype, has_kernels = x.shape, x.dtype, x.device.type in autograd.KERNELS
        eager = has_kernels and is_eager(x)
        ctx.facts = kind, dims, form, shape, dtype, *(None if t is None else t.dtype for t in (w, b))
        own_w = w if ctx.needs_input_grad[0] else None
        compiled = has_kernels and not eager and _has_kernel(x, kind, dims, form, dtype) and x.is_contiguous()
        if compiled and all(t is None or t.dtype == dtype for t in (w, b)):
            # Compiled, one kernel: a compiler reads x again to pack it.
            flags = KINDS[kind].centered, KINDS[kind].rounds and dtype != torch.float32, False
            args = (x.view(-1, shape[-1]), None, w, b, eps, dtype, dtype, *flags, None, None, 1.0)
            _, y, r, *kept = torch.ops.hotrain.norm_forward(*args)
            ctx.save_for_backward(own_w, r, *kept)
            ctx.mark_non_differentiable(*kept)
            return not_a_view(y.view(shape)), *kept
        y, mean, r = forward(x, w, b, kind, dims, eps)
        by_token = KINDS[kind].by_token

        def normalized() -> Tensor:
            lifted = _as(x, torch.promote_types(dtype, torch.float32))
            lifted = lifted if by_token else in_groups(lifted, dims)
            normal = ((lifted if mean is None else lifted - mean) * r).reshape(shape)
            return normal if by_token else normal.movedim(1, -1)

        if by_token and dims > 1:  # γ is of several axes, and as large as an image
            kept = *GROUPED[form].keep(normalized()), x.new_empty(0)
        else:
            kept = _kept(x, mean, r, w, form, normalized, by_token and eager)
        ctx.save_for_backward(own_w, r, *kept)
        ctx.mark_non_differentiable(*kept)
        return y, *kept

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        kind, dims, form, shape, dtype, w_dtype, b_dtype = ctx.facts
        w, r, *kept, channels = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if g_y.device.type in autograd.KERNELS and _has_kernel(g_y, kind, dims, form, dtype):
            rows = g_y.contiguous().view(-1, shape[-1])
            run = operator_for(g_y, "norm_backward")
            flat = r if run is _norm_backward else r.reshape(-1)
            g_x, sums, _ = run(rows, *kept, flat, channels, None, dtype, KINDS[kind].centered, None, None, 1.0)
            if run is _norm_backward and b_dtype is not None and w_dtype == b_dtype:
                sums = _as(sums, b_dtype)  # both at once
            g_x, (g_b, g_w) = g_x.view_as(g_y), sums.unbind()
        else:
            g, by_token = _as(g_y, torch.promote_types(g_y.dtype, torch.float32)), KINDS[kind].by_token
            normal = unpack(form, kept, shape if by_token else [shape[0], *shape[2:], shape[1]], g.dtype)
            normal = normal * channels[0].to(g.dtype) if channels.numel() else normal
            g_x, (g_b, g_w) = _gradients(g, normal if by_token else normal.movedim(-1, 1), w, r, kind, dims, needs)
        grads = (
            _as(g_x, dtype) if needs[0] else None,
            _as(g_w, w_dtype) if needs[1] else None,
            _as(g_b, b_dtype) if needs[2] else None,
        )
        return *grads, *[None] * 4


# ---- registration ----


def _cast(x: Tensor, w: Tensor | None, b: Tensor | None, kind: str, *args: Any) -> list[Any]:
    """The arguments as autocast casts them for PyTorch's function."""
    given, function = [x, w, b, kind, *args], KINDS[kind].function
    return given if function is None else float32(function, *given)


norm = custom_op(
    "norm(Tensor x, Tensor? w, Tensor? b, str kind, int dims, float eps, str form) -> (Tensor, Tensor, Tensor, Tensor)",
    without_autocast(Norm.apply, _cast),
    direct(Norm),
)


def compressed(
    scope: Scope, x: Tensor, w: Tensor | None, b: Tensor | None, kind: str, dims: int, eps: float
) -> Tensor | None:
    """A norm of that kind which saves codes, for a handler; None where it is left as it is."""
    form = saved_format()
    if not (is_large(x) and wants_gradient(x, w, b)):
        return None
    scope.record(f"{kind}_norm", form)
    if torch.compiler.is_compiling() and KINDS[kind].has_kernels and supported(x.device, x.dtype):
        x = scope.origins.in_rows(x)
    y, codes, scale, channels = norm(x, w, b, kind, dims, eps, form)
    factor = channels[1] if channels.numel() else w
    scope.origins.note(y, normed(form, y.shape, image=not KINDS[kind].by_token), codes, scale, factor, b)
    return y


def _ends_in(input: Any, shape: Any) -> bool:
    if not isinstance(input, Tensor):
        return False
    if len(shape) == 1:  # nearly every call
        return input.dim() > 0 and bool(input.shape[-1] == shape[0])
    return 0 < len(shape) <= input.dim() and input.shape[-len(shape) :] == torch.Size(shape)


def _layer_norm(
    scope: Scope, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:  # fmt: skip
    if not _ends_in(input, normalized_shape):
        return None
    return compressed(scope, input, weight, bias, "layer", len(normalized_shape), eps)


def _rms_norm(
    scope: Scope, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor | None:
    if not _ends_in(input, normalized_shape):
        return None
    if eps is None:
        eps = torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps
    return compressed(scope, input, weight, None, "rms", len(normalized_shape), eps)


HANDLERS: Handlers = {
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,  # what Dynamo traces for it
}
