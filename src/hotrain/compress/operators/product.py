"""Products of two tensors by element and of matrices.

    y = a b by element:  g_a = g b,   g_b = g a
    y = a b of matrices: g_a = g bᵀ,  g_b = aᵀ g

Backward needs both factors: large ones are quantized in groups along their axis with the smallest stride, others are
exact. The forms and the tensors given for them are those of `factor`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...autograd import differentiated_once, not_a_view
from ...saved import as_it_was, memory_order
from .. import rematerialize
from ..formats import FORMATS, GROUPED
from ..rematerialize import in_place_of
from . import gated
from .base import Handlers, Scope, custom_op, direct, lower, without_autocast
from .factor import Given, Kept, forms_of, listed, marked, own, pack, shared, unpack, values_in_order
from .linear import replace_linear


def sources(pair: tuple[Tensor, Tensor], forms: tuple[str, str]) -> tuple[list[Tensor], list[int | None]]:
    """`marked` of both factors."""
    found = [marked(t, form) for t, form in zip(pair, forms, strict=True)]
    return [t for t, _ in found], [number for _, number in found]


# ---- by element ----


@differentiated_once("product")
class Product(torch.autograd.Function):
    """Returns y, and codes and scales packed here, of a and then of b."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, a_form: str, b_form: str, a_given: Given, b_given: Given
    ) -> tuple[Tensor, ...]:
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.forms = (a_form if needs_b else "", b_form if needs_a else "")
        ctx.orders = [memory_order(t) if form in GROUPED else None for t, form in zip((a, b), ctx.forms, strict=True)]
        a_kept, b_kept = (
            pack(t if order is None else t.permute(order), form, given)
            for t, order, form, given in zip((a, b), ctx.orders, ctx.forms, (a_given, b_given), strict=True)
        )
        (a, b), ctx.sources = sources((a, b), ctx.forms)
        ctx.split = len(a_kept)
        ctx.save_for_backward(*a_kept, *b_kept)
        ctx.shapes, ctx.dtypes = (a.shape, b.shape), (a.dtype, b.dtype)
        return a * b, *own(ctx, (a_kept, ctx.forms[0]), (b_kept, ctx.forms[1]))

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        saved, split = ctx.saved_tensors, ctx.split
        a = _unpack_ordered(saved[:split], ctx.forms[0], ctx.orders[0], ctx.shapes[0], ctx.dtypes[0])
        b = _unpack_ordered(saved[split:], ctx.forms[1], ctx.orders[1], ctx.shapes[1], ctx.dtypes[1])
        a, b = (t if t is None else in_place_of(n, t) for n, t in zip(ctx.sources, (a, b), strict=True))
        g_a = None if b is None else (g_y * b).sum_to_size(ctx.shapes[0]).to(ctx.dtypes[0])
        g_b = None if a is None else (g_y * a).sum_to_size(ctx.shapes[1]).to(ctx.dtypes[1])
        return g_a, g_b, *[None] * 4


def _unpack_ordered(
    kept: Kept, form: str, order: list[int] | None, shape: Sequence[int], dtype: torch.dtype
) -> Tensor | None:
    """`unpack` of what was packed with its axes in that order."""
    if order is None:
        return unpack(kept, form, shape, dtype)
    t = unpack(kept, form, [shape[axis] for axis in order], dtype)
    return None if t is None else as_it_was(t, order)


product = custom_op(
    "product(Tensor a, Tensor b, str a_form, str b_form, Tensor?[] a_given, Tensor?[] b_given) -> (Tensor, Tensor[])",
    listed(Product.apply),
    listed(direct(Product)),
)


def _product(scope: Scope, input: Any, other: Any) -> Tensor | None:
    a, b = input, other
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dtype.is_complex or b.dtype.is_complex:
        return None
    # Of a square by its own row of `rules`: what a root or a logarithm makes of it is steepest at its small elements.
    forms = None if a is b else forms_of(a, b, FORMATS["product"])
    if forms is None:
        return None
    scope.record("mul", FORMATS["product"])
    saved = [shared(scope, t, form) for t, form in zip((a, b), forms, strict=True)]
    found = gated.of_pair(scope, (a, b), saved)
    y, made = product(a, b, saved[0][0], saved[1][0], saved[0][1], saved[1][1]) if found is None else found
    # Both are saved and of one shape: the next layer can share them and compute the product again.
    if "exact" not in forms and a.shape == b.shape:
        parts, begin = [], 0
        for t, (form, given) in zip((a, b), saved, strict=True):
            packed_here = form in GROUPED
            recipe = values_in_order(form, t) if packed_here else form
            parts.append((recipe, made[begin : begin + 2] if packed_here else given))
            begin += 2 * packed_here
        if parts[0][0] and parts[1][0]:
            scope.origins.note(y, rematerialize.product(parts[0][0], parts[1][0]), *parts[0][1], *parts[1][1])
    return y  # type: ignore[no-any-return]


