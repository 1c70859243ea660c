"""Batch norm: y = γ x̂ + β with x̂ = (x − μ) r, r = 1/σ, per channel of x (N, C, ...).

    g_x = r γ (g − Σg/n − x̂ Σ(g x̂)/n),  g_γ = Σ g x̂,  g_β = Σ g

with sums over the n elements of a channel. Backward needs γ, r, and x̂, which is quantized along the channels; the next
layer's input is rematerialized from the same codes. Compiled, where the kernels run, batch norm, a shortcut added to it
and an activation function are one operator, y = f(γ x̂ + β + shortcut), which saves f's derivative as well.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...autograd import differentiated_once
from ...kernels import FUNCTIONS, written_over
from ...private import memory_format_of
from ...quantize.integer import wide
from ...saved import Bits
from .. import rematerialize, sharing
from ..codes import channels_last_shape, unpack
from ..formats import GROUPED
from ..launcher import is_eager, launch, opaque, operator_for, supported, supported_in_eager
from ..sharing import Exact, Unfinished
from ..slopes import ACTIVATIONS
from .base import (
    Handlers,
    Scope,
    custom_op,
    direct,
    is_channels_last,
    is_large,
    replaced,
    wants_gradient,
    without_autocast,
)
from .group_norm import Grads, along_channels
from .norm import KERNEL_FORMAT, pack_normalized, saved_format

_BITS = Bits(neighbours=True)
_MOST_CHANNELS = 4096  # of one program's tile
_NO_KERNEL = (
    "compiled formulas are slower than exact, and its kernels take rows, and images in channels_last, of a multiple of "
    f"8 channels up to {_MOST_CHANNELS}; plan='memory' compresses it"
)
_SLOW = (
    "its kernels take images in channels_last: model.to(memory_format=torch.channels_last), and the images, is faster "
    "for convolutions, too; plan='memory' compresses it as it is, more slowly"
)


# ---- reference ----


def _gradients(
    g: Tensor, kept: Sequence[Tensor], w: Tensor | None, r: Tensor, form: str, dtype: torch.dtype, needs_x: bool
) -> Grads:
    """Gradients of x, and of β and γ. Both means of g_x are g_β and g_γ over n, since γ is constant within a channel.

    Tensors stay in g's dtype and sums are in float32 at least: this halves what a compiler writes between the two.
    """
    shape, full = g.shape, torch.promote_types(g.dtype, torch.float32)
    leading, count = [0, *range(2, len(shape))], g.numel() // shape[1]
    normal = unpack(form, kept, channels_last_shape(shape), g.dtype).movedim(-1, 1)
    g_b, g_w = g.sum(leading, dtype=full), (g * normal).sum(leading, dtype=full)
    if not needs_x:
        return None, (g_b, g_w)
    mean, slope = (along_channels(t / count, len(shape)) for t in (g_b, g_w))
    factor = r if w is None else r * along_channels(w, len(shape))
    return ((g - mean - normal * slope) * factor).to(dtype), (g_b, g_w)


# ---- kernels ----


def is_fused(x: Tensor, name: str = "") -> bool:
    """Whether the kernels support batch norm of x with the activation function of that name ("" for none)."""
    in_rows = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    channels = x.shape[1]
    fits = in_rows and name in FUNCTIONS and channels % 8 == 0 and channels <= _MOST_CHANNELS
    return fits and supported(x.device, x.dtype)


def _levels(name: str) -> tuple[int, int] | None:
    """(lowest level, levels per unit) of f's 4-bit derivative; None for a derivative of 1 bit."""
    levels = ACTIVATIONS[name].levels if name else None
    return None if levels is None else (levels.first, levels.per_one)


def _rows(t: Tensor) -> Tensor:
    """(N, C, H, W) as (N H W, C), contiguous: what is made of it is then in channels-last."""
    return t.permute(0, 2, 3, 1).reshape(-1, t.shape[1]).contiguous()


