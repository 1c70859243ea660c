"""Cross entropy of interpolated logits in compiled graphs, as segmentation has it: a few images at a time.

    Y = A_h X A_wᵀ,  L = Σ_p w_p (log Σ_c exp Y_cp − Y_tp) / Σ_p w_p:  g_Y = w_p (softmax(Y) − 1_t) / Σ_p w_p

Y, its softmax and g_Y have an entry for each class of each pixel, more than all else in such a model. Here forward
computes g_X at once, and saves it, of the size of X: what is of the size of Y exists for a few images only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...autograd import differentiated_once
from ...casting import outside_autocast
from ...quantize.integer import wide
from . import interpolate
from .base import Handlers, custom_op, float32

_PIECE = 1 << 25  # entries of Y that exist at a time, but of one image at least
_PIECES = 32  # at most: each is a part of the graph


@differentiated_once("cross_entropy")
class InterpolatedCrossEntropy(torch.autograd.Function):
    """``size``, ``scales`` and ``corners`` as of `interpolate.Interpolated`; the rest as of PyTorch's function."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, target: Tensor, weight: Tensor | None, size: list[int], scales: list[float],
        corners: bool | None, ignored: int, mean: bool,
    ) -> Tensor:  # fmt: skip
        # Autocast lists the one on a GPU, the other on a CPU.
        dtype = float32("cross_entropy_loss", *float32("log_softmax.int", x))[0].dtype
        with outside_autocast(x):
            total, g_x, of = _with_gradient(x, target, weight, (size, scales, corners), ignored)
            loss, times = reduced(total, of, mean)
        ctx.save_for_backward(g_x, times)
        return loss.to(dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        g_x, times = ctx.saved_tensors
        # 1 / N, and the scale of a loss in float16, are multiplied first: either alone may leave its range.
        return (wide(g_x) * (times * g)).to(g_x.dtype), *[None] * 7


def reduced(total: Tensor, of: Tensor, mean: bool) -> tuple[Tensor, Tensor]:
    """The mean or the sum of losses, and what their gradients are multiplied with: 0 for a mean of nothing."""
    if not mean:
        return total, torch.ones_like(of)
    return total / of, torch.where(of == 0, 0.0, 1 / of)


def _with_gradient(
    x: Tensor, target: Tensor, weight: Tensor | None, how: tuple[Any, ...], ignored: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of all losses in at least float32, its gradient in x's dtype, and the sum of their weights."""
    images, classes, height, width = x.shape
    counts = target != ignored
    label = torch.where(counts, target, 0)
    times = counts.to(wide(x).dtype) if weight is None else torch.where(counts, wide(weight)[label], 0.0)
    numbers = torch.arange(classes, device=x.device).view(1, -1, 1, 1)
    # Images at a time: as many as a piece has, one at least, and so many that there are not too many pieces.
    each = max(1, _PIECE * images // (classes * target.numel()), -(-images // _PIECES))
    sums, gradients = [], []
    for first in range(0, images, each):
        part = slice(first, first + each)
        y = wide(interpolate.plain(x[part], *how))
        labels, factor = label[part].unsqueeze(1), times[part].unsqueeze(1)
        normalizer = y.logsumexp(1, keepdim=True)
        loss = torch.where(counts[part].unsqueeze(1), normalizer - y.gather(1, labels), 0.0)
        sums.append((loss * factor).sum())
        g_y = ((y - normalizer).exp() - (numbers == labels).to(y.dtype)) * factor
        gradients.append(interpolate.gradient(g_y.to(x.dtype), height, width, *how[1:]))
    return torch.stack(sums).sum(), torch.cat(gradients), times.sum()


custom_op(
    "interpolated_cross_entropy(Tensor x, Tensor target, Tensor? weight, int[] size, float[] scales, bool? corners, "
    "int ignored, bool mean) -> Tensor",
    InterpolatedCrossEntropy.apply,
)

HANDLERS: Handlers = {}  # `losses` puts the operator into graphs
