"""The autograd functions: run the exact product forward, keep what the method keeps, call the two gradients.

They decide nothing. A `Step` says what one forward of one layer does; `ctx.needs_input_grad` says what is asked.
All that lives until backward goes through `save_for_backward`, the key of the draws too: a forward recomputed by
activation checkpointing then hands backward its own key together with its own codes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import backward, convolution
from .convolution import Geometry, channels_last
from .method import Method
from .saved import Format
from .transform.tokens import Grid, Layout, layout, project


@dataclass(frozen=True)
class Step:
    """One training forward of one layer.

    key: of its draws.  grid: of its tokens, where known.  transposed: w is (I, O), as in transformers' Conv1D.
    name: of the layer, for messages.
    """

    method: Method
    key: int
    grid: Grid | None = None
    transposed: bool = False
    name: str = "linear"

    def layout(self, lead: tuple[int, ...]) -> Layout:
        """Where the tiles of an input of shape (*lead, C) lie."""
        rows, across = self.method.grad_weight, self.method.grad_input.transform != "lowpass"
        return layout(tuple(lead), rows.tile, rows.rank, rows.sampled, rows.order, self.grid, across)

    def format(self, columns: int, dtype: torch.dtype) -> Format:
        return Format(self.method.saved, columns, dtype)

    def keep(self, x: Tensor) -> tuple[Tensor, ...]:
        """What x, (*lead, C), leaves for grad_weight."""
        wide = x if self.method.saved.bits is None else x.to(backward.wide(x.dtype))
        rows = project(wide, self.layout(x.shape[:-1]), self.key)
        return self.format(x.shape[-1], x.dtype).keep(rows, self.key)

    def pack_key(self) -> tuple[Tensor, ...]:
        """The key as a tensor to save; nothing for a method that draws nothing."""
        if not self.method.draws:
            return ()
        word = self.key & ((1 << 64) - 1)  # as a signed one
        return (torch.tensor(word - (word >> 63 << 64), dtype=torch.int64, device="cpu"),)

    def unpack_key(self, saved: list[Tensor]) -> int:
        """Take the key off the front of the saved tensors."""
        return int(saved.pop(0)) & ((1 << 64) - 1) if self.method.draws else 0


def autocast(t: Tensor) -> Tensor:
    """The tensor as autocast hands it to a product: in its dtype where it is on, float64 excepted."""
    kind = t.device.type
    if t.dtype == torch.float64 or not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return t
    return t.to(torch.get_autocast_dtype(kind))


def _outside_autocast(x: Tensor) -> AbstractContextManager[object]:
    # Casts are made by hand: autocast's cache must not get copies of weights that have no graph.
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


class _SecondDerivative(torch.autograd.Function):
    """Passes gradients on; raises if they are differentiated."""

    @staticmethod
    def forward(ctx: Any, name: str, *grads: Tensor) -> tuple[Tensor, ...]:
        ctx.name = name
        return tuple(g.view_as(g) for g in grads)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError(
            f"hotrain: {ctx.name!r} has no second derivative (its gradients are quantized or low-rank). "
            "Leave the layer exact with filter_fn, or hotrain.revert(model), to differentiate twice."
        )


def _once(name: str, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The gradients as they are; under create_graph, tied to an error that a second derivative meets."""
    if not torch.is_grad_enabled():
        return grads
    present = [g.detach().requires_grad_() for g in grads if g is not None]
    marked = iter(_SecondDerivative.apply(name, *present) if present else ())
    return tuple(None if g is None else next(marked) for g in grads)