def _image(rows: Tensor, like: Tensor) -> Tensor:
    return rows.view(channels_last_shape(like.shape)).permute(0, 3, 1, 2)


@opaque(
    "channel_statistics(Tensor x) -> (Tensor, Tensor)",
    lambda x: tuple(x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(2)),
)
def _channel_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel, (C,) in float32."""
    rows = _rows(x)

    def reference() -> tuple[Tensor, Tensor]:
        var, mean = torch.var_mean(wide(rows), 0, correction=0)
        return mean.to(torch.float32), var.to(torch.float32)

    mean, var = launch(x.device, "batch_norm.statistics", reference, rows)
    return mean, var


Four = tuple[Tensor, Tensor, Tensor, Tensor]


def _normalize_fake(
    x: Tensor, mean: Tensor, r: Tensor, w: Any, b: Any, shortcut: Any, name: str, y: torch.dtype | None = None
) -> Four:
    channels = x.shape[1]
    rows = x.numel() // channels
    marks = 0 if not name else channels // 8 if _levels(name) is None else channels // 2
    return (
        torch.empty_like(x, dtype=y, memory_format=torch.channels_last),
        x.new_empty(rows, 1, channels // 2, dtype=torch.uint8),
        x.new_empty(rows, 1, 1, dtype=torch.bfloat16),
        x.new_empty(rows, marks, dtype=torch.uint8),
    )


@opaque(
    "normalize(Tensor x, Tensor mean, Tensor r, Tensor? w, Tensor? b, Tensor? shortcut, str name, "
    "ScalarType? y=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _normalize_fake,
)
def _normalize(
    x: Tensor, mean: Tensor, r: Tensor, w: Tensor | None, b: Tensor | None, shortcut: Tensor | None, name: str,
    y: torch.dtype | None = None,
) -> Four:  # fmt: skip
    """The result in channels-last and of dtype y, x's for None; codes and scales of x̂; f's derivative."""
    dtype = y or x.dtype
    rows, added = _rows(x), None if shortcut is None else _rows(shortcut)

    def reference() -> Four:
        normal = (wide(rows) - mean) * r
        v = normal if w is None else normal * wide(w)
        v = (v if b is None else v + wide(b)).to(x.dtype)
        v = v if added is None else v + added
        codes, scale = GROUPED[saved_format()].keep(normal)
        kind = ACTIVATIONS[name] if name else None
        if kind is None:
            return v.to(dtype), codes, scale, x.new_empty(len(v), 0, dtype=torch.uint8)
        if kind.levels is None:
            (marks,) = _BITS.keep(kind.slope(v))
        else:
            (marks,) = kind.levels.keep(v, kind.slope)
        return kind.f(v).to(dtype), codes, scale, marks

    args = (rows, mean, r, w, b, added, name, _levels(name), dtype)
    result, *kept = launch(x.device, "batch_norm.normalize", reference, *args)
    return _image(result, x), kept[0], kept[1], kept[2]


def _norm_gradient_fake(
    g: Tensor, other: Any, codes: Any, scale: Any, marks: Any, r: Tensor, w: Any, name: str, passes_on: bool,
    g_x: torch.dtype | None = None, after: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    behind = torch.empty_like(g, memory_format=torch.channels_last)
    return torch.empty_like(behind, dtype=g_x), r.new_empty(2, g.shape[1]), behind if passes_on else g.new_empty(0)


@opaque(
    "norm_gradient(Tensor g, Tensor? other, Tensor codes, Tensor scale, Tensor marks, Tensor r, Tensor? w, str name, "
    "bool passes_on, ScalarType? g_x=None, Tensor? after=None) -> (Tensor, Tensor, Tensor)",
    _norm_gradient_fake,
)
def _norm_gradient(
    g: Tensor, other: Tensor | None, codes: Tensor, scale: Tensor, marks: Tensor, r: Tensor, w: Tensor | None,
    name: str, passes_on: bool, g_x: torch.dtype | None = None, after: Tensor | None = None, in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """g_x, [Σ g, Σ g x̂] as (2, C), and the shortcut's gradient, empty if not needed; of y's gradient g + other.

    ``g_x`` is its dtype, g's for None; ``after``, of that dtype, is added to it. ``in_place``: the last result is g,
    written to, and g_x, of g's dtype, is `written_over`.
    """
    dtype = g_x or g.dtype
    rows, added = _rows(g), None if other is None else _rows(other)
    total = None if after is None else _rows(after)

    def reference() -> tuple[Tensor, Tensor, Tensor]:
        kind, behind = ACTIVATIONS[name] if name else None, rows if added is None else rows + added
        if kind is not None and kind.levels is None:
            behind = torch.where(_BITS.restore((marks,), rows.shape), behind, 0.0)
        elif kind is not None and kind.levels is not None:
            behind = behind * kind.levels.restore((marks,), rows.shape, rows.dtype)
        lifted = wide(behind)
        normal = GROUPED[saved_format()].restore((codes, scale), rows.shape, lifted.dtype)
        sums = torch.stack([lifted.sum(0), (lifted * normal).sum(0)])
        factor = r if w is None else r * wide(w)
        own = (lifted - sums[0] / len(rows) - normal * (sums[1] / len(rows))) * factor
        own = (own if total is None else own + wide(total)).to(dtype)
        if in_place and passes_on:
            behind = rows.copy_(behind)
        place = written_over(rows, added, passes_on) if in_place else None
        return own if place is None else place.copy_(own), sums, behind if passes_on else g.new_empty(0)

    args = (rows, added, codes, scale, marks, r, w, name, _levels(name), passes_on, dtype, total, in_place)
    result, sums, behind = launch(g.device, "batch_norm.gradient", reference, *args)
    if in_place:
        return _image(result, g), sums, behind
    if passes_on:
        behind = _image(behind.clone() if behind is rows else behind, g)  # results share no memory with arguments
    return _image(result, g), sums, behind


def _norm_gradient_in_place_fake(g: Tensor, other: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
    g_x, sums, _ = _norm_gradient_fake(g, other, *args)
    return g_x if written_over(g, other, args[6]) is None else g.new_empty(0), sums


@opaque(
    "norm_gradient_(Tensor(a!) g, Tensor(b!)? other, Tensor codes, Tensor scale, Tensor marks, Tensor r, Tensor? w, "
    "str name, bool passes_on, ScalarType? g_x=None, Tensor? after=None) -> (Tensor, Tensor)",
    _norm_gradient_in_place_fake,
    inlined=False,
)
def _norm_gradient_in_place(g: Tensor, other: Tensor | None, *args: Any) -> tuple[Tensor, Tensor]:
    """Of `_norm_gradient` the sums, and g_x where it has memory of its own: else it is empty."""
    g_x, sums, _ = _norm_gradient(g, other, *args, in_place=True)
    return g_x if written_over(g, other, args[6]) is None else g.new_empty(0), sums


# ---- autograd functions ----


@differentiated_once("batch norm")
class BatchNorm(torch.autograd.Function):
    """Returns y, and codes and scales of x̂; ``statistics`` are the running mean and variance (C,), and momentum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, form: str, *statistics: Any
    ) -> tuple[Tensor, ...]:
        # Of an x in another layout PyTorch promises a tracer a result in that layout, and returns one that is not.
        dense = x if is_eager(x) else x.contiguous(memory_format=memory_format_of(x))
        running_mean, running_var, momentum = statistics
        y, mean, r = torch.native_batch_norm(dense, w, b, running_mean, running_var, True, momentum, eps)
        mean, r = along_channels(mean, x.dim()), along_channels(r, x.dim())

        def normalized() -> Tensor:
            return ((wide(x) - mean) * r).movedim(1, -1)

        codes, scale = pack_normalized(x.movedim(1, -1), mean, r, form, normalized)
        ctx.save_for_backward(w, r, codes, scale)
        ctx.form, ctx.dtype, ctx.b_dtype = form, x.dtype, None if b is None else b.dtype
        ctx.mark_non_differentiable(codes, scale)
        return y, codes, scale

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        w, r, *kept = ctx.saved_tensors
        needs = ctx.needs_input_grad
        in_eager = ctx.form == KERNEL_FORMAT and supported_in_eager(g_y)
        if needs[0] and in_eager and g_y.dim() == 4 and is_fused(g_y):
            no_marks = g_y.new_empty(0, dtype=torch.uint8)
            g_x, (g_b, g_w), _ = operator_for(g_y, "norm_gradient")(
                g_y, None, *kept, no_marks, r.reshape(-1), w, "", False
            )
            g_x = g_x.to(ctx.dtype)
        else:
            g_x, (g_b, g_w) = _gradients(g_y, kept, w, r, ctx.form, ctx.dtype, needs[0])
        grads = g_x, g_w.to(w.dtype) if needs[1] else None, g_b.to(ctx.b_dtype) if needs[2] else None
        return *grads, *[None] * 5


