"""A linear layer and the cross entropy of its result in compiled graphs, as language models end: in pieces of classes.

    Y = x wᵀ + b,  L = Σ_t w_t (log Σ_c exp Y_tc − Y_tl) / Σ_t w_t:  g_Y = w_t (softmax(Y) − 1_l) / Σ_t w_t

with w_t = 0 for ignored tokens and 1 for others. Y has an entry for each class of each token, more than all else in
such a model. It is saved in the dtype of the product. Backward has g_Y for a few classes at a time, and from each piece
the gradients of the layer: g_x = Σ g_Y w over the pieces, a sum in float32 of products in their dtype, and each piece's
rows of g_w = g_Yᵀ x and of g_b.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...autograd import differentiated_once, not_a_view
from ...quantize.integer import wide
from ..launcher import launch, opaque, supported
from .base import Handlers, custom_op, lower, without_autocast
from .cross_entropy import reduced
from .factor import Given, input_of, keep_input, own

_PIECE = 1 << 26  # entries of g_Y that exist at a time
_PIECES = 32  # at most: each is a part of the graph
_ALIGNED = 64  # classes of a piece, and of the product on a GPU, are a multiple of it: 128 bytes


@opaque("row_normalizer(Tensor y, int classes) -> Tensor", lambda y, _: y.new_empty(len(y), dtype=wide(y).dtype))
def _row_normalizer(y: Tensor, classes: int) -> Tensor:
    """log Σ exp of each row's first classes, in at least float32; y: (T, V or more), contiguous."""

    def reference() -> Tensor:
        return wide(y[:, :classes]).logsumexp(1)

    if not supported(y.device, y.dtype):
        return reference()
    return launch(y.device, "head.normalizer", reference, y, classes)  # type: ignore[no-any-return]


def _logits_fake(x: Tensor, w: Tensor, b: Tensor | None, classes: int) -> tuple[Tensor, Tensor]:
    y = x.new_empty(*x.shape[:-1], classes)
    return y, y.new_empty(math.prod(x.shape[:-1]), dtype=wide(y).dtype)