class Linear(torch.autograd.Function):
    """``y = x wᵀ + b`` with the two gradients of a method."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, step: Step) -> Tensor:
        x_cast, w_cast, b_cast = autocast(x), autocast(w), None if b is None else autocast(b)
        with _outside_autocast(x):
            y = (_conv1d if step.transposed else F.linear)(x_cast, w_cast, b_cast)
            kept = step.keep(x_cast) if ctx.needs_input_grad[1] else ()
        weight = (w,) if ctx.needs_input_grad[0] else ()
        ctx.save_for_backward(*step.pack_key(), *weight, *kept)
        ctx.step, ctx.shape, ctx.dtype, ctx.x_dtype, ctx.w_dtype = (
            step,
            x.shape,
            x_cast.dtype,
            x.dtype,
            w.dtype,
        )
        return y

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        step, saved = ctx.step, list(ctx.saved_tensors)
        g_x = g_w = g_b = None
        with torch.no_grad(), _outside_autocast(g_y):
            key, lay = step.unpack_key(saved), step.layout(ctx.shape[:-1])
            matrix = g_y.reshape(-1, g_y.shape[-1])
            if ctx.needs_input_grad[0]:
                w = saved.pop(0)
                g_x = backward.grad_input(matrix, w.T if step.transposed else w, step.method, key, lay)
                g_x = g_x.view(ctx.shape).to(ctx.x_dtype)
            if ctx.needs_input_grad[1]:
                kept = step.format(ctx.shape[-1], ctx.dtype).restore(tuple(saved))
                g_w = backward.grad_weight(g_y, kept, lay, step.method, key).to(ctx.w_dtype)
                g_w = g_w.T if step.transposed else g_w
            if ctx.needs_input_grad[2]:
                g_b = matrix.sum(0)
        return (*_once(step.name, (g_x, g_w, g_b)), None)


def _conv1d(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """The product of transformers' Conv1D, to the bit: w is (I, O)."""
    matrix = x.view(-1, x.shape[-1])
    y = matrix @ w if b is None else torch.addmm(b, matrix, w)
    return y.view(*x.shape[:-1], w.shape[1])


class Conv2d(torch.autograd.Function):
    """``y = conv2d(x, w) + b`` with the two gradients of a method."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, step: Step) -> Tensor:
        x_cast, w_cast, b_cast = autocast(x), autocast(w), None if b is None else autocast(b)
        with _outside_autocast(x):
            y = geometry.forward(x_cast, w_cast, b_cast)
            kept: tuple[Tensor, ...] = ()
            if ctx.needs_input_grad[1]:
                tokens = convolution.patches(x_cast, geometry) if geometry.is_patches else channels_last(x_cast)
                kept = step.keep(tokens)
        weight = (w,) if ctx.needs_input_grad[0] else ()
        ctx.save_for_backward(*step.pack_key(), *weight, *kept)
        ctx.step, ctx.geometry, ctx.dtype, ctx.x_dtype, ctx.w_dtype = (
            step,
            geometry,
            x_cast.dtype,
            x.dtype,
            w.dtype,
        )
        ctx.shape, ctx.w_shape = x.shape, w.shape
        return y

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        step, geometry, saved = ctx.step, ctx.geometry, list(ctx.saved_tensors)
        shape, batch = tuple(ctx.shape), ctx.shape[0]
        g_x = g_w = g_b = None
        with torch.no_grad(), _outside_autocast(g_y):
            key = step.unpack_key(saved)
            positions = step.layout((batch, *g_y.shape[2:]))
            if ctx.needs_input_grad[0]:
                g_x = convolution.grad_input(g_y, saved.pop(0), shape, geometry, step.method, key, positions).to(
                    ctx.x_dtype
                )
            if ctx.needs_input_grad[1]:
                lay = positions if geometry.is_patches else step.layout((batch, *shape[2:]))
                like_w = g_y.new_empty(1).expand(ctx.w_shape)  # grad_weight asks w for its shape alone
                columns = like_w[0].numel() if geometry.is_patches else shape[1]
                kept = step.format(columns, ctx.dtype).restore(tuple(saved))
                g_w = convolution.grad_weight(g_y, kept, like_w, shape, geometry, lay, step.method, key)
                g_w = g_w.to(ctx.w_dtype)
            if ctx.needs_input_grad[2]:
                g_b = g_y.sum((0, 2, 3))
        return (*_once(step.name, (g_x, g_w, g_b)), None, None)