@differentiated_once("batch norm")
class FusedBatchNorm(torch.autograd.Function):
    """y = f(γ x̂ + β + shortcut) in one kernel, its gradients in two; returns y, and codes and scales of x̂.

    x and shortcut are (N, C, H, W) in channels-last; mean and r are x's, (C,); ``name`` is f's, "" for none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: Tensor, r: Tensor, *args: Any) -> tuple[Tensor, ...]:
        w, b, shortcut, name = args
        y, codes, scale, marks = torch.ops.hotrain.normalize(x, mean, r, w, b, shortcut, name)
        ctx.save_for_backward(w, r, codes, scale, marks)
        ctx.name, ctx.b_dtype = name, None if b is None else b.dtype
        ctx.mark_non_differentiable(codes, scale)
        return y, codes, scale

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        w, r, codes, scale, marks = ctx.saved_tensors
        _, _, _, needs_w, needs_b, passes_on, _ = ctx.needs_input_grad
        g = g_y.contiguous(memory_format=torch.channels_last)
        g_x, sums, behind = torch.ops.hotrain.norm_gradient(g, None, codes, scale, marks, r, w, ctx.name, passes_on)
        g_w = sums[1].to(w.dtype) if needs_w else None
        g_b = sums[0].to(ctx.b_dtype) if needs_b else None
        return g_x, None, None, g_w, g_b, behind if passes_on else None, None


# ---- registration ----

batch_norm = custom_op(
    "batch_norm(Tensor x, Tensor? w, Tensor? b, float eps, str form, Tensor(a!)? running_mean, "
    "Tensor(b!)? running_var, float momentum) -> (Tensor, Tensor, Tensor)",
    without_autocast(BatchNorm.apply),
    direct(BatchNorm),
)
normalized = custom_op(
    "normalized(Tensor x, Tensor mean, Tensor r, Tensor? w, Tensor? b, Tensor? shortcut, str name) "
    "-> (Tensor, Tensor, Tensor)",
    without_autocast(FusedBatchNorm.apply),
)


@without_autocast
def _batch_statistics(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Mean and 1/σ of each channel, (C,) in float32; the running statistics are updated in place."""
    with torch.no_grad():
        mean, var = torch.ops.hotrain.channel_statistics(x)
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            count = x.numel() // x.shape[1]
            running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
        return mean, torch.rsqrt(var + eps)