# ---- of matrices ----


@differentiated_once("matmul")
class Matmul(torch.autograd.Function):
    """y = a b of a (..., I, K) and b (..., K, J). Groups are along K of a transposed b. ``given`` is for a's form."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, a_form: str, b_form: str, given: Given) -> Tensor:
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.forms = (a_form if needs_b else "", b_form if needs_a else "")
        ctx.transposed = [_is_transposed(t, form) for t, form in zip((a, b), ctx.forms, strict=True)]
        ordered = [t.mT if transposed else t for t, transposed in zip((a, b), ctx.transposed, strict=True)]
        kept = [pack(t, form, given) for t, form in zip(ordered, ctx.forms, strict=True)]
        (a, b), ctx.sources = sources((a, b), ctx.forms)
        ctx.split = len(kept[0])
        ctx.save_for_backward(*kept[0], *kept[1])
        ctx.shapes, ctx.packed_shapes, ctx.dtype = (a.shape, b.shape), [t.shape for t in ordered], a.dtype
        return not_a_view(torch.matmul(a, b))

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        saved, split = ctx.saved_tensors, ctx.split
        a = unpack(saved[:split], ctx.forms[0], ctx.packed_shapes[0], ctx.dtype)
        b = unpack(saved[split:], ctx.forms[1], ctx.packed_shapes[1], ctx.dtype)
        a, b = (
            t if t is None else in_place_of(number, t.mT if transposed else t)
            for t, number, transposed in zip((a, b), ctx.sources, ctx.transposed, strict=True)
        )
        g_a = None if b is None else (g_y @ b.mT).sum_to_size(ctx.shapes[0])
        g_b = None if a is None else (a.mT @ g_y).sum_to_size(ctx.shapes[1])
        return g_a, g_b, None, None, None


def _is_transposed(t: Tensor, form: str) -> bool:
    return form in GROUPED and t.stride(-1) != 1 and t.stride(-2) == 1


matmul = custom_op(
    "kept_matmul(Tensor a, Tensor b, str a_form, str b_form, Tensor?[] a_given) -> Tensor",
    without_autocast(Matmul.apply, lower),
    direct(Matmul),
)


def _matmul(scope: Scope, input: Any, other: Any) -> Tensor | None:
    a, b = input, other
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point() and b.is_floating_point()):
        return None
    forms = forms_of(a, b, FORMATS["matmul"])
    if forms is None:
        return None
    if a.dim() > 2 and b.dim() == 2:
        return replace_linear(scope, a, b.mT)  # as PyTorch computes it
    if a.dim() < 3 or b.dim() < 3:
        scope.buffers.record_full(
            "matmul", "an operand is a vector, or the first one a matrix; only batches of matrices are supported"
        )
        return None
    scope.record("matmul", FORMATS["matmul"])
    a_form, given = shared(scope, a, forms[0])
    return matmul(a, b, a_form, forms[1], given)  # type: ignore[no-any-return]


def _bmm(scope: Scope, input: Any, mat2: Any, out_dtype: Any = None) -> Tensor | None:
    # What `bmm` refuses must stay refused, though `matmul` broadcasts it.
    fits = isinstance(input, Tensor) and isinstance(mat2, Tensor) and input.dim() == mat2.dim() == 3
    if out_dtype is not None or not fits or input.shape[0] != mat2.shape[0]:
        return None
    return _matmul(scope, input, mat2)


HANDLERS: Handlers = {
    **dict.fromkeys((torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, operator.mul), _product),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, operator.matmul), _matmul),
    **dict.fromkeys((torch.bmm, Tensor.bmm), _bmm),
}
