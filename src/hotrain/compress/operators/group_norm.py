"""Group norm in x's own memory layout: the formulas, and an operator for compiled graphs that saves x as it is.

PyTorch's operator copies an image in channels_last to its default layout on a GPU, and the gradient. With one channel a
group it is an instance norm. `norm` has the operator that saves codes of x̂, and the definition of both.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...autograd import differentiated_once
from ...geometry import LAID_OUT
from ...quantize.integer import wide
from ..launcher import is_eager
from .base import custom_op, float32, without_autocast

Grads = tuple[Tensor | None, tuple[Tensor | None, Tensor | None]]  # of x, and of β and γ


def stays_in_layout(x: Tensor) -> bool:
    """Whether x is an image of a compiled graph, and in channels_last: PyTorch's operator would copy it on a GPU."""
    laid_out = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return laid_out and x.device.type in LAID_OUT and not is_eager(x)


def of_groups(x: Tensor, w: Tensor | None, b: Tensor | None, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's result in x's memory layout, μ and r."""
    rows = in_groups(wide(x), groups)
    variance, mean = torch.var_mean(rows, (2, 3), correction=0, keepdim=True)
    r = torch.rsqrt(variance + eps)
    y = ((rows - mean) * r).reshape(x.shape)
    y = y if w is None else y * along_channels(w, x.dim())
    y = y if b is None else y + along_channels(b, x.dim())
    return y.to(x.dtype), mean, r


def in_groups(t: Tensor, groups: int) -> Tensor:
    """(N, C, ...) as (N, groups, C / groups, positions)."""
    return t.reshape(t.shape[0], groups, t.shape[1] // groups, -1)


def gradients_of_groups(
    g: Tensor, normal: Tensor, w: Tensor | None, r: Tensor, groups: int, needs: Sequence[bool]
) -> Grads:
    """`norm._gradients` of a group norm: one sum over positions, of which the others are small ones."""
    shape, count = g.shape, g[0].numel() // groups
    each = torch.stack([g.flatten(2).sum(2), (g * normal).flatten(2).sum(2)])  # (2, N, C)
    g_b, g_w = (total if need else None for total, need in zip(each.sum(1), (needs[2], needs[1]), strict=True))
    if not needs[0]:
        return None, (g_b, g_w)
    each = each if w is None else each * w
    means = each.view(2, shape[0], groups, -1).sum(3)[..., None, None] / count
    scaled = in_groups(g if w is None else g * along_channels(w, len(shape)), groups)
    inner = scaled - means[0] - in_groups(normal, groups) * means[1]
    return (inner * r).reshape(shape), (g_b, g_w)


def along_channels(t: Tensor, axes: int) -> Tensor:
    """A vector over channels, shaped to be broadcast along the second of so many axes."""
    return wide(t).view(1, -1, *[1] * (axes - 2))


@differentiated_once("group norm")
class ExactGroupNorm(torch.autograd.Function):
    """A group norm that saves x as it is, of an image in channels_last, in a compiled graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, groups: int, eps: float) -> Tensor:
        y, mean, r = of_groups(x, w, b, groups, eps)
        ctx.save_for_backward(x, w, mean, r)
        ctx.facts = groups, *(None if t is None else t.dtype for t in (w, b))
        return y

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        x, w, mean, r = ctx.saved_tensors
        groups, *dtypes = ctx.facts
        g, lifted, count = wide(g_y), wide(x), x[0].numel() // groups
        # As PyTorch computes them: of Σ g x and Σ g over positions, so that g_x = c g + a x + d with small c, a and d.
        sums = torch.stack([(g * lifted).flatten(2).sum(2), g.flatten(2).sum(2)])  # (2, N, C)
        of_x, of_1 = (sums if w is None else sums * w).view(2, x.shape[0], groups, -1).sum(3)
        m, q = mean.view(-1, groups), r.view(-1, groups)
        a = (of_1 * m - of_x) * q**3 / count
        m, q, a, d = (t.repeat_interleave(x.shape[1] // groups, 1) for t in (m, q, a, -a * m - of_1 * q / count))
        c, a, d = (t[..., None, None] for t in (q if w is None else q * w, a, d))
        g_w, g_b = ((sums[0] - sums[1] * m) * q).sum(0), sums[1].sum(0)
        grads = zip((g * c + lifted * a + d, g_w, g_b), (x.dtype, *dtypes), ctx.needs_input_grad, strict=False)
        return *(t.to(dtype) if needed else None for t, dtype, needed in grads), None, None


exact_group_norm = custom_op(
    "exact_group_norm(Tensor x, Tensor? w, Tensor? b, int groups, float eps) -> Tensor",
    without_autocast(ExactGroupNorm.apply, functools.partial(float32, "group_norm")),
)