batch_statistics = custom_op(
    "batch_statistics(Tensor x, Tensor(a!)? running_mean, Tensor(b!)? running_var, float momentum, float eps) "
    "-> (Tensor, Tensor)",
    _batch_statistics,
)


def finished(scope: Scope, what: Unfinished, name: str, like: Tensor, place: Tensor | None = None) -> Tensor:
    """Fused batch norm, shortcut and the activation of this name ("" for none), written to ``place`` if given.

    The result has the shape of ``like``, x's, or that of a view of x as rows (N, C).
    """
    y, codes, scale = normalized(what.x, what.mean, what.r, what.w, what.b, what.shortcut, name)
    image = y.shape == like.shape
    y = y if image else y.view(like.shape)
    if place is not None:
        y = replaced(place, y)
    if what.shortcut is None:
        recipe = rematerialize.normed(saved_format(), what.x.shape[:2], image)
        scope.origins.note(y, rematerialize.of(name, recipe) if name else recipe, codes, scale, what.w, what.b)
    return y


def _batch_norm(
    scope: Scope, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor | None:  # fmt: skip
    if not (is_large(input) and wants_gradient(input, weight, bias)):
        return None
    if not training:
        scope.buffers.record_full(
            "batch_norm", "normalized with running statistics; only batch statistics are supported"
        )
        return None
    if input.dim() < 2:
        return None
    if input.numel() == input.shape[1]:  # one value per channel, which PyTorch refuses
        return None
    compiling = torch.compiler.is_dynamo_compiling()
    pace = None if compiling else scope.buffers.pace
    in_default_layout = input.dim() == 4 and not is_channels_last(input)
    if pace is not None and pace.keeps_exact and in_default_layout and supported_in_eager(input):
        scope.buffers.record_full("batch_norm", _SLOW)
        return None
    rows = compiling and input.dim() == 2 and input.is_contiguous()
    image = input.view(*input.shape, 1, 1) if rows else input
    fused = compiling and is_fused(image)
    if compiling and not fused and scope.buffers.must_not_lose and supported(input.device, input.dtype):
        scope.buffers.record_full("batch_norm", _NO_KERNEL)
        y = F.batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps)
        scope.origins.note_unfinished(y, Exact(input))
        return y
    form = saved_format()
    scope.record("batch_norm", form)
    if fused:
        mean, r = batch_statistics(image, running_mean, running_var, momentum, eps)
        what = Unfinished(image, mean, r, weight, bias)
        y = finished(scope, what, "", input)
        scope.origins.note_unfinished(y, what)
        return y
    y, *codes = batch_norm(input, weight, bias, eps, form, running_mean, running_var, momentum)
    recipe = rematerialize.normed(form, y.shape, image=input.dim() > 2)
    scope.origins.note(y, recipe, *codes, weight, bias)
    return y  # type: ignore[no-any-return]