@opaque("padded_logits(Tensor x, Tensor w, Tensor? b, int classes) -> (Tensor, Tensor)", _logits_fake, inlined=False)
def _padded_logits(x: Tensor, w: Tensor, b: Tensor | None, classes: int) -> tuple[Tensor, Tensor]:
    """Y of the first classes of a padded weight, contiguous, with `row_normalizer` of it.

    The product has rows of aligned length, Y has not: of the product a few tokens exist at a time, beside Y.
    """
    matrix = x.reshape(-1, x.shape[-1])
    y, normalizers = matrix.new_empty(len(matrix), classes), []
    each = max(_PIECE // len(w) // _ALIGNED, 1) * _ALIGNED
    for first in range(0, len(matrix), each):
        rows = F.linear(matrix[first : first + each], w, b)
        y[first : first + each] = rows[:, :classes]
        normalizers.append(_row_normalizer(rows, classes))
    return y.view(*x.shape[:-1], classes), torch.cat(normalizers)


@opaque(
    "logits_gradient(Tensor y, Tensor normalizers, Tensor labels, Tensor factors, Tensor? other, Tensor[] behind, "
    "int first, int columns) -> Tensor",
    lambda y, *args: y.new_empty(len(y), args[-1]),
    inlined=False,
)
def _logits_gradient(
    y: Tensor, normalizers: Tensor, labels: Tensor, factors: Tensor, other: Tensor | None, behind: Sequence[Tensor],
    first: int, columns: int,
) -> Tensor:  # fmt: skip
    """g_Y of some classes; arguments and result as the kernel's.

    It is computed behind the tensors ``behind``, which it does not read: Inductor may move each operator to the front
    as soon as its arguments exist, and would have g_Y of all classes before it reads any.
    """

    def reference() -> Tensor:
        part = slice(first, first + columns)
        g = (wide(y[:, part]) - normalizers[:, None]).exp()
        g -= (torch.arange(first, first + columns, device=y.device) == labels[:, None]).to(g.dtype)
        g = torch.where(factors[:, None] == 0, 0.0, g * factors[:, None])
        return (g if other is None else g + other[:, part]).to(y.dtype)

    if not supported(y.device, y.dtype):
        return reference()
    given = y, normalizers, labels, factors, other, first, columns
    return launch(y.device, "head.gradient", reference, *given)  # type: ignore[no-any-return]


def _padded(classes: int, device: torch.device) -> int:
    """Classes of the product: rows of other lengths a compiler pads, and copies for each kernel that reads them."""
    return classes if device.type == "cpu" else -(-classes // _ALIGNED) * _ALIGNED


@differentiated_once("cross_entropy")
class LinearCrossEntropy(torch.autograd.Function):
    """Returns the loss, Y or, where it is not ``returned``, nothing of it, and codes and scales packed here.

    ``form`` and ``given`` as of `linear.Linear`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, form: str, given: Given, target: Tensor, ignored: int,
        mean: bool, dtype: torch.dtype, returned: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        x, kept = keep_input(ctx, x, form, given)
        classes = len(w)
        more = _padded(classes, w.device) - classes
        padded = (F.pad(w, (0, 0, 0, more)), None if b is None else F.pad(b, (0, more))) if more else (w, b)
        if returned and more:
            y, normalizers = torch.ops.hotrain.padded_logits(x, *padded, classes)
            rows = y.view(-1, classes)
        else:
            whole = not_a_view(F.linear(x, *padded))
            rows = whole.reshape(-1, classes + more).contiguous()
            normalizers = torch.ops.hotrain.row_normalizer(rows, classes)
            y = whole if returned else whole.new_empty(0)
        counts = target != ignored
        losses = normalizers - wide(rows.gather(1, torch.where(counts, target, 0)[:, None])[:, 0])
        loss, times = reduced(torch.where(counts, losses, 0.0).sum(), counts.sum().to(losses.dtype), mean)
        own_w = w if ctx.needs_input_grad[0] else None
        ctx.classes = classes
        ctx.save_for_backward(own_w, rows, normalizers, torch.where(counts, target, -1), times, *kept)
        return loss.to(dtype), y, *own(ctx, (kept, ctx.form))

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_y: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        w, rows, normalizers, labels, times, *kept = ctx.saved_tensors
        factors = torch.where(labels < 0, 0.0, torch.zeros_like(times) if g is None else times * g)
        other = None if g_y is None else g_y.reshape(len(rows), -1).to(rows.dtype).contiguous()
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        x = input_of(ctx, kept) if needs_w else None
        g_x, of_w, of_b = None, [], []
        behind: list[Tensor] = []
        for first, columns in _pieces(len(rows), ctx.classes):
            d = torch.ops.hotrain.logits_gradient(rows, normalizers, labels, factors, other, behind, first, columns)
            behind = []
            if needs_x:
                behind.append(d @ w[first : first + columns])
                part = wide(behind[0])
                g_x = part if g_x is None else g_x + part
            if x is not None:
                of_w.append(d.T @ x)
                behind.append(of_w[-1])
            if needs_b:
                of_b.append(wide(d).sum(0))
                behind.append(of_b[-1])
        grads = (
            None if g_x is None else g_x.to(ctx.dtype).view(ctx.shape),
            torch.cat(of_w) if of_w else None,
            torch.cat(of_b).to(rows.dtype) if of_b else None,
        )
        return *grads, *[None] * 7


@differentiated_once("cross_entropy")
class Logits(torch.autograd.Function):
    """Logits Y that a graph has computed, with the gradient of their layer: g_x = g_Y w, g_w = g_Yᵀ x, g_b = Σ g_Y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return not_a_view(y.detach())

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_b, _ = ctx.needs_input_grad
        g = g_y.reshape(-1, g_y.shape[-1])
        g_x = (g @ w.to(g.dtype)).to(x.dtype).view(x.shape) if needs_x else None
        g_w = (g.T @ x.reshape(-1, x.shape[-1]).to(g.dtype)).to(w.dtype) if needs_w else None
        g_b = g.sum(0) if needs_b else None
        return g_x, g_w, g_b, None


def _pieces(tokens: int, classes: int) -> list[tuple[int, int]]:
    """The first class of each piece, and how many it has."""
    each = max(_PIECE // tokens, -(-classes // _PIECES), 1)
    each = -(-each // _ALIGNED) * _ALIGNED
    return [(first, min(each, classes - first)) for first in range(0, classes, each)]


def _run(*args: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    loss, y, *made = LinearCrossEntropy.apply(*args)
    return loss, y, made


custom_op(
    "linear_cross_entropy(Tensor x, Tensor w, Tensor? b, str form, Tensor?[] given, Tensor target, int ignored, "
    "bool mean, ScalarType dtype, bool returned) -> (Tensor, Tensor, Tensor[])",
    without_autocast(_run, lower),
)

HANDLERS: Handlers = {}  # `losses` puts the operator into graphs
