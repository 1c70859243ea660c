"""Autograd functions of norms, activations, softmax, dropout, products and pooling that save quantized tensors.

The results of forward are PyTorch's own. The gradients use g_y as it is, and saved tensors with the rounding of their
format of `hotrain.saved`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..autograd import once
from ..private import is_view, memory_format_of
from ..saved import as_it_was, memory_order
from . import kernel_ops
from .formats import BITS, GROUPED
from .rematerialize import is_recipe, make, restore, values, wide
from .slopes import ACTIVATIONS, ELSE, FACTOR


def _unviewed(y: Tensor) -> Tensor:
    """The tensor, not marked as a view: autograd forbids in-place writes to a view that a custom function returns."""
    return torch.ops.aten._unsafe_view(y, y.shape) if is_view(y) else y


# ---- activations: y = f(x), g_x = g_y f'(x) ----


class Slope(torch.autograd.Function):
    """y = f(x), saving the derivative f'(x): 4 bits per element, or 1 bit where it has two values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        kind = ACTIVATIONS[name]
        ctx.activation, ctx.order = name, memory_order(x)
        ordered = x.permute(ctx.order)
        ctx.shape = ordered.shape
        made = kernel_ops.activate(ordered, name) or kernel_ops.open_bits(ordered, name)
        if made is not None:
            ctx.save_for_backward(made[1])
            return _unviewed(as_it_was(made[0], ctx.order))
        y = kind.f(x)
        if kind.levels is None:
            ctx.save_for_backward(*BITS.keep(kind.slope(ordered)))
        else:
            ctx.save_for_backward(*kind.levels.keep(ordered, lambda piece: kind.slope(wide(piece))))
        return y

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        kind, factor = ACTIVATIONS[ctx.activation], FACTOR.get(ctx.activation, 1.0)
        if kind.levels is not None:
            kept = ctx.saved_tensors  # read once: a checkpoint does not recompute them a second time
            made = kernel_ops.slope_gradient(g_y.permute(ctx.order), kept, kind.levels, factor)
            if made is not None:
                return *once(ctx.activation, (as_it_was(made, ctx.order),), g_y), None
            slope = as_it_was(restore(kind.levels, kept, ctx.shape, g_y.dtype), ctx.order)
            g_x = g_y * slope if factor == 1.0 else g_y * (slope * factor)
            return *once(ctx.activation, (g_x,), g_y), None
        kept = ctx.saved_tensors
        made = kernel_ops.bits_gradient(g_y.permute(ctx.order), kept[0], ctx.activation)
        if made is not None:
            return as_it_was(made, ctx.order), None
        # Not a product: where the derivative is 0, an infinite gradient becomes 0 as in PyTorch, not 0 · inf.
        passed = as_it_was(restore(BITS, kept, ctx.shape), ctx.order)
        scaled = g_y if factor == 1.0 else g_y * factor
        closed = (
            g_y * ELSE[ctx.activation]
            if ctx.activation in ELSE
            else torch.zeros((), dtype=g_y.dtype, device=g_y.device)
        )
        return torch.where(passed, scaled, closed), None


class InPlace(torch.autograd.Function):
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