def _sum(func: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    """A handler of additions: a shortcut is added to batch norm's result in the same kernel."""

    def run(scope: Scope, input: Any, other: Any, *third: Any, **kwargs: Any) -> Tensor | None:
        both = isinstance(input, Tensor) and isinstance(other, Tensor)
        if third or kwargs or not both or input.shape != other.shape:
            return None
        pairs = [(input, other), (other, input)]
        in_place = func in (Tensor.add_, operator.iadd)
        # An in-place sum overwrites its operand, and what shares memory with it.
        for normed, shortcut in pairs[:1] if in_place else pairs:
            what = scope.origins.unfinished_of(normed, Unfinished)
            if what is not None and what.shortcut is None and _is_alike(what.x, shortcut):
                y = func(input, other)
                if not in_place or sharing.read_apart():
                    scope.origins.note_unfinished(y, dataclasses.replace(what, shortcut=shortcut))
                return y
        return None

    return run


def _is_alike(x: Tensor, other: Tensor) -> bool:
    in_rows = other.dim() == 4 and other.is_contiguous(memory_format=torch.channels_last)
    return in_rows and x.shape == other.shape and x.dtype == other.dtype


# Compiled alone: in eager mode no batch norm waits for a shortcut.
SUMS: Handlers = {func: _sum(func) for func in (torch.add, Tensor.add, Tensor.add_, operator.add, operator.iadd)}
HANDLERS: Handlers = {F.batch_norm: _batch_norm, **SUMS}
