"""The form in which a factor of a product, or a layer's input, is saved.

It is "" for not at all, "exact" for as it is, the name of a format, or a recipe of `rematerialize` with its tensors,
where the operator before has saved the codes already. An autograd function returns the codes that it packed itself, so
that the next operator can share them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...saved import memory_order
from .. import codes, rematerialize
from ..formats import GROUPED
from ..launcher import is_eager
from ..rematerialize import in_place_of, is_in_order, is_recipe, make, source
from .base import Scope, is_large

Kept = tuple[Tensor | None, ...]
Given = Sequence[Tensor | None]  # tensors of a recipe, empty for other forms
Made = tuple[Tensor, list[Tensor]]  # of an operator: the result, and the codes and scales packed there


def pack(t: Tensor, form: str, given: Given) -> Kept:
    """What is saved of t (..., C)."""
    if form in ("", "exact"):
        return () if not form else (t,)
    return tuple(given) if is_recipe(form) else codes.pack(t, form)


def unpack(kept: Kept, form: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
    """The tensor again, None if it was not saved."""
    if form in ("", "exact"):
        return kept[0] if form else None
    if is_recipe(form):
        return make(form, kept, shape, dtype)
    return codes.unpack(form, kept, shape, dtype)  # type: ignore[arg-type]


def materialize(kept: Kept, form: str, shape: Sequence[int], dtype: torch.dtype, image: bool = False) -> Tensor:
    """The tensor again, for a consumer that reads it from memory; of an image, codes are along its channels."""
    if not is_recipe(form):
        form = rematerialize.values(form, shape, image)
    return codes.whole(form, kept, shape, dtype)


def marked(t: Tensor, form: str) -> tuple[Tensor, int | None]:
    """`rematerialize.source` of what is saved approximately; else t, without a number."""
    return (t, None) if form in ("", "exact") else source(t)


def keep_input(ctx: Any, x: Tensor, form: str, given: Given, image: bool = False) -> tuple[Tensor, Kept]:
    """x `marked`, and what is saved of it for g_w, w being the second argument; `input_of` needs this `ctx`."""
    form = form if ctx.needs_input_grad[1] else ""
    ctx.form, ctx.shape, ctx.dtype = form, x.shape, x.dtype
    kept = pack(x.movedim(1, -1) if image else x, form, given)
    x, ctx.source = marked(x, form)
    return x, kept


def input_of(ctx: Any, kept: Sequence[Tensor]) -> Tensor:
    """The x of `keep_input` again, as a matrix (T, C)."""
    form, shape = ctx.form, ctx.shape
    if ctx.source is None and form != "exact" and is_eager(kept[0]) and is_in_order(form):  # type: ignore[arg-type]
        return materialize(tuple(kept), form, _matrix(shape), ctx.dtype)
    x = kept[0] if form == "exact" else materialize(tuple(kept), form, shape, ctx.dtype)
    return in_place_of(ctx.source, x).reshape(-1, shape[-1])


@functools.lru_cache(maxsize=1024)
def _matrix(shape: torch.Size) -> tuple[int, int]:
    """The shape of a tensor's rows."""
    return math.prod(shape[:-1]), shape[-1]


def listed(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Made]:
    """The function, which returns a result and codes, with the codes as a list, as operators return them."""

    def run(*args: Any) -> Made:
        y, *made = function(*args)
        return y, made

    return run


def own(ctx: Any, *packed: tuple[Kept, str]) -> tuple[Tensor, ...]:
    """Codes and scales that were packed here: further results of the autograd function, without gradients."""
    made: Any = tuple(t for kept, form in packed if form in GROUPED for t in kept)
    ctx.mark_non_differentiable(*made)
    return made  # type: ignore[no-any-return]


def forms_of(a: Any, b: Any, form: str) -> tuple[str, str] | None:
    """The forms of a product's factors; None if neither is large and needed by the other's gradient."""
    large_a, large_b = is_large(a) and b.requires_grad, is_large(b) and a.requires_grad
    return (form if large_a else "exact", form if large_b else "exact") if large_a or large_b else None


def shared(scope: Scope, t: Tensor, form: str) -> tuple[str, list[Tensor | None]]:
    """The recipe and tensors of t's origin if that is known; else the form, without tensors."""
    known = None if form == "exact" else scope.origins.of(t)
    return (form, []) if known is None else (known.recipe, list(known.tensors))


def values_in_order(form: str, t: Tensor) -> str:
    """The recipe of codes of t, contiguous or channels-last; "" for other memory layouts."""
    order = memory_order(t)
    if order == list(range(t.dim())):
        return rematerialize.values(form, t.shape)
    return rematerialize.values(form, t.shape, image=True) if order == [0, 2, 3, 1] else ""