class Curve(torch.autograd.Function):
    """y = f(x), saving x quantized in groups along its last axis, or along its channels for an image.

    Returns y, and codes and scales of x, from which f(x) can be made as well.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, form: str, image: bool) -> tuple[Tensor, Tensor, Tensor]:
        y = ACTIVATIONS[name].f(x)
        ordered = x.movedim(1, -1) if image else x
        codes, scale = kernel_ops.keep(ordered, form)
        ctx.save_for_backward(codes, scale)
        ctx.mark_non_differentiable(codes, scale)
        ctx.set_materialize_grads(False)
        ctx.activation, ctx.form, ctx.shape, ctx.image = name, form, ordered.shape, image
        return y, codes, scale

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        x = kernel_ops.restored(ctx.form, ctx.saved_tensors, ctx.shape, torch.promote_types(g_y.dtype, torch.float32))
        slope = ACTIVATIONS[ctx.activation].slope(x.movedim(-1, 1) if ctx.image else x)
        return *once(ctx.activation, ((g_y * slope).to(g_y.dtype),), g_y), None, None, None


# ---- norms: y = γ x̂ + β, x̂ = (x − μ) r ----
#
#   g_x = r (γg − mean(γg) − x̂ mean(γg x̂)),  g_γ = Σ g x̂,  g_β = Σ g
#
# with means over the axes of the statistics. RMSNorm has no μ and no mean(γg).


class Norm(torch.autograd.Function):
    """Layer, RMS, group and batch norm, saving x̂ quantized, and r = 1/σ.

    ``kind`` is ``"layer"``, ``"rms"``, ``"rms_cast"`` (x̂ is rounded to x's dtype before γ, as in transformers),
    ``"group"`` or ``"batch"``. ``dims`` is the number of axes that the statistics reduce; for ``"group"`` the number of
    groups. x is (..., C) for layer and RMS norms, (N, C, ...) for the others. Returns y, and codes and scales of x̂.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        kind: str,
        dims: int,
        eps: float,
        form: str,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        shape = x.shape
        mean: Tensor | None = None
        if kind == "layer":
            y, mean, r = torch.native_layer_norm(x, shape[-dims:], w, b, eps)
        elif kind in ("rms", "rms_cast"):
            lifted = wide(x)
            r = torch.rsqrt(lifted.square().mean(tuple(range(-dims, 0)), keepdim=True) + eps)
            if kind == "rms":
                y = F.rms_norm(x, shape[-dims:], w, eps)
            else:
                normal = (lifted * r).to(x.dtype)
                y = normal if w is None else w * normal
        elif kind == "group":
            count = shape[2:].numel()
            y, mean, r = torch.native_group_norm(_dense(x), w, b, shape[0], shape[1], count, dims, eps)
            mean, r = (wide(t).view(shape[0], dims, 1) for t in (mean, r))
        else:
            # Of an x in another layout PyTorch promises a tracer a result in that layout, and returns one that is not.
            dense = x if kernel_ops.is_eager(x) else x.contiguous(memory_format=memory_format_of(x))
            y, mean, r = torch.native_batch_norm(dense, w, b, running_mean, running_var, True, momentum, eps)
            place = (1, -1, *[1] * (x.dim() - 2))
            mean, r = wide(mean).view(place), wide(r).view(place)

        def normalized() -> Tensor:
            lifted = wide(x) if kind != "group" else wide(x).reshape(shape[0], dims, -1)
            return _channels_last(((lifted if mean is None else lifted - mean) * r).view(shape), kind)

        codes, scale = kernel_ops.keep_normal(x, mean, r, kind, dims, form, normalized)
        ctx.save_for_backward(w, r, codes, scale)
        ctx.mark_non_differentiable(codes, scale)
        ctx.set_materialize_grads(False)
        ctx.kind, ctx.dims, ctx.form, ctx.shape, ctx.dtype = kind, dims, form, shape, x.dtype
        ctx.b_dtype = None if b is None else b.dtype
        return y, codes, scale

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        w, r, *kept = ctx.saved_tensors
        kind, dims, shape = ctx.kind, ctx.dims, ctx.shape
        if kind == "batch":
            grads = _batch_norm_backward(ctx, g_y, w, r, kept)
            return *once("batch norm", grads, g_y, w), *[None] * 7
        made = kernel_ops.row_norm_gradient(g_y, kept, r, w, ctx.dtype, kind, dims, ctx.form)
        if made is not None:
            wants, (of_b, of_w) = ctx.needs_input_grad, made[1]
            grads = (
                made[0] if wants[0] else None,
                of_w.to(w.dtype) if wants[1] else None,
                of_b.to(ctx.b_dtype) if wants[2] else None,
            )
            return *once(f"{kind} norm", grads, g_y, w), *[None] * 7
        g = wide(g_y)
        order = [shape[0], *shape[2:], shape[1]] if kind == "group" else shape
        normal = _channels_first(kernel_ops.restored(ctx.form, kept, order, g.dtype), kind)
        by_token = kind != "group"
        leading = list(range(len(shape) - dims)) if by_token else [0, *range(2, len(shape))]
        g_w = (g * normal).sum(leading).to(w.dtype) if ctx.needs_input_grad[1] else None
        g_b = g.sum(leading).to(ctx.b_dtype) if ctx.needs_input_grad[2] else None
        g_x = None
        if ctx.needs_input_grad[0]:
            scaled = g if w is None else g * (wide(w) if by_token else _along_channels(w, len(shape)))
            if kind == "group":
                scaled, normal = (t.reshape(shape[0], dims, -1) for t in (scaled, normal))
            over = list(range(-dims, 0)) if by_token else [2]
            inner = scaled - normal * (scaled * normal).mean(over, keepdim=True)
            if kind not in ("rms", "rms_cast"):
                inner = inner - scaled.mean(over, keepdim=True)
            g_x = (inner * r).reshape(shape).to(ctx.dtype)
        return *once(f"{kind} norm", (g_x, g_w, g_b), g_y, w), *[None] * 7


def _batch_norm_backward(
    ctx: Any, g: Tensor, w: Tensor | None, r: Tensor, kept: Sequence[Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, γ and β. Both means are g_w and g_b over the count, since γ is constant within a channel.

    Tensors stay in g's dtype and sums are in float32 at least: this halves what a compiler writes between the two.
    """
    shape, full = ctx.shape, torch.promote_types(g.dtype, torch.float32)
    leading, count = [0, *range(2, len(shape))], shape.numel() // shape[1]
    made = kernel_ops.channel_norm_gradient(g, kept, r, w, ctx.form) if ctx.needs_input_grad[0] else None
    if made is not None:
        return (
            made[0].to(ctx.dtype),
            made[1][1].to(w.dtype) if ctx.needs_input_grad[1] and w is not None else None,
            made[1][0].to(ctx.b_dtype) if ctx.needs_input_grad[2] else None,
        )
    normal = _channels_first(kernel_ops.restored(ctx.form, kept, [shape[0], *shape[2:], shape[1]], g.dtype), ctx.kind)
    g_b, g_w = g.sum(leading, dtype=full), (g * normal).sum(leading, dtype=full)
    g_x = None
    if ctx.needs_input_grad[0]:
        mean, slope = (_along_channels(t / count, len(shape)) for t in (g_b, g_w))
        factor = r if w is None else r * _along_channels(w, len(shape))
        g_x = ((g - mean - normal * slope) * factor).to(ctx.dtype)
    return (
        g_x,
        g_w.to(w.dtype) if ctx.needs_input_grad[1] and w is not None else None,
        g_b.to(ctx.b_dtype) if ctx.needs_input_grad[2] else None,
    )


class Normalized(torch.autograd.Function):
    """Fused batch norm: y = f(γ x̂ + β + shortcut) in one kernel, its gradients in two.

    Saves x̂ quantized, r, and the derivative of f in 4 bits or 1 bit per element. x and shortcut are (N, C, H, W) in
    channels-last; mean and r are x's, (C,); ``name`` is f's, "" for none. Returns y, and codes and scales of x̂.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        shortcut: Tensor | None,
        mean: Tensor,
        r: Tensor,
        name: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, codes, scale, marks = torch.ops.hotrain.normalize(x, mean, r, w, b, shortcut, name)
        ctx.save_for_backward(w, r, codes, scale, marks)
        ctx.mark_non_differentiable(codes, scale)
        ctx.set_materialize_grads(False)
        ctx.name, ctx.b_dtype = name, None if b is None else b.dtype
        return y, codes, scale

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        w, r, codes, scale, marks = ctx.saved_tensors
        passes_on = ctx.needs_input_grad[3]
        g = g_y.contiguous(memory_format=torch.channels_last)
        g_x, sums, behind = torch.ops.hotrain.norm_gradient(g, codes, scale, marks, r, w, ctx.name, passes_on)
        g_w = sums[1].to(w.dtype) if ctx.needs_input_grad[1] else None
        g_b = sums[0].to(ctx.b_dtype) if ctx.needs_input_grad[2] else None
        return *once("batch norm", (g_x, g_w, g_b, behind if passes_on else None), g_y, w), *[None] * 3


def _dense(x: Tensor) -> Tensor:
    """x dense, in the layout that PyTorch's group norm takes: on a CPU channels-last is preserved, for slices too."""
    return x.contiguous(memory_format=memory_format_of(x) if x.device.type == "cpu" else torch.contiguous_format)


def _along_channels(w: Tensor, axes: int) -> Tensor:
    return wide(w).view(1, -1, *[1] * (axes - 2))


def _channels_last(t: Tensor, kind: str) -> Tensor:
    return t.movedim(1, -1) if kind in ("group", "batch") else t


def _channels_first(t: Tensor, kind: str) -> Tensor:
    return t.movedim(-1, 1) if kind in ("group", "batch") else t


# ---- softmax: g_x = y (g − Σ g y) ----


class Softmax(torch.autograd.Function):
    """Softmax, saving y quantized. Returns y, and its codes and scales."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, form: str) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.softmax(x, dim)
        codes, scale = GROUPED[form].keep(y.movedim(dim, -1))
        ctx.save_for_backward(codes, scale)
        ctx.mark_non_differentiable(codes, scale)
        ctx.set_materialize_grads(False)
        ctx.dim, ctx.form, ctx.shape = dim, form, y.movedim(dim, -1).shape
        return y, codes, scale

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        g = wide(g_y)
        y = kernel_ops.restored(ctx.form, ctx.saved_tensors, ctx.shape, g.dtype).movedim(-1, ctx.dim)
        g_x = (y * (g - (g * y).sum(ctx.dim, keepdim=True))).to(g_y.dtype)
        return *once("softmax", (g_x,), g_y), None, None


# ---- dropout ----


class Dropout(torch.autograd.Function):
    """Dropout, saving its mask in 1 bit per element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        y, mask = torch.native_dropout(x, p, True)
        ctx.order = memory_order(mask)
        ordered = mask.permute(ctx.order)
        ctx.save_for_backward(*BITS.keep(ordered))
        ctx.p, ctx.shape = p, ordered.shape
        return y

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        mask = as_it_was(restore(BITS, ctx.saved_tensors, ctx.shape), ctx.order)
        scale = 0.0 if ctx.p == 1 else 1 / (1 - ctx.p)
        return torch.where(mask, g_y * scale, 0.0), None


# ---- in which form a factor or a layer's input is saved ----
#
# form: "" for not at all, "exact" for as it is, a format of the policy, or a recipe of `rematerialize` with its
# tensors. A function returns the codes that it packed itself, so that others can share them.

Kept = tuple[Tensor | None, ...]
Given = Sequence[Tensor | None]


def _keep(t: Tensor, form: str, given: Given) -> Kept:
    if form in ("", "exact"):
        return () if not form else (t,)
    return tuple(given) if is_recipe(form) else kernel_ops.keep(t, form)


def _restore(kept: Kept, form: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    if form in ("", "exact"):
        return kept[0] if form else None
    if is_recipe(form):
        return make(form, kept, shape, dtype)
    return kernel_ops.restored(form, kept, shape, dtype)  # type: ignore[arg-type]


def _whole(kept: Kept, form: str, shape: Sequence[int], dtype: torch.dtype, image: bool = False) -> Tensor:
    """`_restore` for a consumer that reads the tensor from memory; of an image, codes are along its channels."""
    if not is_recipe(form):
        form = values(form, shape[1 if image else -1], image)
    return kernel_ops.whole(form, kept, shape, dtype)


def _own(kept: Kept, form: str) -> tuple[Tensor, ...]:
    """Codes and scales, if they were packed here."""
    return kept if form in GROUPED else ()  # type: ignore[return-value]


def _as_results(ctx: Any, *codes: Tensor) -> tuple[Tensor, ...]:
    """Codes as further results of a function, without gradients."""
    ctx.mark_non_differentiable(*codes)
    ctx.set_materialize_grads(False)
    return codes


# ---- products entry by entry: y = a b, g_a = g b, g_b = g a ----


class Product(torch.autograd.Function):
    """y = a b by element, saving the factors that gradients need: large ones quantized, small ones exact.

    ``a_given`` and ``b_given`` are the tensors of their recipes. Groups are along the axis with the smallest stride.
    Returns y, and codes and scales packed here, of a and then of b.
    """

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, a_form: str, b_form: str, a_given: Given, b_given: Given
    ) -> tuple[Tensor, ...]:
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.forms = (a_form if needs_b else "", b_form if needs_a else "")
        ctx.orders = [memory_order(t) if form in GROUPED else None for t, form in zip((a, b), ctx.forms, strict=True)]
        a_kept, b_kept = (
            _keep(t if order is None else t.permute(order), form, given)
            for t, order, form, given in zip((a, b), ctx.orders, ctx.forms, (a_given, b_given), strict=True)
        )
        ctx.split = len(a_kept)
        ctx.save_for_backward(*a_kept, *b_kept)
        ctx.shapes, ctx.dtypes = (a.shape, b.shape), (a.dtype, b.dtype)
        return a * b, *_as_results(ctx, *_own(a_kept, ctx.forms[0]), *_own(b_kept, ctx.forms[1]))

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        saved, split = ctx.saved_tensors, ctx.split
        a = _turned_back(saved[:split], ctx.forms[0], ctx.orders[0], ctx.shapes[0], ctx.dtypes[0])
        b = _turned_back(saved[split:], ctx.forms[1], ctx.orders[1], ctx.shapes[1], ctx.dtypes[1])
        g_a = None if b is None else (g_y * b).sum_to_size(ctx.shapes[0]).to(ctx.dtypes[0])
        g_b = None if a is None else (g_y * a).sum_to_size(ctx.shapes[1]).to(ctx.dtypes[1])
        return *once("product", (g_a, g_b), g_y, a, b), *[None] * 4


def _turned_back(
    kept: Kept, form: str, order: list[int] | None, shape: Sequence[int], dtype: torch.dtype
) -> Tensor | None:
    """`_restore` of what was packed with its axes in that order."""
    if order is None:
        return _restore(kept, form, shape, dtype)
    t = _restore(kept, form, [shape[axis] for axis in order], dtype)
    return None if t is None else as_it_was(t, order)


# ---- products of matrices: y = a b, g_a = g bᵀ, g_b = aᵀ g ----


class Matmul(torch.autograd.Function):
    """y = a b of a (..., I, K) and b (..., K, J), saving its factors as `Product` does.

    Groups are along the axis with stride 1: along K of a transposed b. ``given`` are the tensors of a's recipe.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, a_form: str, b_form: str, given: Given) -> Tensor:
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.forms = (a_form if needs_b else "", b_form if needs_a else "")
        ctx.turned = [_is_turned(t, form) for t, form in zip((a, b), ctx.forms, strict=True)]
        ordered = [_turn(t, turned) for t, turned in zip((a, b), ctx.turned, strict=True)]
        kept = [_keep(t, form, given) for t, form in zip(ordered, ctx.forms, strict=True)]
        ctx.split = len(kept[0])
        ctx.save_for_backward(*kept[0], *kept[1])
        ctx.shapes, ctx.packed_shapes, ctx.dtype = (a.shape, b.shape), [t.shape for t in ordered], a.dtype
        return _unviewed(torch.matmul(a, b))

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        saved, split = ctx.saved_tensors, ctx.split
        a = _restore(saved[:split], ctx.forms[0], ctx.packed_shapes[0], ctx.dtype)
        b = _restore(saved[split:], ctx.forms[1], ctx.packed_shapes[1], ctx.dtype)
        g_a = None if b is None else (g_y @ _turn(b, not ctx.turned[1])).sum_to_size(ctx.shapes[0])
        g_b = None if a is None else (_turn(a, not ctx.turned[0]) @ g_y).sum_to_size(ctx.shapes[1])
        return *once("matmul", (g_a, g_b), g_y, a, b), None, None, None


def _is_turned(t: Tensor, form: str) -> bool:
    return form in GROUPED and t.stride(-1) != 1 and t.stride(-2) == 1


def _turn(t: Tensor, turned: bool) -> Tensor:
    return t.mT if turned else t


# ---- layers that stay exact: the products are exact, the saved x is quantized ----


class Linear(torch.autograd.Function):
    """y = x wᵀ + b, g_x = g w, g_w = gᵀ x, saving x quantized, and w as it is.

    ``given`` are the tensors of x's recipe. Returns y, and codes and scales packed here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, form: str, given: Given) -> tuple[Tensor, ...]:
        form = form if ctx.needs_input_grad[1] else ""
        kept = _keep(x, form, given)
        ctx.save_for_backward(w, *kept)
        ctx.form, ctx.shape, ctx.dtype = form, x.shape, x.dtype
        return _unviewed(F.linear(x, w, b)), *_as_results(ctx, *_own(kept, form))

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        w, *kept = ctx.saved_tensors
        g = g_y.reshape(-1, g_y.shape[-1])
        g_x = (g @ w).view(ctx.shape) if ctx.needs_input_grad[0] else None
        g_w = g_b = None
        if ctx.needs_input_grad[1]:
            x = kept[0] if ctx.form == "exact" else _whole(tuple(kept), ctx.form, ctx.shape, ctx.dtype)
            g_w = g.T @ x.reshape(-1, ctx.shape[-1])
        if ctx.needs_input_grad[2]:
            g_b = g.sum(0)
        return *once("linear", (g_x, g_w, g_b), g_y, w), None, None


class Conv2d(torch.autograd.Function):
    """A convolution, saving x quantized in groups along its channels, and w as it is.

    ``given`` are the tensors of x's recipe. Returns y, and codes and scales packed here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        form: str,
        given: Given,
    ) -> tuple[Tensor, ...]:
        form = form if ctx.needs_input_grad[1] else ""
        kept = _keep(x.movedim(1, -1), form, given)
        ctx.save_for_backward(w, *kept)
        ctx.form, ctx.shape, ctx.dtype = form, x.shape, x.dtype
        ctx.channels_last = x.is_contiguous(memory_format=torch.channels_last)
        ctx.geometry = list(stride), list(padding), list(dilation), groups
        y = torch.ops.aten.convolution(x, w, b, stride, padding, dilation, False, [0, 0], groups)
        return y, *_as_results(ctx, *_own(kept, form))

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        w, *kept = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        if ctx.needs_input_grad[1]:
            x = _whole(tuple(kept), ctx.form, ctx.shape, ctx.dtype, image=True)
            x = x.contiguous(memory_format=torch.channels_last if ctx.channels_last else torch.contiguous_format)
        else:
            x = g_y.new_empty(1).expand(ctx.shape)  # only its shape is read
        g_x, g_w, g_b = torch.ops.aten.convolution_backward(
            g_y, x, w, [w.shape[0]], stride, padding, dilation, False, [0, 0], groups, list(ctx.needs_input_grad[:3])
        )
        return *once("conv2d", (g_x, g_w, g_b), g_y, w), *[None] * 6


# ---- pooling ----


class MaxPool2d(torch.autograd.Function):
    """Max pooling, saving the position of each maximum within its window: 1 byte per output, not an 8-byte index."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil: bool
    ) -> Tensor:
        y, index = torch.ops.aten.max_pool2d_with_indices(x, kernel, stride, padding, [1, 1], ceil)
        top, left = _corners(y, stride, padding)
        inside = (index // x.shape[-1] - top) * kernel[1] + (index % x.shape[-1] - left)
        ctx.save_for_backward(inside.to(torch.uint8))
        ctx.args, ctx.shape, ctx.dtype = (list(kernel), list(stride), list(padding), ceil), x.shape, x.dtype
        ctx.channels_last = x.is_contiguous(memory_format=torch.channels_last)
        return y

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        (inside,) = ctx.saved_tensors
        kernel, stride, padding, ceil = ctx.args
        top, left = _corners(inside, stride, padding)
        inside = inside.to(torch.int64)
        index = (inside // kernel[1] + top) * ctx.shape[-1] + inside % kernel[1] + left
        form = torch.channels_last if ctx.channels_last else torch.contiguous_format
        g_x = torch.ops.aten.max_pool2d_with_indices_backward(
            g_y, _pooled(ctx, g_y), kernel, stride, padding, [1, 1], ceil, index.contiguous(memory_format=form)
        )
        return g_x, None, None, None, None


class AvgPool2d(torch.autograd.Function):
    """Average pooling, saving nothing: backward needs the shape and memory layout of x alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil: bool,
        counts_padding: bool,
        divisor: int | None,
    ) -> Tensor:
        ctx.args, ctx.shape = (list(kernel), list(stride), list(padding), ceil, counts_padding, divisor), x.shape
        ctx.dtype, ctx.channels_last = x.dtype, x.is_contiguous(memory_format=torch.channels_last)
        return torch.ops.aten.avg_pool2d(x, *ctx.args)

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        return torch.ops.aten.avg_pool2d_backward(g_y, _pooled(ctx, g_y), *ctx.args), *[None] * 6


def _pooled(ctx: Any, g_y: Tensor) -> Tensor:
    """A stand-in for the input, of which backward reads the shape and memory layout alone."""
    form = torch.channels_last if ctx.channels_last else torch.contiguous_format
    return torch.empty(ctx.shape, dtype=ctx.dtype, device=g_y.device, memory_format=form)


def _corners(y: Tensor, stride: Sequence[int], padding: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The first row (H', 1) and column (W',) of every window, negative in the padding."""
    rows = torch.arange(y.shape[-2], device=y.device) * stride[0] - padding[0]
    columns = torch.arange(y.shape[-1], device=y.device) * stride[1] - padding[1]
    return rows[:, None], columns
